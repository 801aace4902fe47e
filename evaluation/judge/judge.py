"""The judge: programs in, verdicts out, in the same order, whatever the number of workers.

A program never gives a verdict, only values; the values are compared here. Identical programs run once.
"""

import logging
import queue
import sys
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Literal, Protocol, Self

from evaluation.judge import deserialize
from evaluation.judge.asserts import AssertSuite, take_apart
from evaluation.judge.oracles import MBPP_OUTPUT_NOT_NONE_TASKS, MBPP_OUTPUT_SET_EQ_TASKS, Comparison
from evaluation.judge.references import (
    MAX_SUITE_S,
    MIN_TEST_S,
    REFERENCE_SUITE_S,
    REFERENCE_TEST_S,
    TIME_FACTOR,
    Reference,
    ReferenceFailed,
    compute,
)
from evaluation.judge.zygote import SLACK_S, Execution, Job, Zygote, ZygoteDied
from evaluation.records import Outcome, Problem, Program, Verdict

logger = logging.getLogger(__name__)

JUDGE_VERSION = f"judge/1 python{sys.version_info.major}.{sys.version_info.minor}"
TRIES = 3
Suites = Literal["reward", "both"]


class _Suite(Protocol):
    """One suite of one problem, ready to run programs on."""

    def run(self, zygote: Zygote, source: str) -> Execution: ...

    @property
    def size(self) -> int: ...


class _Asserts:
    """A problem's asserts; the reference is run for its times only where a program has been too slow."""

    def __init__(self, problem: Problem) -> None:
        self.problem = problem
        self.parts: AssertSuite = take_apart(problem.entry_point, problem.asserts, problem.setup)
        self.size = self.parts.size
        self.lock = threading.Lock()
        self.times_s: tuple[float, ...] | None = None

    def run(self, zygote: Zygote, source: str) -> Execution:
        """Run a program under EvalPlus's limits: four times the reference, one second at least."""
        run = self._run(zygote, source, [MIN_TEST_S] * self.size, MIN_TEST_S * self.size + SLACK_S)
        if not run.timed_out:
            return run
        times = self._reference_times(zygote)
        if TIME_FACTOR * max(times, default=0.0) <= MIN_TEST_S:
            return run
        limits = [max(MIN_TEST_S, TIME_FACTOR * t) for t in times]
        return self._run(zygote, source, limits, min(MAX_SUITE_S, sum(limits)) + SLACK_S)

    def _reference_times(self, zygote: Zygote) -> tuple[float, ...]:
        with self.lock:
            if self.times_s is None:
                limits = [REFERENCE_TEST_S] * self.size
                self.times_s = self._run(zygote, self.problem.reference, limits, REFERENCE_SUITE_S, timed=True).times_s
            return self.times_s or (0.0,) * self.size

    def _run(
        self, zygote: Zygote, source: str, limits_s: Sequence[float], suite_limit_s: float, timed: bool = False
    ) -> Execution:
        calls = self.parts.calls
        job = Job(
            source=source if calls is not None else f"{source}\n{self.problem.setup}\n",
            mode="calls" if calls is not None else "expressions",
            entry_point=self.problem.entry_point,
            inputs=calls if calls is not None else self.parts.expressions,
            limits_s=limits_s,
            suite_limit_s=suite_limit_s,
            timed=timed and calls is not None,
        )
        return zygote.run(job, self.parts.accepts)


class _Inputs:
    """A suite of inputs, judged against the reference's outputs by EvalPlus's rules."""

    def __init__(self, problem: Problem, raw_inputs: Any, cache: Path | None) -> None:
        self.problem, self.cache = problem, cache
        self.special = problem.problem_id.startswith("Mbpp/")
        self.inputs = [tuple(i) for i in deserialize.inputs(problem.problem_id, raw_inputs)]
        self.as_set = self.special and problem.entry_point in MBPP_OUTPUT_SET_EQ_TASKS
        self.not_none = self.special and problem.entry_point in MBPP_OUTPUT_NOT_NONE_TASKS
        self.size = len(self.inputs)
        self.lock = threading.Lock()
        self.found: Reference | None = None

    def reference(self, zygote: Zygote) -> Reference:
        """Return the reference's answers, computed by whoever asks first."""
        with self.lock:
            if self.found is None:
                self.found = compute(zygote, self.problem, self.inputs, self.as_set, self.not_none, self.cache)
            return self.found

    def run(self, zygote: Zygote, source: str) -> Execution:
        reference = self.reference(zygote)
        comparison = Comparison(
            self.problem.entry_point, self.special, self.problem.atol, self.inputs, reference.values
        )
        job = Job(
            source=source,
            mode="calls",
            entry_point=self.problem.entry_point,
            inputs=self.inputs,
            limits_s=reference.limits_s,
            suite_limit_s=reference.suite_limit_s,
            as_set=self.as_set,
        )
        return zygote.run(job, comparison.accepts)


class Judge:
    """Judges programs of a set of problems; a context manager that owns its caged processes.

    Raises:
        MachineError: the required part of the cage is missing here.
    """

    def __init__(
        self, problems: Sequence[Problem], *, suites: Suites = "both", workers: int = 1, cache: Path | None = None
    ) -> None:
        self.problems = {p.problem_id: p for p in problems}
        self.suites: Suites = suites
        self.num_workers, self.cache = workers, cache
        self.prepared: dict[tuple[str, str], _Suite] = {}
        self.known: dict[tuple[str, str], Verdict] = {}
        self.lock = threading.Lock()
        self.workers = [_Worker() for _ in range(workers)]
        self.workers[0].zygote(numpy=False)  # fails here, not at the first program, where there is no cage
        self._prove_it_can_fail()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """End every caged process."""
        for worker in self.workers:
            worker.close()

    @property
    def cage(self) -> dict[str, Any]:
        """What the cage is made of here."""
        return self.workers[0].zygote(numpy=False).cage

    def judge(self, programs: Sequence[Program], progress: Callable[[int, int], None] | None = None) -> list[Verdict]:
        """Return a verdict for each program, in order.

        Args:
            programs: of problems that the judge was made with.
            progress: called with (done, total) after each distinct program.

        Raises:
            KeyError: a program of an unknown problem.
        """
        keys = [(p.problem_id, p.source.strip()) for p in programs]
        sources = dict(zip(keys, programs, strict=True))
        for problem_id, _ in sources:
            self.problems[problem_id]
        verdicts = {k: self.known[k] for k in sources if k in self.known}
        sources = {k: p for k, p in sources.items() if k not in verdicts}
        num_known = len(verdicts)
        todo: queue.SimpleQueue[Program] = queue.SimpleQueue()
        for program in sources.values():
            todo.put(program)
        errors: list[BaseException] = []

        def work(worker: _Worker) -> None:
            try:
                while not errors:
                    program = todo.get_nowait()
                    verdict = self._judge_one(worker, program)
                    with self.lock:
                        verdicts[program.problem_id, program.source.strip()] = verdict
                        if progress:
                            progress(len(verdicts), num_known + len(sources))
            except queue.Empty:
                return
            except BaseException as e:  # noqa: BLE001  carried to the caller's thread
                errors.append(e)

        threads = [threading.Thread(target=work, args=(w,)) for w in self.workers[1:]]
        for thread in threads:
            thread.start()
        work(self.workers[0])
        for thread in threads:
            thread.join()
        if errors:
            raise errors[0]
        self.known |= {k: v for k, v in verdicts.items() if not v.errored}
        return [verdicts[k] for k in keys]

    def _judge_one(self, worker: "_Worker", program: Program) -> Verdict:
        problem = self.problems[program.problem_id]
        base = self._run(worker, problem, "base", program.source)
        has_plus = self.suites == "both" and problem.plus_inputs is not None
        plus = self._run(worker, problem, "plus", program.source) if has_plus else None
        runs = [r for r in (base, plus) if r is not None]
        return Verdict(
            problem_id=program.problem_id,
            base=base[0],
            plus=plus[0] if plus else None,
            tests_passed=sum(r[1].num_right for r in runs if r[1]),
            tests_total=sum(self._suite(problem, name).size for name, r in (("base", base), ("plus", plus)) if r),
            seconds=round(sum(r[1].seconds for r in runs if r[1]), 6),
            detail="; ".join(r[2] for r in runs if r[2]),
        )

    def _run(
        self, worker: "_Worker", problem: Problem, name: str, source: str
    ) -> tuple[Outcome, Execution | None, str]:
        """Run one suite; a time-out of a program that waited for a core is tried once more before it counts."""
        suite, contended = self._suite(problem, name), False
        detail = ""
        for _ in range(TRIES):
            try:
                run = suite.run(worker.zygote("numpy" in source), source)
            except ZygoteDied as e:
                detail = f"judge: {e}"
                worker.close()
                continue
            except ReferenceFailed as e:
                return Outcome.HARNESS_ERROR, None, str(e)
            if run.timed_out and run.contended and not contended:
                contended = True
                continue
            if run.complete:
                return Outcome.PASS, run, ""
            return (Outcome.TIMEOUT if run.timed_out else Outcome.FAIL), run, f"{name}: {run.detail}"
        return Outcome.HARNESS_ERROR, None, detail

    def _suite(self, problem: Problem, name: str) -> _Suite:
        key = (problem.problem_id, name)
        with self.lock:
            found = self.prepared.get(key)
            if found is None:
                found = self.prepared[key] = self._prepare(problem, name)
            return found

    def _prepare(self, problem: Problem, name: str) -> _Suite:
        if name == "plus":
            return _Inputs(problem, problem.plus_inputs, self.cache)
        if self.suites == "both" and problem.base_inputs is not None:
            return _Inputs(problem, problem.base_inputs, self.cache)
        return _Asserts(problem)

    def _prove_it_can_fail(self) -> None:
        """A judge that cannot fail a wrong program must not start (asserts switched off, a broken cage)."""
        probe = Problem(
            problem_id="Probe/0",
            text="",
            entry_point="double",
            reference="",
            asserts=("assert double(2) == 4", "assert double(3) == 6"),
        )
        suite = _Asserts(probe)
        zygote = self.workers[0].zygote(numpy=False)
        right = suite.run(zygote, "def double(x):\n    return 2 * x\n")
        wrong = suite.run(zygote, "def double(x):\n    return x + 2\n")
        if not right.complete or wrong.complete:
            raise RuntimeError(f"the judge cannot tell right from wrong: {right.detail!r}, {wrong.detail!r}")


class _Worker:
    """One lane: a zygote, and one with numpy once a program needs it."""

    def __init__(self) -> None:
        self.zygotes: dict[bool, Zygote] = {}

    def zygote(self, numpy: bool) -> Zygote:
        """Return the zygote of that kind, started if need be."""
        if numpy not in self.zygotes:
            self.zygotes[numpy] = Zygote(numpy)
        return self.zygotes[numpy]

    def close(self) -> None:
        """End them."""
        for zygote in self.zygotes.values():
            zygote.close()
        self.zygotes.clear()
