"""The rule "drop": does a treatment keep a run's final accuracy nearer to its peak than the plain objective does?

The rule compares means over seeds with declared thresholds; the statistical status says what so many seeds can carry.
Both are reported, because a rule can be met or missed within the noise of two seeds.
"""

import math
from collections.abc import Sequence
from typing import Literal

import numpy as np

from evaluation.curves import Criterion, RunEvidence
from evaluation.records import Record
from evaluation.scores import Score

Verdict = Literal["validated", "failed", "inconclusive"]

HYPOTHESIS_DROP = 0.05
"""Drop of the plain arm that the hypothesis text expects; reported as its own limb, not part of the rule."""


class Limb(Record):
    """One condition of a criterion."""

    name: str
    value: float | None
    threshold: float
    passed: bool | None
    low: float | None = None
    """Interval of the value over seeds (Student's t, at the declared confidence); null for one seed."""
    high: float | None = None
    seeds: int | None = None


class Ending(Record):
    """A run's best and last accuracy."""

    seed: int
    initial: float | None = None
    """At step 0, the base."""
    peak: float
    final: float

    @property
    def drop(self) -> float:
        """Peak minus final; 0 for a run that ends at its best."""
        return self.peak - self.final


class RunEnding(Record):
    """A run's accuracies in finding.json."""

    cell: str
    initial: float | None
    peak: float | None
    final: float | None
    drop: float | None
    """null, as the others, while the run lacks its curve."""


class DropJudgement(Record):
    """What the rule says and what the seeds can carry."""

    limbs: tuple[Limb, ...]
    verdict: Verdict | None
    """None while a run lacks its curve."""
    status: str
    sentence: str


def ending(run: RunEvidence, base: Score | None, benchmark: str) -> Ending | None:
    """Return a run's peak over step 0 and all checkpoints, and its last; None unless every point is there."""
    scores = run.scores.get(benchmark, {})
    if base is None or run.end != "finished" or any(s not in scores for s in run.checkpoints):
        return None
    curve = [s.estimate(s.suite, 1).value for s in (base, *(scores[step] for step in run.checkpoints))]
    values = [v for v in curve if v is not None]
    if len(values) < len(curve):
        return None
    return Ending(seed=run.seed, initial=values[0], peak=max(values), final=values[-1])


def run_ending(run: RunEvidence, base: Score | None, benchmark: str) -> RunEnding:
    """Return a run's accuracies as finding.json has them."""
    found = ending(run, base, benchmark)
    if found is None:
        return RunEnding(cell=run.label, initial=None, peak=None, final=None, drop=None)
    values = {"initial": found.initial, "peak": found.peak, "final": found.final, "drop": found.drop}
    return RunEnding(cell=run.label, **values)


def judge_pair(
    runs: Sequence[RunEvidence], base: Score | None, benchmark: str, pair: tuple[str, str], rules: Criterion
) -> DropJudgement:
    """Apply the rule to the runs of two arms, the control first; without every run's curve there is no verdict."""
    runs = [r for r in runs if r.arm in pair]
    found = [(r, ending(r, base, benchmark)) for r in runs]
    lacking = [r.label for r, e in found if e is None]
    arms = [[e for r, e in found if r.arm == arm and e is not None] for arm in pair]
    seeds = [sorted(e.seed for e in arm) for arm in arms]
    paired = seeds[0] == seeds[1] and len(seeds[0]) == len(set(seeds[0])) > 0
    if paired and not lacking:
        return judge_drops(arms[0], arms[1], rules)
    why = f"{len(lacking)} of {len(runs)} runs lack a finished curve" if lacking else "the arms' seeds are not paired"
    status = f"no verdict: {why}"
    return DropJudgement(limbs=(), verdict=None, status=status, sentence=f"The rule cannot be applied: {why}.")


def judge_drops(plain: Sequence[Ending], treated: Sequence[Ending], rules: Criterion) -> DropJudgement:
    """Apply the rule to the endings of the two arms.

    Args:
        plain: control runs, one a seed.
        treated: runs of the treatment, the same seeds.
        rules: declares the thresholds.

    Raises:
        ValueError: no runs, or the arms do not have the same seeds once each.
    """
    seeds = sorted(e.seed for e in plain)
    if not plain or seeds != sorted(e.seed for e in treated) or len(set(seeds)) < len(seeds):
        raise ValueError(f"seeds={seeds}: both arms need the same seeds, once each")
    pairs = list(zip(sorted(plain, key=_seed), sorted(treated, key=_seed), strict=True))
    drop_plain = float(np.mean([p.drop for p, _ in pairs]))
    drop_treated = float(np.mean([t.drop for _, t in pairs]))
    gained = float(np.mean([t.final - p.final for p, t in pairs]))
    differences = [p.drop - t.drop for p, t in pairs]
    level = rules.confidence
    limbs = (
        _limb("treatment_drop", [t.drop for _, t in pairs], rules.drop_max_treatment, level, at_most=True),
        _limb("drop_difference", differences, rules.drop_min_difference, level),
        _limb("final_difference", [t.final - p.final for p, t in pairs], -rules.drop_max_final_loss, level),
        _limb("baseline_drop", [p.drop for p, _ in pairs], HYPOTHESIS_DROP, level),
    )
    verdict: Verdict = "inconclusive"
    if not limbs[1].passed:
        verdict = "failed"
    elif limbs[0].passed and limbs[2].passed:
        verdict = "validated"
    status = _status(differences, rules)
    sentence = (
        f"By the declared rule: {verdict}. The plain runs dropped {drop_plain:.3f} from peak to end, the treated "
        f"{drop_treated:.3f}: a difference of {drop_plain - drop_treated:+.3f} where {rules.drop_min_difference:g} "
        f"was asked for; final difference {gained:+.3f}. Statistically: {status}."
    )
    return DropJudgement(limbs=limbs, verdict=verdict, status=status, sentence=sentence)


def _seed(e: Ending) -> int:
    return e.seed


def _limb(name: str, values: Sequence[float], threshold: float, level: float, at_most: bool = False) -> Limb:
    """Compare a mean over seeds with its threshold, and say how far the seeds spread."""
    value = float(np.mean(values))
    # Differences of decimals such as .05 - .02 miss their threshold by one bit: nine digits are compared.
    over = round(value - threshold, 9)
    low, high = mean_interval(values, level) or (None, None)
    passed = over <= 0 if at_most else over >= 0
    return Limb(name=name, value=value, threshold=threshold, passed=passed, low=low, high=high, seeds=len(values))


def mean_interval(values: Sequence[float], level: float) -> tuple[float, float] | None:
    """Return Student's two-sided interval of a mean; None for fewer than two values."""
    error = standard_error(values)
    if error is None:
        return None
    from scipy import stats  # a second to import

    half = float(stats.t.ppf((1 + level) / 2, len(values) - 1)) * error
    return float(np.mean(values)) - half, float(np.mean(values)) + half


def standard_error(values: Sequence[float]) -> float | None:
    """Return the standard error of a mean from the sample deviation (n - 1); None for fewer than two values."""
    return float(np.std(values, ddof=1)) / math.sqrt(len(values)) if len(values) > 1 else None


def _status(differences: Sequence[float], rules: Criterion) -> str:
    """Say whether the paired drop difference is known to lie on one side of the threshold (Student's t)."""
    error, interval = standard_error(differences), mean_interval(differences, rules.confidence)
    if error is None or interval is None:
        return "one seed, no interval"
    mean, count, (low, high) = float(np.mean(differences)), len(differences), interval
    if error < 1e-9:  # equal to the last problem: chance, or nothing happened
        return f"inconclusive: paired drop difference {mean:.3f} in all of {count} seeds, whose spread tells no error"
    word = "inconclusive"
    if low >= rules.drop_min_difference:
        word = "the difference reaches the threshold"
    elif high < rules.drop_min_difference:
        word = "the difference stays below the threshold"
    return (
        f"{word}: paired drop difference {mean:.3f}, standard error {error:.3f}, {rules.confidence:.0%} interval "
        f"{low:+.3f} to {high:+.3f} ({count} seeds)"
    )
