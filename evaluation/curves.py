"""From one run's evidence to its class: stable, degraded, collapsed, diverged or incomplete, with the step of onset.

The rules are those that the criterion declares before anything trains; the first that holds decides.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

import numpy as np

from evaluation.records import Record
from evaluation.scores import Score, labels
from evaluation.statistics import flat_drop, lower_bound

Class = Literal["incomplete", "diverged", "collapsed", "degraded", "stable"]
UNSTABLE: frozenset[str] = frozenset({"diverged", "collapsed", "degraded"})


class Criterion(Record):
    """How curves become an answer; declared in the experiment and hashed before training."""

    rule: Literal["boundary", "drop"] = "boundary"
    collapse_window: int = 10
    """Steps of the trailing mean of the reward."""
    collapse_fraction: float = 0.5
    """Collapsed: the trailing mean stays below this share of its own running maximum."""
    collapse_first_step: int = 3
    collapse_min_steps: int = 20
    """Shorter runs are never called collapsed."""
    degraded_drop: float = 0.02
    """Points of pass@1 from peak to end that the lower bound must exceed, after the flat-run correction."""
    degraded_below_base: float = 0.02
    """Points below the base that the lower bound must exceed."""
    confidence: float = 0.95
    """Of the one-sided bounds, and of the shift."""
    min_seeds_for_interval: int = 4
    drop_max_treatment: float = 0.02
    drop_min_difference: float = 0.03
    drop_max_final_loss: float = 0.015


@dataclass(frozen=True)
class RunEvidence:
    """What one run left behind."""

    label: str
    """The cell's name."""
    arm: str
    lr: float
    seed: int
    steps: int
    checkpoints: tuple[int, ...]
    """Planned global steps."""
    rewards: tuple[float, ...] = ()
    """Mean reward of steps 1, 2, ...; NaN where it was not finite."""
    end: Literal["finished", "diverged"] | None = None
    onset_step: int | None = None
    """First non-finite step, when diverged."""
    scores: dict[str, dict[int, Score]] = field(default_factory=dict)
    """By benchmark and global step (the base, step 0, is given apart)."""
    figures: dict[str, tuple[float, ...]] = field(default_factory=dict)
    """Of each step, by name: `grad_norm`, `entropy`, `logprob_gap`, `head_mass`; NaN where the log has no number."""
    signs: tuple[str, ...] = ()
    """What the trainer's log shows, in words; told, and no part of any rule."""
    sources: tuple[tuple[str, str], ...] = ()
    """(path in the store, sha256) of every file that this was read from."""

    @property
    def expected(self) -> tuple[int, ...]:
        """Checkpoints that must have a score: those before a recorded divergence."""
        if self.end == "diverged" and self.onset_step is not None:
            return tuple(s for s in self.checkpoints if s < self.onset_step)
        return self.checkpoints


class Classified(Record):
    """A run's class and the sentence that gives the figures behind it."""

    label: str
    arm: str
    lr: float
    seed: int
    run_class: Class
    onset_step: int | None
    why: str

    @property
    def unstable(self) -> bool:
        """Diverged, collapsed or degraded."""
        return self.run_class in UNSTABLE


def classify(
    run: RunEvidence,
    base: Score | None,
    benchmark: str,
    rules: Criterion,
    clusters: Mapping[str, int] | None = None,
) -> Classified:
    """Return the class of one run by the declared rules, on its primary benchmark.

    Args:
        run: what it left.
        base: the base model's score.
        benchmark: the primary one.
        rules: the declared ones.
        clusters: label of each problem that has near-duplicates; these are resampled together.
    """
    found, onset, why = _decide(run, base, run.scores.get(benchmark, {}), rules, clusters)
    return Classified(
        label=run.label, arm=run.arm, lr=run.lr, seed=run.seed, run_class=found, onset_step=onset, why=why
    )


def _decide(
    run: RunEvidence,
    base: Score | None,
    scores: dict[int, Score],
    rules: Criterion,
    clusters: Mapping[str, int] | None,
) -> tuple[Class, int | None, str]:
    lacking = [s for s in run.expected if s not in scores]
    if run.end is None:
        return "incomplete", None, f"the run has not ended ({len(run.rewards)} of {run.steps} steps)"
    if lacking:
        return "incomplete", None, f"no score at step {', '.join(map(str, lacking))}"
    if run.end == "diverged":
        return "diverged", run.onset_step, f"non-finite numbers at step {run.onset_step}"
    if len(run.rewards) < run.steps:
        return "incomplete", None, f"the rewards of {len(run.rewards)} of {run.steps} steps are stored"
    onset = collapse_onset(run.rewards, rules)
    if onset is not None:
        means = trailing_means(run.rewards, rules.collapse_window)[rules.collapse_first_step - 1 :]
        known = [m for m in means if math.isfinite(m)]
        return "collapsed", onset, f"mean reward {known[-1]:.3f} at the end, {max(known):.3f} at its height"
    if base is None:
        return "incomplete", None, "the base model has no score"
    return _degraded({0: base, **scores}, rules, clusters)


def trailing_means(rewards: Sequence[float], window: int) -> list[float]:
    """Return for each step t the mean of the last min(window, t) rewards that are finite; NaN if none is."""
    means = []
    for t in range(1, len(rewards) + 1):
        finite = [r for r in rewards[max(0, t - window) : t] if math.isfinite(r)]
        means.append(sum(finite) / len(finite) if finite else math.nan)
    return means


def collapse_onset(rewards: Sequence[float], rules: Criterion) -> int | None:
    """Return the first step from which the trailing mean stays below its share of the running maximum, or None.

    A step whose whole window is not finite says nothing: it neither starts a collapse nor ends one.
    """
    if len(rewards) < rules.collapse_min_steps:
        return None
    top, onset = -math.inf, None
    for step, mean in enumerate(trailing_means(rewards, rules.collapse_window), start=1):
        if step < rules.collapse_first_step or math.isnan(mean):
            continue
        top = max(top, mean)
        onset = onset or step if mean < rules.collapse_fraction * top else None
    return onset


def _degraded(
    scores: dict[int, Score], rules: Criterion, clusters: Mapping[str, int] | None
) -> tuple[Class, int | None, str]:
    """Decide between degraded and stable from the per-problem pass rates of every checkpoint, the base included."""
    steps = sorted(scores)
    rates_TP = pass_rates([scores[s] for s in steps])
    labels_P = labels(judged_everywhere([scores[s] for s in steps]), clusters)
    if not rates_TP.size:
        return "incomplete", None, "no problem has a judged sample at every checkpoint"
    curve = rates_TP.mean(1)
    peak = int(curve.argmax())
    drop = float(curve[peak] - curve[-1])
    chance = flat_drop(rates_TP, min(scores[s].n for s in steps))
    drop_bound = lower_bound(rates_TP[peak] - rates_TP[-1], rules.confidence, clusters_P=labels_P) - chance
    below_bound = lower_bound(rates_TP[0] - rates_TP[-1], rules.confidence, clusters_P=labels_P)
    figures = (
        f"pass@1 {curve[0]:.3f} base, {curve[peak]:.3f} peak at step {steps[peak]}, {curve[-1]:.3f} end; "
        f"drop {drop:.3f}, {chance:.3f} expected of a flat run, lower bound {drop_bound:+.3f}"
    )
    if drop_bound > rules.degraded_drop:
        return "degraded", _first_staying(steps, curve < curve[peak] - rules.degraded_drop, peak), figures
    if below_bound > rules.degraded_below_base:
        why = f"{figures}; below the base by at least {below_bound:.3f}"
        return "degraded", _first_staying(steps, curve < curve[0], 0), why
    return "stable", None, figures


def _first_staying(steps: Sequence[int], low: np.ndarray, after: int) -> int:
    """Return the first step after `after` from which the curve stays low; the last is low by the caller's rule."""
    first = len(steps) - 1
    while first - 1 > after and low[first - 1]:
        first -= 1
    return steps[first]


def judged_everywhere(scores: Sequence[Score]) -> list[str]:
    """Return the problems with a judged sample in every score, ids in order."""
    return [p for p in scores[0].problems if all(s.problems.get(p) and s.problems[p].n for s in scores)]


def pass_rates(scores: Sequence[Score]) -> np.ndarray:
    """Return (T, P) pass rates of the stricter suite, on the problems judged in every score, ids in order."""
    ids = judged_everywhere(scores)
    counts = [(s.suite == "plus", [s.problems[p] for p in ids]) for s in scores]
    return np.array([[((c.plus or 0) if plus else c.base) / c.n for c in found] for plus, found in counts], dtype=float)
