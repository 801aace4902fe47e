"""What changes problem by problem: forgetting against the base, sharpening, and two arms on the same problems."""

from collections.abc import Mapping

import numpy as np

from evaluation.records import Record
from evaluation.scores import Score, labels
from evaluation.statistics import bootstrap_interval, bootstrap_intervals, mcnemar, pass_at_k

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


class Sharpening(Record):
    """What training did to the first try and to the best of many, against the base on the same problems."""

    k: int
    """Of the best of many: the fewest judged samples of any problem."""
    first: Difference
    """Of pass@1."""
    many: Difference
    """Of pass@k."""
    found: bool
    """pass@1 rose and pass@k fell, both by 95 % intervals that leave 0 out."""


def shared(first: Score, second: Score) -> dict[str, tuple[float, float]]:
    """Return the pass rates of the stricter suite on the problems that both scores judged, by id, in order."""
    both = [p for p, c in first.problems.items() if c.n and (o := second.problems.get(p)) is not None and o.n]
    return {
        p: (first.passes(p, first.suite) / first.problems[p].n, second.passes(p, second.suite) / second.problems[p].n)
        for p in both
    }


def forgetting(base: Score, checkpoint: Score) -> Forgetting:
    """Count by pass@1: the problems that the base solved and the checkpoint kept or lost, and those it gained."""
    return _counted([(b >= SOLVED, c >= SOLVED) for b, c in shared(base, checkpoint).values()])


def ever_solved(base: Score, checkpoint: Score) -> Forgetting:
    """Count by whether any sample passes, on the problems with equally many judged samples in both."""
    pairs = shared(base, checkpoint)
    return _counted([(b > 0, c > 0) for p, (b, c) in pairs.items() if base.problems[p].n == checkpoint.problems[p].n])


def _counted(solved: list[tuple[bool, bool]]) -> Forgetting:
    return Forgetting(
        retained=solved.count((True, True)),
        lost=solved.count((True, False)),
        gained=solved.count((False, True)),
        neither=solved.count((False, False)),
    )


def paired_difference(first: Score, second: Score, clusters: Mapping[str, int] | None = None) -> Difference | None:
    """Compare two scores on the problems that both judged; None without such a problem."""
    pairs = shared(first, second)
    if not pairs:
        return None
    changes = [b - a for a, b in pairs.values()]
    low, high = bootstrap_interval(changes, clusters_P=labels(pairs, clusters))
    greedy = first.n == second.n == 1
    p = mcnemar(sum(c < 0 for c in changes), sum(c > 0 for c in changes)) if greedy else None
    return Difference(value=sum(changes) / len(changes), low=low, high=high, num_problems=len(changes), p=p)


def sharpening(base: Score, checkpoint: Score, clusters: Mapping[str, int] | None = None) -> Sharpening | None:
    """Compare pass@1 and pass@k with the base's; None where no problem has two judged samples in both.

    k is the fewest judged samples of any problem, so that no problem drops out between the two.
    """
    ids = list(shared(base, checkpoint))
    k = min((s.problems[p].n for p in ids for s in (base, checkpoint)), default=0)
    if k < 2:
        return None
    change_PX = np.array([[_change(base, checkpoint, p, x) for x in (1, k)] for p in ids])
    ends = bootstrap_intervals(change_PX, clusters_P=labels(ids, clusters))
    first, many = (
        Difference(value=float(mean), low=low, high=high, num_problems=len(ids), p=None)
        for mean, (low, high) in zip(change_PX.mean(0), ends, strict=True)
    )
    return Sharpening(k=k, first=first, many=many, found=first.low > 0 > many.high)


def _change(base: Score, checkpoint: Score, problem: str, k: int) -> float:
    before, after = (pass_at_k(s.problems[problem].n, s.passes(problem, s.suite), k) for s in (base, checkpoint))
    return after - before
