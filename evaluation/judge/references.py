"""Reference outputs: computed once by running the reference solution in the same cage, kept in a compact file."""

import contextlib
import hashlib
import logging
import marshal
import os
import struct
import sys
import threading
from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path
from typing import Any

from evaluation.files import PARTIAL
from evaluation.judge.jobs import Job, JudgeFailed
from evaluation.judge.wire import Malformed, decode
from evaluation.judge.zygote import Zygote
from evaluation.records import Problem, sha256_json

logger = logging.getLogger(__name__)

MIN_TEST_S = 1.0
TIME_FACTOR = 4.0
MAX_SUITE_S = 60.0
SLACK_S = 2.0
"""What EvalPlus allows a suite beyond its tests."""
REFERENCE_TEST_S, REFERENCE_SUITE_S = 120.0, 600.0
FORMAT = "references/4"
PYTHON = sys.version_info[:2]
_SECONDS = struct.Struct("<d")
_HEAD = 32 + _SECONDS.size


@dataclass(frozen=True)
class Reference:
    """What the reference solution answers on one suite, and how long it takes."""

    values: tuple[bytes, ...]
    """One a test: kind byte and bytes; those over 256 KiB as hashes (the 363 MB of Mbpp/255 are kept nowhere)."""
    flags: bytes
    """One a test: `oracles.FLOATS`, `oracles.BYTEWISE`."""
    times_s: tuple[float, ...]

    @cached_property
    def limits_s(self) -> tuple[float, ...]:
        """EvalPlus's limit of each test: four times the reference, one second at least."""
        return tuple(max(MIN_TEST_S, TIME_FACTOR * t) for t in self.times_s)

    @cached_property
    def suite_limit_s(self) -> float:
        """EvalPlus's limit of the suite, but never below four times the reference's own time (Mbpp/599)."""
        evalplus = min(MAX_SUITE_S, sum(self.limits_s)) + SLACK_S
        return max(evalplus, TIME_FACTOR * sum(self.times_s))


class ReferenceFailed(RuntimeError):
    """The reference solution does not answer every test: the problem cannot be judged."""


class _Keep:
    """Accepts every value that is none of an exception, and keeps it."""

    def __init__(self) -> None:
        self.values: list[bytes] = []

    def matches(self, index: int, payload: bytes) -> int:
        return 0

    def accepts(self, index: int, raw: bytes) -> bool:
        self.values.append(raw)
        return raw[:1] != b"x"

    def accepts_in_full(self, index: int, raw: bytes) -> bool:
        return True


class Stored:
    """The file of one suite's reference answers: `sha256 of the rest, seconds of the whole suite, marshalled rest`."""

    def __init__(
        self, problem: Problem, raw_inputs: bytes, size: int, as_set: bool, not_none: bool, cache: Path | None
    ) -> None:
        self.problem, self.raw_inputs, self.size, self.as_set, self.not_none = (
            problem, raw_inputs, size, as_set, not_none,
        )  # fmt: skip
        inputs_hash = hashlib.sha256(raw_inputs).hexdigest()
        self.key = bytes.fromhex(
            sha256_json(
                [FORMAT, problem.reference, problem.entry_point, inputs_hash, as_set, not_none, PYTHON, cpu_name()]
            )
        )
        self.path = cache / f"{self.key.hex()[:32]}.ref" if cache is not None else None
        self.digest: bytes | None = None
        """Of the file, once it is there: other times make other limits, and another digest."""
        self.cost_s = 0.0
        self._peek()

    def _peek(self) -> None:
        if self.path is not None:
            with contextlib.suppress(OSError), self.path.open("rb") as f:
                self._head(f.read(_HEAD))

    def _head(self, head: bytes) -> None:
        if len(head) == _HEAD:
            self.digest = head[:32]
            self.cost_s = _SECONDS.unpack(head[32:])[0]

    def load(self) -> Reference | None:
        """Read the file; a damaged one is computed again."""
        if self.path is None:
            return None
        try:
            raw = self.path.read_bytes()
            if raw[:32] != hashlib.sha256(raw[32:]).digest():
                raise Malformed("hash")
            values, flags, times = decode(raw[_HEAD:])
        except FileNotFoundError:
            return None
        except (OSError, Malformed, TypeError, ValueError) as e:
            logger.warning("%s: damaged (%s), computed again", self.path, e)
            return None
        if len(values) != self.size:
            return None
        self._head(raw[:_HEAD])
        return Reference(tuple(values), flags, tuple(times))

    def store(self, reference: Reference) -> None:
        """Write the file, under another name first."""
        if self.path is None:
            return
        rest = _SECONDS.pack(sum(reference.times_s))
        rest += marshal.dumps([list(reference.values), reference.flags, list(reference.times_s)], 2)
        head = hashlib.sha256(rest).digest()
        self.path.parent.mkdir(parents=True, exist_ok=True)
        partial = self.path.with_name(f"{self.path.name}.{os.getpid()}-{threading.get_ident()}{PARTIAL}")
        partial.write_bytes(head + rest)
        partial.replace(self.path)
        self._head(head + rest[: _SECONDS.size])


def compute(zygote: Zygote, stored: Stored) -> Reference:
    """Return the reference's answers, from the file if it has them.

    Raises:
        ReferenceFailed: the reference raises, or runs out of time.
        JudgeFailed: the harness failed.
    """
    found = stored.load()
    if found is not None:
        return found
    problem = stored.problem
    job = Job(
        source=problem.reference,
        entry_point=problem.entry_point,
        inputs=stored.raw_inputs,
        limits_s=[REFERENCE_TEST_S] * stored.size,
        suite_limit_s=REFERENCE_SUITE_S,
        as_set=stored.as_set,
        timed=True,
    )
    keep = _Keep()
    run = zygote.run(job, keep)
    if not run.complete:
        raise ReferenceFailed(f"{problem.problem_id}: the reference solution fails ({run.detail})")
    values = [_not_none(v) for v in keep.values] if stored.not_none else keep.values
    flags = b"\2" * len(values) if stored.not_none else run.flags
    reference = Reference(tuple(values), flags, run.times_s)
    stored.store(reference)
    return reference


def compute_in_full(zygote: Zygote, problem: Problem, arguments: Any, as_set: bool) -> bytes:
    """Return one large answer of the reference again, every byte of it.

    Raises:
        JudgeFailed: the reference does not answer this time.
    """
    job = Job(
        source=problem.reference,
        entry_point=problem.entry_point,
        inputs=marshal.dumps([arguments], 2),
        limits_s=[REFERENCE_TEST_S],
        suite_limit_s=REFERENCE_SUITE_S,
        as_set=as_set,
        whole=True,
    )
    keep = _Keep()
    if not zygote.run(job, keep).complete:
        raise JudgeFailed(f"{problem.problem_id}: the reference solution does not answer again")
    return keep.values[0]


def _not_none(raw: bytes) -> bytes:
    """EvalPlus expects True where the reference's value is not None."""
    return b"vF" if raw == b"vN" else b"vT"


@cache
def cpu_name() -> str:
    """Return this processor's name: times measured on another decide nothing here."""
    try:
        with Path("/proc/cpuinfo").open() as f:
            return next((line.partition(":")[2].strip() for line in f if line.startswith("model name")), "")
    except OSError:
        return ""
