"""What is asked of a caged child and what came of it: one program on one suite of one problem."""

import contextlib
import marshal
import os
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Protocol

SLOW_TEST_S = 1.0
"""Tests with a longer limit are told to the child, so that their clock starts with them."""
EVALPLUS_MEMORY_BYTES = 4 << 30
SIZE = struct.Struct("<I")


class JudgeFailed(Exception):
    """The harness failed, not the program; the program must be tried again."""


class ZygoteDied(JudgeFailed):
    """The zygote is gone or does not answer."""


class OutOfMemory(JudgeFailed):
    """The kernel killed the child for want of memory on the machine; it should be tried again alone."""


class Checker(Protocol):
    """Decides whether values are right."""

    def matches(self, index: int, payload: bytes) -> int:
        """Return how many tests from `index` on the batch answers byte for byte, 0 if it must be looked at."""
        ...

    def accepts(self, index: int, raw: bytes) -> bool | None:
        """Return whether one value is right; None if a large one is needed in full."""
        ...

    def accepts_in_full(self, index: int, raw: bytes) -> bool:
        """Return whether a large value is right."""
        ...


@dataclass(frozen=True)
class Job:
    """One program on one suite, as the child gets it: no expected value, no reference."""

    source: str
    entry_point: str
    inputs: bytes
    """Marshalled list: argument tuples, or expressions."""
    limits_s: Sequence[float]
    """Own time of each test."""
    suite_limit_s: float
    setup: str = ""
    """Code that runs after the program, in its namespace."""
    expressions: bool = False
    as_set: bool = False
    timed: bool = False
    """Ask for the processor time and the flags of each value (reference runs only)."""
    whole: bool = False
    """Send large values in full (reference runs only)."""

    @property
    def num_tests(self) -> int:
        """How many values must come."""
        return len(self.limits_s)

    def payload(self, memory_bytes: int) -> bytes:
        """Return the job in the wire format."""
        head = marshal.dumps(
            {
                "source": self.source,
                "setup": self.setup,
                "entry_point": self.entry_point,
                "expressions": self.expressions,
                "as_set": self.as_set,
                "slow": [i for i, limit in enumerate(self.limits_s) if limit > SLOW_TEST_S],
                "timed": self.timed,
                "whole": self.whole,
                "memory": memory_bytes,
            },
            2,
        )
        return b"".join((SIZE.pack(len(head)), head, SIZE.pack(len(self.inputs)), self.inputs))


@dataclass(frozen=True)
class Execution:
    """What came out of one job."""

    num_right: int
    """Tests accepted before the first that was not."""
    complete: bool
    """Every test answered and accepted."""
    timed_out: bool
    contended: bool
    """The program waited for a core for a good part of its time."""
    seconds: float
    """The program's own time."""
    detail: str
    times_s: tuple[float, ...] = ()
    flags: bytes = b""


@cache
def machine_memory() -> int:
    """Return the bytes of memory that this process's machine or control group has."""
    found = [os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")]
    for name in ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes"):
        with contextlib.suppress(OSError, ValueError):
            found.append(int(Path(name).read_text()))
    return min(found)


def memory_limit() -> int:
    """Return the bytes of address space of a program: EvalPlus's 4 GiB, and at most half of the machine."""
    return min(EVALPLUS_MEMORY_BYTES, machine_memory() // 2)
