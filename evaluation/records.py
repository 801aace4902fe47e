"""The records that cross files and processes: frozen, closed, and hashed by their canonical JSON.

problem -> prompt -> completion -> program -> verdict; a checkpoint's verdicts make its score.
"""

import hashlib
import json
from enum import StrEnum
from typing import Any, Self

from pydantic import BaseModel, ConfigDict, Field


class Record(BaseModel):
    """Base of every stored record: frozen, unknown keys are errors."""

    model_config = ConfigDict(frozen=True, extra="forbid", populate_by_name=True, serialize_by_alias=True)

    def replace(self, **changes: Any) -> Self:
        """Return a copy with other values, checked like a new record (pydantic's `model_copy` does not check)."""
        return type(self).model_validate({**{f: getattr(self, f) for f in type(self).model_fields}, **changes})


def canonical_json(value: Any) -> str:
    """Return the one JSON text of `value` (sorted keys, no spaces, no NaN) that hashes are taken of."""
    if isinstance(value, BaseModel):
        value = value.model_dump(mode="json")
    return json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=False)


def sha256_json(value: Any) -> str:
    """Return the hex sha256 of the canonical JSON of `value`."""
    return hashlib.sha256(canonical_json(value).encode()).hexdigest()


class Outcome(StrEnum):
    """What became of one program on one suite."""

    PASS = "pass"
    FAIL = "fail"
    """A wrong answer or an exception of the program's own."""
    TIMEOUT = "timeout"
    """Any time limit was hit."""
    HARNESS_ERROR = "harness_error"
    """The judge failed, not the program: never counted as a wrong answer."""


class Problem(Record):
    """One benchmark item in the shape all benchmarks share.

    A suite is either a tuple of input lists judged against the reference's outputs (EvalPlus's form) or, where
    `base_inputs` is None, the asserts. A problem with an `answer` has neither: its one suite is the right number.
    """

    problem_id: str
    """EvalPlus's task id, `Mbpp/2`; `Gsm8k/10368` is row 368 of the test file; generated ones are `Toy/17`."""
    text: str
    """The statement in words, without asserts, stripped."""
    entry_point: str
    """Name of the function that the tests call; empty where there is none."""
    reference: str
    """A program that solves it (LF line ends), or a worked solution with its answer."""
    setup: str = ""
    """Code that MBPP runs before its asserts (`test_setup_code`)."""
    asserts: tuple[str, ...]
    """MBPP's asserts, one statement each; the first is shown in the prompt."""
    base_inputs: Any = None
    """Argument lists of the base suite as stored in the file, or None: the asserts are the base suite."""
    plus_inputs: Any = None
    """Argument lists of the plus suite as stored in the file, or None: the problem has one suite."""
    atol: float = 0.0
    """Absolute tolerance of float comparison (EvalPlus)."""
    answer: str | None = Field(default=None, exclude_if=lambda value: value is None)
    """The right number (`-1250`, `1/2`), where a completion is read and not run."""

    @property
    def number(self) -> int:
        """The integer id: 2 for `Mbpp/2`."""
        return int(self.problem_id.rsplit("/", 1)[-1])


class Program(Record):
    """A program to judge: extracted source that claims to solve a problem."""

    problem_id: str
    source: str


class Verdict(Record):
    """The judge's word on one program."""

    problem_id: str
    base: Outcome
    plus: Outcome | None
    """None where the problem has one suite or the plus suite was not asked for."""
    tests_passed: int
    tests_total: int
    """Tests of the suites that ran, not of those skipped after a failure."""
    seconds: float
    """The program's own time, not waiting time."""
    detail: str = ""
    """A short reason for people and logs (`SyntaxError`, `test 3: wrong answer`, ...)."""

    @property
    def passed(self) -> bool:
        """True when every suite that exists passed."""
        return self.base is Outcome.PASS and self.plus in {None, Outcome.PASS}

    @property
    def errored(self) -> bool:
        """True when a suite has no verdict because the harness failed."""
        return Outcome.HARNESS_ERROR in {self.base, self.plus}


class Sample(Record):
    """One evaluation completion, a row of samples.jsonl (EvalPlus's `task_id` and `solution`)."""

    task_id: str
    index: int
    """0 .. n-1 within the problem; a retried draw has the same index and the same text."""
    completion: str
    solution: str
    """The program extracted from the completion by the prompt specification."""
    finish_reason: str
    """`stop` or `length`."""
    num_tokens: int
