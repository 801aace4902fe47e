"""Reference outputs: computed once by running the reference solution in the same cage, kept in a compact file."""

import hashlib
import logging
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from evaluation.files import PARTIAL
from evaluation.judge.wire import Malformed, decode
from evaluation.judge.zygote import SLACK_S, Job, Zygote
from evaluation.records import Problem, sha256_json

logger = logging.getLogger(__name__)

MIN_TEST_S = 1.0
TIME_FACTOR = 4.0
MAX_SUITE_S = 60.0
REFERENCE_TEST_S, REFERENCE_SUITE_S = 120.0, 600.0
FORMAT = "references/2"


@dataclass(frozen=True)
class Reference:
    """What the reference solution answers on one suite, and how long it takes."""

    values: tuple[bytes, ...]
    times_s: tuple[float, ...]

    @property
    def limits_s(self) -> tuple[float, ...]:
        """EvalPlus's limit of each test: four times the reference, one second at least."""
        return tuple(max(MIN_TEST_S, TIME_FACTOR * t) for t in self.times_s)

    @property
    def suite_limit_s(self) -> float:
        """EvalPlus's limit of the suite, but never below four times the reference's own time (Mbpp/599)."""
        evalplus = min(MAX_SUITE_S, sum(self.limits_s)) + SLACK_S
        return max(evalplus, TIME_FACTOR * sum(self.times_s))


class ReferenceFailed(RuntimeError):
    """The reference solution does not answer every test: the problem cannot be judged."""


def compute(
    zygote: Zygote, problem: Problem, inputs: Sequence[Any], as_set: bool, not_none: bool, cache: Path | None
) -> Reference:
    """Return the reference's answers, from the cache file if it has them.

    Raises:
        ReferenceFailed: the reference raises, or runs out of time.
    """
    key = sha256_json(
        [FORMAT, problem.reference, problem.entry_point, repr(inputs), as_set, not_none, sys.version_info[:2]]
    )
    path = cache / f"{key[:32]}.ref" if cache is not None else None
    found = _load(path, len(inputs)) if path is not None else None
    if found is not None:
        return found
    job = Job(
        source=problem.reference,
        mode="calls",
        entry_point=problem.entry_point,
        inputs=inputs,
        limits_s=[REFERENCE_TEST_S] * len(inputs),
        suite_limit_s=REFERENCE_SUITE_S,
        as_set=as_set,
        timed=True,
    )
    run = zygote.run(job, lambda _, raw: raw[:1] in {b"v", b"h"}, keep_values=True)
    if not run.complete:
        raise ReferenceFailed(f"{problem.problem_id}: the reference solution fails ({run.detail})")
    values = tuple(_not_none(v) for v in run.values) if not_none else run.values
    reference = Reference(values, run.times_s)
    if path is not None:
        _store(path, reference)
    return reference


def _not_none(raw: bytes) -> bytes:
    """EvalPlus expects True where the reference's value is not None."""
    return b"vF" if raw == b"vN" else b"vT"


def _load(path: Path, count: int) -> Reference | None:
    """Read a cache file; a damaged one is computed again."""
    try:
        raw = path.read_bytes()
        if raw[:32] != hashlib.sha256(raw[32:]).digest():
            raise Malformed("hash")
        values, times = decode(raw[32:])
    except FileNotFoundError:
        return None
    except (Malformed, TypeError, ValueError) as e:
        logger.warning("%s: damaged (%s), computed again", path, e)
        return None
    return Reference(tuple(values), tuple(times)) if len(values) == count else None


def _store(path: Path, reference: Reference) -> None:
    import marshal

    body = marshal.dumps((list(reference.values), list(reference.times_s)), 2)
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f"{path.name}.{os.getpid()}{PARTIAL}")
    partial.write_bytes(hashlib.sha256(body).digest() + body)
    partial.replace(path)
