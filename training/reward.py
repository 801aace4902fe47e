"""The reward of a rollout: 1 if its program passes the problem's asserts, or its answer is the right number, else 0.

Rollouts are judged as they finish, beside the drawing of the others; a verdict depends on neither order nor company.
"""

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor

from evaluation.errors import IncompleteError
from evaluation.exact import Judging
from evaluation.prompts import PromptSpec, extract
from evaluation.records import Outcome, Problem, Program, Verdict

Finished = tuple[str, tuple[int, ...]]
"""A rollout: its problem, and its token ids."""


class HarnessFailed(IncompleteError):
    """The judge failed on a rollout after its retries: the step is not taken, the next start tries it again."""


class RewardStream:
    """Judges a step's rollouts in a thread of its own, so that no processor waits for another.

    `put` while rollouts finish, `outcomes` when all are drawn; then the next step may begin.
    """

    def __init__(
        self,
        judge: Judging,
        spec: PromptSpec,
        problems: dict[str, Problem],
        decode: Callable[[Sequence[Sequence[int]]], list[str]],
    ) -> None:
        """Start nothing yet.

        Args:
            judge: knows all problems; used by this stream alone.
            spec: how a program is found in a completion.
            problems: by id.
            decode: token ids of completions to texts, as training reads them.
        """
        self.judge, self.spec, self.problems, self.decode = judge, spec, problems, decode
        self.pool = ThreadPoolExecutor(1, thread_name_prefix="reward")
        self.lock = threading.Lock()
        self.waiting: list[Finished] = []
        self.judging: Future[None] | None = None
        self.found: dict[Finished, Verdict] = {}

    def close(self) -> None:
        """End the thread; the programs that are running are finished first."""
        with self.lock:
            self.waiting.clear()
        self.pool.shutdown(cancel_futures=True)

    def put(self, problem_id: str, token_ids: Sequence[int]) -> None:
        """Take a finished rollout; it is judged as soon as the judge is free."""
        with self.lock:
            self.waiting.append((problem_id, tuple(token_ids)))
            if self.judging is None:
                self.judging = self.pool.submit(self._drain)

    def outcomes(self, problem_ids: Sequence[str], completions: Sequence[Sequence[int]]) -> list[Outcome]:
        """Return the outcome of every rollout of the step, those included that were never put.

        Args:
            problem_ids: one a rollout.
            completions: token ids.

        Raises:
            HarnessFailed: a program has no verdict; a missing verdict is never a reward of 0.
        """
        rollouts = [(p, tuple(ids)) for p, ids in zip(problem_ids, completions, strict=True)]
        with self.lock:
            self.waiting.clear()  # they are judged with the rest
            judging = self.judging
        if judging is not None:
            judging.result()
        lacking = list(dict.fromkeys(r for r in rollouts if r not in self.found or self.found[r].errored))
        if lacking:
            self.pool.submit(self._judge, lacking).result()
        found, self.found = self.found, {}
        return outcomes_of([found[r] for r in rollouts])

    def _drain(self) -> None:
        """Judge what waits, until nothing does."""
        while True:
            with self.lock:
                batch, self.waiting = self.waiting, []
                if not batch:
                    self.judging = None
                    return
            self._judge(batch)

    def _judge(self, rollouts: Sequence[Finished]) -> None:
        texts = self.decode([ids for _, ids in rollouts])
        programs = programs_of(self.spec, self.problems, [p for p, _ in rollouts], texts)
        self.found.update(zip(rollouts, self.judge.judge(programs), strict=True))


def programs_of(
    spec: PromptSpec, problems: dict[str, Problem], problem_ids: Sequence[str], completions: Sequence[str]
) -> list[Program]:
    """Return the program in each completion."""
    return [
        Program(problem_id=p, source=extract(spec, c, problems[p]))
        for p, c in zip(problem_ids, completions, strict=True)
    ]


def outcomes_of(verdicts: Sequence[Verdict]) -> list[Outcome]:
    """Return what the asserts said.

    Raises:
        HarnessFailed: a program has no verdict.
    """
    errors = [v for v in verdicts if v.errored]
    if errors:
        raise HarnessFailed(
            f"judge={errors[0].problem_id}: {len(errors)} of {len(verdicts)} rollouts have no verdict "
            f"({errors[0].detail}); run the same command again"
        )
    return [v.base for v in verdicts]
