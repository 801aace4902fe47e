"""The finding: where each arm's boundary lies on the ladder, whether the arms differ, and how sure that is."""

from collections.abc import Sequence
from typing import Literal

import numpy as np
from pydantic import Field

from evaluation.curves import Classified, Criterion, RunEvidence, classify
from evaluation.records import Record
from evaluation.scores import Score
from evaluation.statistics import fewest_discordant, mcnemar

__all__ = ["ArmBoundary", "Criterion", "Finding", "find"]

Shift = Literal["up", "down", "not_detectable", "not_identified"]


class RunFinding(Record):
    """One run in finding.json."""

    cell: str
    class_: str = Field(alias="class")
    onset_step: int | None
    why: str


class ArmBoundary(Record):
    """Where an arm's runs break; rates, or null where the ladder does not say."""

    last_stable: float | None
    first_unstable: float | None
    low: float | None
    """Interval of the boundary, from enough seeds on."""
    high: float | None
    text: str


class Limb(Record):
    """One condition of a criterion."""

    name: str
    value: float | None
    threshold: float
    passed: bool | None


class Finding(Record):
    """`finding.json` (contracts: finding/1)."""

    schema_: Literal["finding/1"] = Field(default="finding/1", alias="schema")
    experiment: str
    protocol_sha256: str
    registered_sha256: str
    """Of the experiment as declared before training."""
    rule: Literal["boundary", "drop"]
    sentence: str
    runs: tuple[RunFinding, ...]
    boundary: dict[str, ArmBoundary]
    shift: Shift
    min_detectable: float | None
    """Smallest shift, in rungs of this ladder, that these seeds could have shown; null if none could."""
    limbs: tuple[Limb, ...] = ()
    verdict: Literal["validated", "failed", "inconclusive"] | None = None
    statistical_status: str
    missing: tuple[str, ...]
    departures: tuple[str, ...]


def find(
    *,
    experiment: str,
    criterion: Criterion,
    runs: Sequence[RunEvidence],
    base: Score | None,
    benchmark: str,
    protocol_sha256: str,
    registered_sha256: str,
    arm_labels: dict[str, str],
    missing: Sequence[str] = (),
    departures: Sequence[str] = (),
) -> Finding:
    """Classify every run and say where the boundary lies, by the declared criterion.

    Args:
        experiment: its name.
        criterion: the declared rules.
        runs: every planned cell, ended or not; the first arm is the control.
        base: the base model's score on the primary benchmark.
        benchmark: the primary benchmark.
        protocol_sha256: identity of the primary protocol.
        registered_sha256: identity of the experiment as declared.
        arm_labels: words for each arm, control first.
        missing: planned things that are not there.
        departures: where the run departed from what was declared.
    """
    classified = [classify(r, base, benchmark, criterion) for r in runs]
    boundary = {arm: locate([c for c in classified if c.arm == arm], criterion) for arm in arm_labels}
    shift, minimum, status = compare(classified, boundary, criterion)
    return Finding(
        experiment=experiment,
        protocol_sha256=protocol_sha256,
        registered_sha256=registered_sha256,
        rule=criterion.rule,
        sentence=_sentence(boundary, shift, status, arm_labels, classified),
        runs=tuple(
            RunFinding(cell=c.label, class_=c.run_class, onset_step=c.onset_step, why=c.why) for c in classified
        ),
        boundary=boundary,
        shift=shift,
        min_detectable=minimum,
        statistical_status=status,
        missing=tuple(missing),
        departures=tuple(departures),
    )


def locate(runs: Sequence[Classified], criterion: Criterion) -> ArmBoundary:
    """Return the bracket of one arm, and its interval where there are enough seeds.

    A rate is unstable when at least half of its ended runs are. Where the ladder is not monotone the boundary lies
    between the highest stable rate below the lowest unstable one and that one.
    """
    ended = [r for r in runs if r.run_class != "incomplete"]
    rates = sorted({r.lr for r in ended})
    share = {x: float(np.mean([r.unstable for r in ended if r.lr == x])) for x in rates}
    unstable = [x for x in rates if share[x] >= 0.5]
    first = min(unstable, default=None)
    stable = [x for x in rates if share[x] < 0.5 and (first is None or x < first)]
    last = max(stable, default=None)
    seeds = sorted({r.seed for r in ended})
    low, high = _interval(ended, rates, seeds, criterion)
    text = _bracket_text(last, first, rates) + _seeds_text(len(seeds), low, high)
    if first is not None and any(share[x] < 0.5 for x in rates if x > first):
        text += "; the ladder is not monotone"
    return ArmBoundary(last_stable=last, first_unstable=first, low=low, high=high, text=text)


def _bracket_text(last: float | None, first: float | None, rates: Sequence[float]) -> str:
    if not rates:
        return "no run has ended"
    if first is None:
        return f"stable up to {rates[-1]:g}, the highest rate of the ladder"
    if last is None:
        return f"unstable from {first:g} on, the lowest rate that ended"
    return f"breaks between {last:g} (last stable) and {first:g} (first unstable)"


def _seeds_text(seeds: int, low: float | None, high: float | None) -> str:
    if low is not None and high is not None:
        return f"; 95 % interval {low:.2g} to {high:.2g} ({seeds} seeds)"
    if not seeds:
        return ""
    return f"; {'one seed' if seeds == 1 else f'{seeds} seeds'}, no interval"


def _interval(
    runs: Sequence[Classified], rates: Sequence[float], seeds: Sequence[int], criterion: Criterion
) -> tuple[float | None, float | None]:
    """Bootstrap the boundary over seeds; None below the declared number, or when an end of the ladder is reached."""
    if len(seeds) < criterion.min_seeds_for_interval or len(rates) < 2:
        return None, None
    table_SR = np.full((len(seeds), len(rates)), np.nan)
    for r in runs:
        table_SR[seeds.index(r.seed), rates.index(r.lr)] = r.unstable
    if np.isnan(table_SR).any():
        return None, None
    rng = np.random.default_rng(0)
    drawn_BSR = table_SR[rng.integers(len(seeds), size=(2000, len(seeds)))]
    # A seed's boundary lies below its lowest rung by half a step for each unstable rung: Spearman-Karber's estimate.
    rungs_B = len(rates) - 0.5 - drawn_BSR.sum(-1).mean(-1)
    low, high = np.quantile(rungs_B, [0.025, 0.975])
    if low < 0 or high > len(rates) - 1:
        return None, None
    logs = np.log10(rates)
    return tuple(float(10 ** np.interp(x, np.arange(len(rates)), logs)) for x in (low, high))  # pyright: ignore


def compare(
    runs: Sequence[Classified], boundary: dict[str, ArmBoundary], criterion: Criterion
) -> tuple[Shift, float | None, str]:
    """Compare the first two arms on the runs they share (same rate and seed), by the exact paired test.

    Returns:
        The shift of the second arm's boundary, the smallest shift in rungs that could have been seen, and the words.
    """
    if len(boundary) < 2:
        return "not_identified", None, "one arm only"
    control, treated = list(boundary)[:2]
    outcome = {(r.arm, r.lr, r.seed): r.unstable for r in runs if r.run_class != "incomplete"}
    pairs = [(outcome[a], outcome[b]) for a in outcome if a[0] == control and (b := (treated, *a[1:])) in outcome]
    seeds = {s for _, _, s in outcome}
    rates = {x for _, x, _ in outcome}
    needed = fewest_discordant(1 - criterion.confidence)
    minimum = needed / len(seeds) if seeds and len(seeds) >= criterion.min_seeds_for_interval else None
    if minimum is not None and minimum > len(rates):
        minimum = None
    for arm in (control, treated):
        own = [u for (a, _, _), u in outcome.items() if a == arm]
        if not own or all(own) or not any(own):
            kind = "unstable" if own and all(own) else "stable"
            return "not_identified", minimum, f"all runs of {arm} are {kind}" if own else f"no run of {arm} has ended"
    saved, lost = sum(a and not b for a, b in pairs), sum(b and not a for a, b in pairs)
    counts = f"{saved} of {len(pairs)} pairs break only under {control}, {lost} only under {treated}"
    if len(seeds) < criterion.min_seeds_for_interval:
        count = "one seed" if len(seeds) == 1 else f"{len(seeds)} seeds"
        return (
            "not_detectable",
            minimum,
            f"{counts}; {count}, no test: at least {criterion.min_seeds_for_interval} needed",
        )
    p = mcnemar(saved, lost)
    status = f"{counts}; exact paired test p = {p:.3f}"
    if p > 1 - criterion.confidence:
        return "not_detectable", minimum, status
    return ("up" if saved > lost else "down"), minimum, status


def _sentence(
    boundary: dict[str, ArmBoundary],
    shift: Shift,
    status: str,
    labels: dict[str, str],
    runs: Sequence[Classified],
) -> str:
    parts = [f"{labels[arm]}: {found.text}" for arm, found in boundary.items()]
    words = {
        "up": "the boundary moved up",
        "down": "the boundary moved down",
        "not_detectable": "a shift is not detectable",
        "not_identified": "a shift is not identified",
    }
    incomplete = sum(r.run_class == "incomplete" for r in runs)
    tail = f" {incomplete} of {len(runs)} runs are incomplete." if incomplete else ""
    return f"{'. '.join(p[0].upper() + p[1:] for p in parts)}. Between the arms {words[shift]} ({status}).{tail}"
