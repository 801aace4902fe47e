"""The judge: programs in, verdicts out, in the same order, whatever the number of workers.

A program never gives a verdict, only values; the values are compared here. Identical programs run once.
"""

import collections
import contextlib
import hashlib
import logging
import marshal
import os
import signal
import sys
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Literal, Protocol, Self

from evaluation.judge import deserialize
from evaluation.judge.asserts import AssertSuite, take_apart
from evaluation.judge.oracles import Comparison, InFull, compared_as_set, compared_with_none
from evaluation.judge.references import (
    MAX_SUITE_S,
    MIN_TEST_S,
    REFERENCE_SUITE_S,
    REFERENCE_TEST_S,
    TIME_FACTOR,
    Reference,
    ReferenceFailed,
    compute,
    compute_in_full,
)
from evaluation.judge.zygote import SLACK_S, Execution, Job, JudgeFailed, OutOfMemory, Zygote
from evaluation.records import Outcome, Problem, Program, Verdict

logger = logging.getLogger(__name__)

JUDGE_VERSION = f"judge/2 python{sys.version_info.major}.{sys.version_info.minor}"
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
        self.inputs = marshal.dumps(list(self.parts.expressions if self.parts.calls is None else self.parts.calls), 2)
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
        job = Job(
            source=source,
            setup=self.problem.setup,
            expressions=self.parts.calls is None,
            entry_point=self.problem.entry_point,
            inputs=self.inputs,
            limits_s=limits_s,
            suite_limit_s=suite_limit_s,
            timed=timed,
        )
        return zygote.run(job, self.parts)


class _Inputs:
    """A suite of inputs, judged against the reference's outputs by EvalPlus's rules."""

    def __init__(self, problem: Problem, raw_inputs: Any, cache: Path | None) -> None:
        self.problem, self.cache = problem, cache
        self.special = problem.problem_id.startswith("Mbpp/")
        self.inputs = [tuple(i) for i in deserialize.inputs(problem.problem_id, raw_inputs)]
        self.raw_inputs = marshal.dumps(self.inputs, 2)
        self.as_set = self.special and compared_as_set(problem.entry_point)
        self.not_none = self.special and compared_with_none(problem.entry_point)
        self.size = len(self.inputs)
        self.lock = threading.Lock()
        self.found: tuple[Reference, Comparison] | None = None

    def _reference(self, zygote: Zygote) -> tuple[Reference, Comparison]:
        """Return the reference's answers, computed by whoever asks first."""
        with self.lock:
            if self.found is None:
                found = compute(zygote, self.problem, self.inputs, self.as_set, self.not_none, self.cache)
                self.found = found, self._comparison(found)
            return self.found

    def _comparison(self, reference: Reference) -> Comparison:
        p = self.problem
        return Comparison(p.entry_point, self.special, p.atol, self.inputs, reference.values, reference.flags)

    def run(self, zygote: Zygote, source: str) -> Execution:
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

        return zygote.run(job, InFull(comparison, in_full))


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
        self.known: dict[tuple[str, bytes], Verdict] = {}
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
        keys = [_key(p) for p in programs]
        for problem_id in {p.problem_id for p in programs}:
            self.problems[problem_id]
        distinct = dict(zip(keys, programs, strict=True))
        verdicts = {k: self.known[k] for k in distinct if k in self.known}
        batch = _Batch({k: p for k, p in distinct.items() if k not in verdicts}, len(verdicts), progress)
        threads = [threading.Thread(target=self._work, args=(w, batch)) for w in self.workers[1:]]
        try:
            for thread in threads:
                thread.start()
            self._work(self.workers[0], batch)
        except BaseException:
            batch.stop()
            for worker in self.workers:
                worker.abort()
            raise
        finally:
            for thread in threads:
                thread.join()
        if batch.error is not None:
            raise batch.error
        for key, program in batch.again:  # alone: nothing of ours runs beside it
            batch.done(key, self._judge_one(self.workers[0], program, alone=True))
        verdicts |= batch.verdicts
        self.known |= {k: v for k, v in batch.verdicts.items() if not v.errored}
        return [verdicts[k] for k in keys]

    def _work(self, worker: "_Worker", batch: "_Batch") -> None:
        try:
            while (item := batch.take()) is not None:
                key, program = item
                try:
                    batch.done(key, self._judge_one(worker, program, alone=False))
                except _TryAlone:
                    batch.again.append(item)
        except Exception as e:  # noqa: BLE001  carried to the caller's thread
            batch.stop(e)

    def _judge_one(self, worker: "_Worker", program: Program, alone: bool) -> Verdict:
        problem = self.problems[program.problem_id]
        base = self._run(worker, problem, "base", program.source, alone)
        has_plus = self.suites == "both" and problem.plus_inputs is not None
        plus = self._run(worker, problem, "plus", program.source, alone) if has_plus else None
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
        self, worker: "_Worker", problem: Problem, name: str, source: str, alone: bool
    ) -> tuple[Outcome, Execution | None, str]:
        """Run one suite; a failure of the harness is tried again, and what is left of it is no wrong answer.

        Raises:
            _TryAlone: the program ran out of time or memory while others ran beside it.
        """
        detail = ""
        for _ in range(TRIES):
            try:
                run = self._suite(problem, name).run(worker.zygote("numpy" in source), source)
            except OutOfMemory as e:
                if not alone:
                    raise _TryAlone from e
                detail = f"judge: {e}"
                continue
            except JudgeFailed as e:
                detail = f"judge: {e}"
                worker.close()
                continue
            except ReferenceFailed as e:
                return Outcome.HARNESS_ERROR, None, f"judge: {e}"
            if run.timed_out and run.contended and not alone:
                raise _TryAlone
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


class _TryAlone(Exception):
    """Load decided, not the program: it is judged again when nothing else of ours runs."""


def _key(program: Program) -> tuple[str, bytes]:
    source = program.source.strip().encode("utf-8", "surrogatepass")
    return program.problem_id, hashlib.blake2b(source, digest_size=20).digest()


class _Batch:
    """The distinct programs of one call, taken by the workers."""

    def __init__(
        self,
        programs: dict[tuple[str, bytes], Program],
        num_known: int,
        progress: Callable[[int, int], None] | None,
    ) -> None:
        self.todo = collections.deque(programs.items())
        self.again: list[tuple[tuple[str, bytes], Program]] = []
        self.verdicts: dict[tuple[str, bytes], Verdict] = {}
        self.num_known, self.total, self.progress = num_known, num_known + len(programs), progress
        self.lock = threading.Lock()
        self.error: BaseException | None = None

    def take(self) -> tuple[tuple[str, bytes], Program] | None:
        """Return the next program; None when there is none, or the call is over."""
        try:
            return self.todo.popleft()
        except IndexError:
            return None

    def done(self, key: tuple[str, bytes], verdict: Verdict) -> None:
        """Keep a verdict."""
        with self.lock:
            self.verdicts[key] = verdict
            if self.progress:
                self.progress(self.num_known + len(self.verdicts), self.total)

    def stop(self, error: BaseException | None = None) -> None:
        """Let no worker take another program."""
        self.todo.clear()
        self.error = self.error or error


class _Worker:
    """One lane: a zygote, and one with numpy once a program needs it."""

    def __init__(self) -> None:
        self.zygotes: dict[bool, Zygote] = {}

    def zygote(self, numpy: bool) -> Zygote:
        """Return the zygote of that kind, started if need be."""
        if numpy not in self.zygotes:
            self.zygotes[numpy] = Zygote(numpy)
        return self.zygotes[numpy]

    def abort(self) -> None:
        """Kill them under the thread that uses them; it sees a failure of the harness."""
        for zygote in list(self.zygotes.values()):
            with contextlib.suppress(ProcessLookupError):
                os.killpg(zygote.process.pid, signal.SIGKILL)

    def close(self) -> None:
        """End them."""
        for zygote in self.zygotes.values():
            zygote.close()
        self.zygotes.clear()
