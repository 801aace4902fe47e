"""Verdicts by the exact answer: no program runs. Same records as the judge's, so everything after it is the same.

Which of the two gives the verdicts is the problems' own affair (`open_judge`): those with an `answer` are read.
"""

from collections.abc import Callable, Sequence
from fractions import Fraction
from pathlib import Path
from typing import Protocol, Self

from evaluation.answers import find_answer
from evaluation.judge import JUDGE_VERSION, Judge
from evaluation.judge.audit import Check
from evaluation.judge.audit import audit as audit_programs
from evaluation.judge.judge import Suites
from evaluation.records import Outcome, Problem, Program, Verdict

EXACT_VERSION = "exact/1"


class Judging(Protocol):
    """What training and evaluation ask of whoever gives the verdicts."""

    version: str

    def __enter__(self) -> Self:
        """Start."""
        ...

    def __exit__(self, *_: object) -> None:
        """Close."""
        ...

    def close(self) -> None:
        """Give up what is held."""
        ...

    def judge(self, programs: Sequence[Program], progress: Callable[[int, int], None] | None = None) -> list[Verdict]:
        """Return a verdict for each program, in order."""
        ...


class ExactMatch:
    """Passes a text whose final answer is the problem's number."""

    version = EXACT_VERSION

    def __init__(self, problems: Sequence[Problem]) -> None:
        """Take every problem whose completions will come."""
        self.right = {p.problem_id: Fraction(p.answer or "") for p in problems}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Nothing is held."""

    def judge(self, programs: Sequence[Program], progress: Callable[[int, int], None] | None = None) -> list[Verdict]:
        """Return a verdict for each text, in order.

        Args:
            programs: whole completions, or the answers found in them.
            progress: called once with (all, all).

        Raises:
            KeyError: a text of an unknown problem.
        """
        verdicts = [_verdict(p, self.right[p.problem_id]) for p in programs]
        if progress is not None:
            progress(len(verdicts), len(verdicts))
        return verdicts


def _verdict(program: Program, right: Fraction) -> Verdict:
    found = find_answer(program.source)
    passed = found == right
    return Verdict(
        problem_id=program.problem_id,
        base=Outcome.PASS if passed else Outcome.FAIL,
        plus=None,
        tests_passed=int(passed),
        tests_total=1,
        seconds=0.0,
        detail="" if passed else "no answer" if found is None else f"{found} and not {right}",
    )


def are_read(problems: Sequence[Problem]) -> bool:
    """Say whether completions of these problems are read and not run.

    Raises:
        ValueError: some have an answer and some have not.
    """
    kinds = {p.answer is not None for p in problems}
    if len(kinds) > 1:
        raise ValueError("problems: some have an answer and some have tests; keep benchmarks apart")
    return kinds == {True}


def open_judge(
    problems: Sequence[Problem],
    *,
    suites: Suites = "both",
    workers: int = 1,
    cache: Path | None = None,
    caged: bool = True,
) -> Judging:
    """Return who gives the verdicts on these problems; arguments as of `Judge`.

    Raises:
        MachineError: programs must run, and there is no cage here.
    """
    if are_read(problems):
        return ExactMatch(problems)
    return Judge(problems, suites=suites, workers=workers, cache=cache, caged=caged)


_PROBLEM = Problem(problem_id="Audit/1", text="", entry_point="", reference="", asserts=(), answer="1250")
_RIGHT = (
    "#### 1250",
    "#### 1,250",
    "#### $1,250.00",
    "12 * 100 = 1200\n#### 12\nno:\n#### 1250 dollars",
    "\\boxed{1250}",
)
_WRONG = (
    "",
    "1250",
    "#### 12500",
    "#### 250",
    "#### -1250",
    "#### 1250.5",
    "#### 12 50",
    "#### 1250 or 1300",
    "#### 1250\n#### 1300",
    "\\boxed{\\frac{1250}{2}}",
)


def audit(problems: Sequence[Problem], caged: bool = True) -> tuple[str, list[Check]]:
    """Show whoever judges these problems planted cheats and honest work; return its version and what it said."""
    if not are_read(problems):
        return JUDGE_VERSION, audit_programs(caged)
    cases = [(text, True) for text in _RIGHT] + [(text, False) for text in _WRONG]
    verdicts = ExactMatch([_PROBLEM]).judge([Program(problem_id="Audit/1", source=text) for text, _ in cases])
    checks = [
        Check(name=repr(text), ok=v.passed == right, detail=v.detail or "passes")
        for (text, right), v in zip(cases, verdicts, strict=True)
    ]
    return EXACT_VERSION, checks
