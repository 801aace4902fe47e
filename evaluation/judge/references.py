"""Reference outputs: computed once by running the reference solution in the same cage, kept in a compact file."""

import hashlib
import logging
import marshal
import os
import sys
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from evaluation.files import PARTIAL
from evaluation.judge.wire import Malformed, decode
from evaluation.judge.zygote import SLACK_S, Job, JudgeFailed, Zygote
from evaluation.records import Problem, sha256_json

logger = logging.getLogger(__name__)

MIN_TEST_S = 1.0
TIME_FACTOR = 4.0
MAX_SUITE_S = 60.0
REFERENCE_TEST_S, REFERENCE_SUITE_S = 120.0, 600.0
FORMAT = "references/3"


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


def compute(
    zygote: Zygote, problem: Problem, inputs: Sequence[Any], as_set: bool, not_none: bool, cache: Path | None
) -> Reference:
    """Return the reference's answers, from the cache file if it has them.

    Raises:
        ReferenceFailed: the reference raises, or runs out of time.
    """
    raw_inputs = marshal.dumps(list(inputs), 2)
    inputs_hash = hashlib.sha256(raw_inputs).hexdigest()
    key = sha256_json(
        [FORMAT, problem.reference, problem.entry_point, inputs_hash, as_set, not_none, sys.version_info[:2], _cpu()]
    )
    path = cache / f"{key[:32]}.ref" if cache is not None else None
    found = _load(path, len(inputs)) if path is not None else None
    if found is not None:
        return found
    job = Job(
        source=problem.reference,
        entry_point=problem.entry_point,
        inputs=raw_inputs,
        limits_s=[REFERENCE_TEST_S] * len(inputs),
        suite_limit_s=REFERENCE_SUITE_S,
        as_set=as_set,
        timed=True,
    )
    keep = _Keep()
    run = zygote.run(job, keep)
    if not run.complete:
        raise ReferenceFailed(f"{problem.problem_id}: the reference solution fails ({run.detail})")
    values = [_not_none(v) for v in keep.values] if not_none else keep.values
    reference = Reference(tuple(values), run.flags if not not_none else b"\2" * len(values), run.times_s)
    if path is not None:
        _store(path, reference)
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


def _cpu() -> str:
    """Return this processor's name: times measured on another decide nothing here."""
    try:
        with Path("/proc/cpuinfo").open() as f:
            return next((line.partition(":")[2].strip() for line in f if line.startswith("model name")), "")
    except OSError:
        return ""


def _load(path: Path, count: int) -> Reference | None:
    """Read a cache file; a damaged one is computed again."""
    try:
        raw = path.read_bytes()
        if raw[:32] != hashlib.sha256(raw[32:]).digest():
            raise Malformed("hash")
        values, flags, times = decode(raw[32:])
    except FileNotFoundError:
        return None
    except (OSError, Malformed, TypeError, ValueError) as e:
        logger.warning("%s: damaged (%s), computed again", path, e)
        return None
    return Reference(tuple(values), flags, tuple(times)) if len(values) == count else None


def _store(path: Path, reference: Reference) -> None:
    body = marshal.dumps([list(reference.values), reference.flags, list(reference.times_s)], 2)
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f"{path.name}.{os.getpid()}-{threading.get_ident()}{PARTIAL}")
    partial.write_bytes(hashlib.sha256(body).digest() + body)
    partial.replace(path)
