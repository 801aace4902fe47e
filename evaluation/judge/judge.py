"""The judge: programs in, verdicts out, in the same order, whatever the number of workers.

A program never gives a verdict, only values; the values are compared here. Programs that are the same but for names and
layout run once, and with a cache folder a verdict is remembered for later checkpoints and restarts.
"""

import functools
import hashlib
import logging
import re
import sys
import threading
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, Literal, Self

from evaluation.judge.admission import Admission
from evaluation.judge.batch import Batch, Case, Key, Result, TryAlone
from evaluation.judge.identity import read, wants_numpy
from evaluation.judge.jobs import JudgeFailed, OutOfMemory
from evaluation.judge.lanes import Lane, Lanes
from evaluation.judge.references import ReferenceFailed
from evaluation.judge.remembered import Remembered
from evaluation.judge.suites import Asserts, Inputs, Suite
from evaluation.records import Outcome, Problem, Program, Verdict

logger = logging.getLogger(__name__)

JUDGE_VERSION = f"judge/7 python{sys.version_info.major}.{sys.version_info.minor}"
TRIES = 3
MAX_KNOWN = 200_000
"""Verdicts kept in this process."""
Suites = Literal["reward", "score", "both"]
"""`reward`: the asserts; `both`: base and plus whatever comes; `score`: plus only after base has passed."""


class Judge:
    """Judges programs of a set of problems; a context manager that owns its caged processes.

    Raises:
        MachineError: the required part of the cage is missing here.
    """

    def __init__(
        self,
        problems: Sequence[Problem],
        *,
        suites: Suites = "both",
        workers: int = 1,
        cache: Path | None = None,
        caged: bool = True,
    ) -> None:
        """Start the first lane.

        Args:
            problems: all whose programs will come.
            suites: which suites decide.
            workers: programs that run at a time.
            cache: folder of reference outputs and remembered verdicts; None keeps neither.
            caged: False runs programs under limits only, where the cage cannot be had and somebody insists.
        """
        self.problems = {p.problem_id: p for p in problems}
        self.suites: Suites = suites
        self.cache = cache
        self.remembered = Remembered(cache) if cache is not None else None
        self.prepared: dict[tuple[str, str], Suite] = {}
        self.known: dict[Key, Verdict] = {}
        self.kept_names = {p.problem_id: _kept_names(p) for p in problems}
        self.lock = threading.Lock()
        self.admission = Admission(workers)
        self.version = JUDGE_VERSION if caged else f"{JUDGE_VERSION} uncaged"
        self.lanes = Lanes(workers, caged)
        self.lanes.first.zygote(numpy=False)  # fails here, not at the first program, where there is no cage
        self._prove_it_can_fail()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """End every caged process."""
        self.lanes.close()
        if self.remembered is not None:
            self.remembered.close()

    @property
    def cage(self) -> dict[str, Any]:
        """What the cage is made of here."""
        return self.lanes.first.zygote(numpy=False).cage

    def judge(self, programs: Sequence[Program], progress: Callable[[int, int], None] | None = None) -> list[Verdict]:
        """Return a verdict for each program, in order.

        Args:
            programs: of problems that the judge was made with.
            progress: called with (done, total) after each distinct program.

        Raises:
            KeyError: a program of an unknown problem.
        """
        same: dict[tuple[str, str], Case] = {}
        for p in programs:
            if (p.problem_id, p.source) not in same:
                same[p.problem_id, p.source] = self._read(p)
        cases = [same[p.problem_id, p.source] for p in programs]
        distinct = {c.key: c for c in reversed(cases)}  # the first of its kind runs
        self._recall(distinct)
        missing = [c for c in distinct.values() if c.key not in self.known]
        batch = Batch({k: self.known[k] for k in distinct if k in self.known}, len(distinct), progress)
        try:
            self._load({c.problem_id for c in missing})
            missing.sort(key=lambda c: (-self._cost_s(c.problem_id), c.key))  # the longest first
            again: list[Case] = []
            self.lanes.each(missing, functools.partial(self._judge_beside_others, batch, again))
            if again:
                logger.info("%d programs may have failed for want of time or memory: again, alone", len(again))
            for case in sorted(again, key=lambda c: c.key):  # alone: nothing of ours runs beside it
                self._done(batch, case.key, self._judge_one(self.lanes.first, case, alone=True))
            self.lanes.first.rest()
        finally:
            if self.remembered is not None:
                self.remembered.flush()
        self._forget()
        return [batch.verdicts[c.key] for c in cases]

    def _read(self, program: Program) -> Case:
        reading = read(program.source, self.kept_names[program.problem_id])
        return Case((program.problem_id, reading.digest), program.problem_id, program.source, reading.clean)

    def _judge_beside_others(self, batch: Batch, again: list[Case], lane: Lane, case: Case) -> None:
        try:
            self._done(batch, case.key, self._judge_one(lane, case, alone=False))
        except TryAlone:
            again.append(case)

    def _done(self, batch: Batch, key: Key, verdict: Verdict) -> None:
        batch.done(key, verdict)
        if verdict.errored:
            return
        with self.lock:
            self.known[key] = verdict
        remembered = self._remembered_key(key) if self.remembered is not None else None
        if self.remembered is not None and remembered is not None:
            self.remembered.add(remembered, verdict)

    def _recall(self, distinct: Iterable[Key]) -> None:
        """Take over what earlier processes have found."""
        if self.remembered is None:
            return
        keys = {r: k for k in distinct if k not in self.known and (r := self._remembered_key(k)) is not None}
        found = self.remembered.find(list(keys), [k[0] for k in keys.values()])
        self.known |= {keys[r]: v for r, v in found.items()}

    def _remembered_key(self, key: Key) -> bytes | None:
        of_problem = self._problem_identity(key[0])
        if of_problem is None:
            return None
        return hashlib.blake2b(of_problem + key[1], digest_size=20).digest()

    def _problem_identity(self, problem_id: str) -> bytes | None:
        parts = [self._suite(self.problems[problem_id], n).identity for n in self._names(problem_id)]
        if None in parts:
            return None
        return b"\0".join([self.version.encode(), self.suites.encode(), *filter(None, parts)])

    def _forget(self) -> None:
        """Keep memory bounded over a long training: the oldest half goes."""
        if len(self.known) > MAX_KNOWN:
            for key in list(self.known)[: MAX_KNOWN // 2]:
                del self.known[key]

    def _load(self, problem_ids: set[str]) -> None:
        """Have the reference outputs of these problems ready, computed in parallel where no file has them."""
        lacking = [(i, n) for i in sorted(problem_ids) for n in self._names(i)]

        def load(lane: Lane, item: tuple[str, str]) -> None:
            problem = self.problems[item[0]]
            for _ in range(TRIES):
                try:
                    return self._suite(problem, item[1]).load(lane.zygote("numpy" in problem.reference))
                except ReferenceFailed:
                    return None  # said with each program's verdict
                except JudgeFailed as e:
                    logger.warning("%s: %s: reference outputs: %s; tried again", *item, e)
                    lane.close()
            return None

        self.lanes.each(lacking, load)

    def _judge_one(self, lane: Lane, case: Case, alone: bool) -> Verdict:
        names = self._names(case.problem_id)
        # EvalPlus starts a process for each suite; one serves both only for a program that leaves nothing behind.
        found = self._run(lane, case, names if case.clean else names[:1], alone)
        if len(found) == 2 and found[1].outcome is Outcome.FAIL and not found[1].by_value:
            found[1:] = self._run(lane, case, names[1:], alone)
        elif len(found) < len(names) and self.suites == "score" and found[0].outcome is not Outcome.PASS:
            found.append(Result(found[0].outcome, None, "plus: not run"))
        elif len(found) < len(names):
            found += self._run(lane, case, names[1:], alone)
        runs, problem = [r.run for r in found if r.run], self.problems[case.problem_id]
        return Verdict(
            problem_id=case.problem_id,
            base=found[0].outcome,
            plus=found[1].outcome if len(found) > 1 else None,
            tests_passed=sum(r.num_right for r in runs),
            tests_total=sum(self._suite(problem, n).size for n, r in zip(names, found, strict=True) if r.run),
            seconds=round(sum(r.seconds for r in runs), 6),
            detail="; ".join(r.detail for r in found if r.detail),
        )

    def _run(self, lane: Lane, case: Case, names: Sequence[str], alone: bool) -> list[Result]:
        """Run suites in one child as far as that decides them; a failure of the harness is tried again.

        Raises:
            TryAlone: the program ran out of time or memory while others ran beside it.
        """
        detail = ""
        for _ in range(TRIES):
            try:
                return self._run_once(lane, case, names, alone)
            except OutOfMemory as e:
                if not alone:
                    raise TryAlone from e
                detail = f"judge: {e}"
            except JudgeFailed as e:
                detail = f"judge: {e}"
                lane.close()
            except ReferenceFailed as e:
                return [Result(Outcome.HARNESS_ERROR, None, f"judge: {e}")]
        return [Result(Outcome.HARNESS_ERROR, None, detail)]

    def _run_once(self, lane: Lane, case: Case, names: Sequence[str], alone: bool) -> list[Result]:
        problem = self.problems[case.problem_id]
        zygote = lane.zygote(wants_numpy(case.source) or "numpy" in problem.reference)
        found: list[Result] = []
        with zygote.child(None if alone else self.admission) as child:
            for name in names:
                suite = self._suite(problem, name)
                job, checker = suite.job(zygote, case.source)
                run = child.run(job, checker)
                if run.complete:
                    found.append(Result(Outcome.PASS, run, ""))
                    continue
                if run.timed_out and suite.relax(zygote, job):
                    break
                if not alone and run.timed_out and run.contended:
                    raise TryAlone
                outcome = Outcome.TIMEOUT if run.timed_out else Outcome.FAIL
                found.append(Result(outcome, run, f"{name}: {run.detail}"))
                goes_on = name != names[-1] and self.suites == "both" and case.clean and found[-1].by_value
                if not (goes_on and child.settles()):
                    return found
            else:
                return found
        return found + self._run_once(lane, case, names[len(found) :], alone)

    def _names(self, problem_id: str) -> tuple[str, ...]:
        has_plus = self.suites != "reward" and self.problems[problem_id].plus_inputs is not None
        return ("base", "plus") if has_plus else ("base",)

    def _suite(self, problem: Problem, name: str) -> Suite:
        key = (problem.problem_id, name)
        with self.lock:
            found = self.prepared.get(key)
            if found is None:
                found = self.prepared[key] = self._prepare(problem, name)
            return found

    def _prepare(self, problem: Problem, name: str) -> Suite:
        if name == "plus":
            return Inputs(problem, problem.plus_inputs, self.cache)
        if self.suites != "reward" and problem.base_inputs is not None:
            return Inputs(problem, problem.base_inputs, self.cache)
        return Asserts(problem)

    def _cost_s(self, problem_id: str) -> float:
        return sum(self._suite(self.problems[problem_id], n).cost_s for n in self._names(problem_id))

    def _prove_it_can_fail(self) -> None:
        """A judge that cannot fail a wrong program must not start (asserts switched off, a broken cage)."""
        probe = Problem(
            problem_id="Probe/0",
            text="",
            entry_point="double",
            reference="",
            asserts=("assert double(2) == 4", "assert double(3) == 6"),
        )
        suite, zygote = Asserts(probe), self.lanes.first.zygote(numpy=False)
        right = zygote.run(*suite.job(zygote, "def double(x):\n    return 2 * x\n"))
        wrong = zygote.run(*suite.job(zygote, "def double(x):\n    return x + 2\n"))
        self.lanes.first.rest()
        if not right.complete or wrong.complete:
            raise RuntimeError(f"the judge cannot tell right from wrong: {right.detail!r}, {wrong.detail!r}")


def _kept_names(problem: Problem) -> set[str]:
    """Return every name that tests could use; programs are the same only with these alike."""
    return {problem.entry_point, *re.findall(r"[^\W\d]\w*", "\n".join((problem.setup, *problem.asserts)))}
