"""The suites of a problem, ready to run programs on: MBPP's asserts, or inputs with the reference's answers."""

import hashlib
import marshal
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

from evaluation.judge import deserialize
from evaluation.judge.asserts import AssertSuite, take_apart
from evaluation.judge.jobs import Checker, Job
from evaluation.judge.oracles import Comparison, InFull, compared_as_set, compared_with_none
from evaluation.judge.references import (
    MAX_SUITE_S,
    MIN_TEST_S,
    REFERENCE_SUITE_S,
    REFERENCE_TEST_S,
    SLACK_S,
    TIME_FACTOR,
    Reference,
    ReferenceFailed,
    Stored,
    compute,
    compute_in_full,
    cpu_name,
)
from evaluation.judge.zygote import Zygote
from evaluation.records import Problem


class Suite(Protocol):
    """One suite of one problem."""

    size: int
    """Number of tests."""

    def load(self, zygote: Zygote) -> None:
        """Make ready what programs are judged by, once; others wait.

        Raises:
            ReferenceFailed: the reference solution does not answer.
            JudgeFailed: the harness failed.
        """
        ...

    def job(self, zygote: Zygote, source: str) -> tuple[Job, Checker]:
        """Return what the child gets, and what decides about its values."""
        ...

    def relax(self, zygote: Zygote, job: Job) -> bool:
        """After a time-out of this job: return whether its limits were too short, and are longer now."""
        ...

    @property
    def identity(self) -> bytes | None:
        """What a verdict depends on besides program and judge; None while that is not known."""
        ...

    @property
    def cost_s(self) -> float:
        """The reference's own time, as far as it is known."""
        ...


class Asserts:
    """A problem's asserts; the reference is run for its times only where a program has been too slow."""

    def __init__(self, problem: Problem) -> None:
        self.problem = problem
        self.parts: AssertSuite = take_apart(problem.entry_point, problem.asserts, problem.setup)
        self.size = self.parts.size
        self.inputs = marshal.dumps(list(self.parts.expressions if self.parts.calls is None else self.parts.calls), 2)
        self.lock = threading.Lock()
        self.limits_s = (MIN_TEST_S,) * self.size
        self.timed = False

    def load(self, zygote: Zygote) -> None:
        """Nothing is needed."""

    def job(self, zygote: Zygote, source: str) -> tuple[Job, Checker]:
        """Return the job under EvalPlus's limits: four times the reference, one second at least."""
        return self._job(source, self.limits_s, min(MAX_SUITE_S, sum(self.limits_s)) + SLACK_S), self.parts

    def relax(self, zygote: Zygote, job: Job) -> bool:
        """Time the reference, at the first time-out; that decides once whether the limits grow."""
        with self.lock:
            if not self.timed:
                limits_s = (REFERENCE_TEST_S,) * self.size
                timing = self._job(self.problem.reference, limits_s, REFERENCE_SUITE_S, timed=True)
                times = zygote.run(timing, self.parts).times_s
                self.limits_s = tuple(max(MIN_TEST_S, TIME_FACTOR * t) for t in times) or self.limits_s
                self.timed = True
            return self.limits_s != job.limits_s

    def _job(self, source: str, limits_s: Sequence[float], suite_limit_s: float, timed: bool = False) -> Job:
        return Job(
            source=source,
            setup=self.problem.setup,
            expressions=self.parts.calls is None,
            entry_point=self.problem.entry_point,
            inputs=self.inputs,
            limits_s=limits_s,
            suite_limit_s=suite_limit_s,
            timed=timed,
        )

    @property
    def identity(self) -> bytes | None:
        """The problem; limits follow from it and the machine."""
        p = self.problem
        return marshal.dumps(["asserts", p.entry_point, list(p.asserts), p.setup, p.reference, cpu_name()], 2)

    @property
    def cost_s(self) -> float:
        """Next to nothing."""
        return 0.0


class Inputs:
    """A suite of inputs, judged against the reference's outputs by EvalPlus's rules."""

    def __init__(self, problem: Problem, raw_inputs: Any, cache: Path | None) -> None:
        self.problem = problem
        self.family = problem.problem_id.partition("/")[0]
        self.inputs = [tuple(i) for i in deserialize.inputs(problem.problem_id, raw_inputs)]
        self.raw_inputs = marshal.dumps(self.inputs, 2)
        self.as_set = self.family == "Mbpp" and compared_as_set(problem.entry_point)
        self.not_none = self.family == "Mbpp" and compared_with_none(problem.entry_point)
        self.size = len(self.inputs)
        self.stored = Stored(problem, self.raw_inputs, self.size, self.as_set, self.not_none, cache)
        self.lock = threading.Lock()
        self.found: tuple[Reference, Comparison] | None = None
        self.failed: ReferenceFailed | None = None

    def load(self, zygote: Zygote) -> None:
        """Read the reference's answers, or compute them."""
        self._reference(zygote)

    def _reference(self, zygote: Zygote) -> tuple[Reference, Comparison]:
        found = self.found
        if found is not None:
            return found
        with self.lock:
            if self.failed is not None:
                raise self.failed
            if self.found is None:
                try:
                    reference = compute(zygote, self.stored)
                except ReferenceFailed as e:
                    self.failed = e  # it would fail again, after as long
                    raise
                self.found = reference, self._comparison(reference)
            return self.found

    def _comparison(self, reference: Reference) -> Comparison:
        p = self.problem
        return Comparison(p.entry_point, self.family, p.atol, self.inputs, reference.values, reference.flags)

    def job(self, zygote: Zygote, source: str) -> tuple[Job, Checker]:
        """Return the job under the limits that follow from the reference's times."""
        reference, comparison = self._reference(zygote)
        job = Job(
            source=source,
            entry_point=self.problem.entry_point,
            inputs=self.raw_inputs,
            limits_s=reference.limits_s,
            suite_limit_s=reference.suite_limit_s,
            as_set=self.as_set,
        )

        def in_full(index: int) -> bytes:
            return compute_in_full(zygote, self.problem, self.inputs[index], self.as_set)

        return job, InFull(comparison, in_full)

    def relax(self, zygote: Zygote, job: Job) -> bool:
        """The limits are measured already."""
        return False

    @property
    def identity(self) -> bytes | None:
        """The reference's file: answers, limits and inputs; with what else the comparison looks at."""
        digest = self.stored.digest
        if digest is None:
            return None
        words = f"{self.family} {self.problem.entry_point} {self.problem.atol!r}".encode()
        return digest + self.stored.key + hashlib.sha256(words).digest()

    @property
    def cost_s(self) -> float:
        """The reference's time on the whole suite."""
        return self.stored.cost_s
