"""The reward of a rollout: 1 if its program passes the problem's asserts, judged outside the program, else 0."""

from collections.abc import Sequence

from evaluation.errors import IncompleteError
from evaluation.judge import Judge
from evaluation.prompts import PromptSpec, extract
from evaluation.records import Outcome, Problem, Program


class HarnessFailed(IncompleteError):
    """The judge failed on a rollout after its retries: the step is not taken, the next start tries it again."""


def score_rollouts(
    judge: Judge, spec: PromptSpec, problems: dict[str, Problem], problem_ids: Sequence[str], completions: Sequence[str]
) -> list[Outcome]:
    """Return the outcome of each completion on its problem's asserts.

    Raises:
        HarnessFailed: a program has no verdict; a missing verdict is never a reward of 0.
    """
    programs = [
        Program(problem_id=p, source=extract(spec, c, problems[p]))
        for p, c in zip(problem_ids, completions, strict=True)
    ]
    verdicts = judge.judge(programs)
    errors = [v for v in verdicts if v.errored]
    if errors:
        raise HarnessFailed(
            f"judge={errors[0].problem_id}: {len(errors)} of {len(verdicts)} rollouts have no verdict "
            f"({errors[0].detail}); run the same command again"
        )
    return [v.base for v in verdicts]
