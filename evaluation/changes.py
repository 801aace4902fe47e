"""What changes problem by problem: forgetting against the base, and two arms on the same problems."""

from evaluation.records import Record
from evaluation.scores import Score
from evaluation.statistics import bootstrap_interval, mcnemar

SOLVED = 0.5
"""A problem counts as solved when at least this share of its judged samples passes (one greedy sample: it passes)."""


class Forgetting(Record):
    """Problems by whether the base and the checkpoint solve them; those unjudged in either are left out."""

    retained: int
    lost: int
    """The base solved them and the checkpoint no longer does."""
    gained: int
    neither: int


class Difference(Record):
    """Mean pass@1 of the second score minus the first's, on the problems judged in both."""

    value: float
    low: float
    high: float
    """95 % paired problem-bootstrap interval."""
    num_problems: int
    p: float | None
    """McNemar's exact p where both have one sample a problem, else None."""


def shared(first: Score, second: Score) -> list[tuple[float, float]]:
    """Return the pass rates of the stricter suite on the problems that both scores judged, ids in order."""
    both = [p for p, c in first.problems.items() if c.n and (o := second.problems.get(p)) is not None and o.n]
    return [
        (first.passes(p, first.suite) / first.problems[p].n, second.passes(p, second.suite) / second.problems[p].n)
        for p in both
    ]


def forgetting(base: Score, checkpoint: Score) -> Forgetting:
    """Count the problems that the base solved and the checkpoint kept or lost, and those it gained."""
    solved = [(b >= SOLVED, c >= SOLVED) for b, c in shared(base, checkpoint)]
    return Forgetting(
        retained=solved.count((True, True)),
        lost=solved.count((True, False)),
        gained=solved.count((False, True)),
        neither=solved.count((False, False)),
    )


def paired_difference(first: Score, second: Score) -> Difference | None:
    """Compare two scores on the problems that both judged; None without such a problem."""
    pairs = shared(first, second)
    if not pairs:
        return None
    changes = [b - a for a, b in pairs]
    low, high = bootstrap_interval(changes)
    greedy = first.n == second.n == 1
    p = mcnemar(sum(c < 0 for c in changes), sum(c > 0 for c in changes)) if greedy else None
    return Difference(value=sum(changes) / len(changes), low=low, high=high, num_problems=len(changes), p=p)
