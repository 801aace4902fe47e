"""Where an arm's runs break on the ladder of rates, and whether two arms break at different places.

Intervals are those of a threshold on evenly spaced rungs (`evaluation.thresholds`); whether there is a shift is decided
by an exact test, which assumes nothing about the shape of the edge.
"""

from collections.abc import Mapping, Sequence
from decimal import Decimal
from typing import Literal

import numpy as np

from evaluation.curves import Classified, Criterion
from evaluation.records import Record
from evaluation.statistics import stratified_test
from evaluation.thresholds import Ends, draw_chances, shift_interval, threshold_interval

_Count = tuple[int, int]
"""(unstable, all) runs."""
Shift = Literal["up", "down", "not_detectable", "not_identified"]

_MOST_SEEDS, _POWER, _LADDERS = 16, 0.8, 200
"""Of `seeds_needed`: where the search ends, what is asked for, simulated ladders a number of seeds."""


class ArmBoundary(Record):
    """Where an arm's runs break; rates, or null where the ladder does not say."""

    last_stable: float | None
    first_unstable: float | None
    low: float | None
    """Interval of the boundary, from enough seeds on; null also where it reaches beyond the ladder."""
    high: float | None
    text: str


class ArmShift(Record):
    """One arm's boundary against the control's."""

    shift: Shift
    min_detectable: float | None
    """Smallest shift, in rungs, that these seeds could have shown if all agreed; null if none could."""
    p: float | None
    """Of the exact test; null where there are too few seeds for one."""
    low: float | None = None
    """95 % interval of the shift in rungs of the rates that both arms have; null where there is no test."""
    high: float | None = None
    seeds_needed: int | None = None
    """Seeds a rate with which a shift of one rung would be seen four times in five; null where a shift was seen,
    where there is no test, and where more than 16 would be needed."""
    text: str


def rate_text(rate: float) -> str:
    """Return a rate as people write it: 0.0003 is `3e-4`."""
    return f"{Decimal(repr(rate)).normalize():e}"


def locate(runs: Sequence[Classified], criterion: Criterion) -> ArmBoundary:
    """Return the bracket of one arm, and its interval where there are enough seeds.

    A rate is unstable when at least half of its ended runs are. Where the ladder is not monotone the boundary lies
    between the highest stable rate below the lowest unstable one and that one.
    """
    ended = [r for r in runs if r.run_class != "incomplete"]
    rates = sorted({r.lr for r in ended})
    share = {x: float(np.mean([r.unstable for r in ended if r.lr == x])) for x in rates}
    first = min((x for x in rates if share[x] >= 0.5), default=None)
    last = max((x for x in rates if share[x] < 0.5 and (first is None or x < first)), default=None)
    low, high = boundary_interval(ended, criterion)
    texts = [_bracket_text(last, first), _seeds_text(ended, low, high)]
    if first is not None and any(share[x] < 0.5 for x in rates if x > first):
        above = ", ".join(rate_text(x) for x in rates if x > first and share[x] < 0.5)
        texts.append(f"the ladder is not monotone: stable again at {above}")
    if unknown := sorted({r.lr for r in runs} - set(rates)):
        texts.append(f"no ended run at {', '.join(map(rate_text, unknown))}")
    return ArmBoundary(
        last_stable=last, first_unstable=first, low=low, high=high, text="; ".join(t for t in texts if t)
    )


def _bracket_text(last: float | None, first: float | None) -> str:
    if first is None and last is None:
        return "no run has ended"
    if first is None:
        return f"stable up to {rate_text(last or 0.0)}, the highest rate that ended: no boundary found"
    if last is None:
        return f"unstable from {rate_text(first)} on, the lowest rate that ended: no boundary found"
    return f"breaks between {rate_text(last)} (last stable) and {rate_text(first)} (first unstable)"


def _seeds_text(ended: Sequence[Classified], low: float | None, high: float | None) -> str:
    seeds = len({r.seed for r in ended})
    if not seeds:
        return ""
    if seeds == 1:
        return "one seed, no interval"
    by_rate = {x: [r.unstable for r in ended if r.lr == x] for x in sorted({r.lr for r in ended})}
    shares = ", ".join(f"{rate_text(x)} {sum(found)}/{len(found)}" for x, found in by_rate.items())
    if low is None and high is None:
        return f"{seeds} seeds, no interval; unstable runs: {shares}"
    ends = [rate_text(float(f"{x:.1e}")) if x is not None else "beyond the ladder" for x in (low, high)]
    return f"95 % interval {ends[0]} to {ends[1]} ({seeds} seeds); unstable runs: {shares}"


def boundary_interval(ended: Sequence[Classified], criterion: Criterion) -> tuple[float | None, float | None]:
    """Return the 95 % interval of an arm's boundary over seeds, as rates.

    Below the declared number of ended runs at any rate, and where no run or every run is unstable, there is no
    interval. An end that lies beyond the ladder is None.
    """
    rates = sorted({r.lr for r in ended})
    counts = [_count([r for r in ended if r.lr == x]) for x in rates]
    unstable, runs = (sum(column) for column in zip(*counts, strict=True)) if counts else (0, 0)
    if len(rates) < 2 or min(n for _, n in counts) < criterion.min_seeds_for_interval or unstable in {0, runs}:
        return None, None
    low, high = (
        None if rung is None else float(10 ** np.interp(rung, np.arange(len(rates)), np.log10(rates)))
        for rung in threshold_interval(counts)
    )
    return low, high


def _shift_interval(strata: Sequence[tuple[_Count, _Count]], criterion: Criterion, holds_zero: bool) -> Ends:
    """Return the 95 % interval of how many rungs higher the second arm breaks, on the rates that both have.

    Where the exact test does not rule out that there is no shift, nor does the interval: it would claim more.
    """
    if len(strata) < 2 or min(n for pair in strata for _, n in pair) < criterion.min_seeds_for_interval:
        return None, None
    low, high = shift_interval([c for c, _ in strata], [t for _, t in strata])
    if not holds_zero:
        return low, high
    return None if low is None else min(low, 0.0), None if high is None else max(high, 0.0)


def compare(
    runs: Sequence[Classified], control: str, treated: str, labels: Mapping[str, str], criterion: Criterion
) -> ArmShift:
    """Compare where two arms break, by the exact test within rates on the rates that both have.

    Args:
        runs: all classified runs.
        control: arm that is compared against.
        treated: arm whose shift it is.
        labels: words for the arms.
        criterion: declares the confidence and the fewest seeds for a test.
    """
    arms = {a: [r for r in runs if r.arm == a and r.run_class != "incomplete"] for a in (control, treated)}
    for arm, ended in arms.items():
        if not ended or len({r.unstable for r in ended}) == 1:
            kind = "unstable" if ended and ended[0].unstable else "stable"
            text = f"every ended run of '{labels[arm]}' is {kind}" if ended else f"no run of '{labels[arm]}' has ended"
            return ArmShift(shift="not_identified", min_detectable=None, p=None, text=text)
    strata = _strata(arms[control], arms[treated])
    more = sum(c[0] * t[1] > t[0] * c[1] for c, t in strata)
    less = sum(c[0] * t[1] < t[0] * c[1] for c, t in strata)
    text = (
        f"of {len(strata)} rates, {more} broke '{labels[control]}' more often and {less} broke '{labels[treated]}' more"
    )
    seeds = min(len({r.seed for r in ended}) for ended in arms.values())
    if seeds < criterion.min_seeds_for_interval or not strata:
        count = "one seed" if seeds == 1 else f"{seeds} seeds"
        text += f"; {count}, no test (at least {criterion.min_seeds_for_interval} seeds needed)"
        return ArmShift(shift="not_detectable", min_detectable=None, p=None, text=text)
    p = stratified_test([(c[0], c[1], t[0], t[1]) for c, t in strata])
    minimum = smallest_shift(min(min(c[1], t[1]) for c, t in strata), len(strata), 1 - criterion.confidence)
    text += f"; exact test within rates, p = {p:.2g}, {seeds} seeds"
    low, high = _shift_interval(strata, criterion, holds_zero=p > 1 - criterion.confidence)
    if low is not None or high is not None:
        ends = ("beyond the ladder" if end is None else f"{end:+.1f}" for end in (low, high))
        text += f"; 95 % interval of the shift {' to '.join(ends)} rungs"
    if p > 1 - criterion.confidence:
        return ArmShift(shift="not_detectable", min_detectable=minimum, p=p, low=low, high=high, text=text)
    fewer = sum(t[0] / t[1] - c[0] / c[1] for c, t in strata) < 0
    word: Shift = "up" if fewer else "down"
    return ArmShift(shift=word, min_detectable=minimum, p=p, low=low, high=high, text=text)


def _strata(first: Sequence[Classified], second: Sequence[Classified]) -> list[tuple[_Count, _Count]]:
    """Return the (unstable, all) runs of both arms at each rate that both have, rates ascending."""
    shared = sorted({r.lr for r in first} & {r.lr for r in second})
    return [(_count([r for r in first if r.lr == x]), _count([r for r in second if r.lr == x])) for x in shared]


def with_seeds_needed(
    found: ArmShift, runs: Sequence[Classified], control: str, treated: str, criterion: Criterion
) -> ArmShift:
    """Return a comparison that found nothing with how many seeds it would have taken; any other as it is."""
    if found.shift != "not_detectable" or found.p is None:
        return found
    arms = ([r for r in runs if r.arm == a and r.run_class != "incomplete"] for a in (control, treated))
    needed = seeds_needed(_strata(*arms), criterion)
    words = f"about {needed}" if needed is not None else f"more than {_MOST_SEEDS}"
    text = f"{found.text}; {words} seeds a rate would be needed to see a shift of one rung"
    return found.replace(seeds_needed=needed, text=text)


def seeds_needed(strata: Sequence[tuple[_Count, _Count]], criterion: Criterion) -> int | None:
    """Return with how many seeds a rate the test would see a shift of one rung with a power of .8, by simulation.

    Every simulated ladder has a threshold and a width that these runs make likely, so that four alike are not taken for
    certain: the power is that to be expected, not that of the likeliest ladder.

    Args:
        strata: ((unstable, all), (unstable, all)) runs of the two arms, rates ascending.
        criterion: declares the confidence, and the fewest seeds for a test.
    """
    rng, alpha = np.random.default_rng(0), 1 - criterion.confidence
    chances_2BR = draw_chances(list(zip(*strata, strict=True)), _LADDERS, 1.0, rng)
    for seeds in range(criterion.min_seeds_for_interval, _MOST_SEEDS + 1):
        drawn_BR2 = np.moveaxis(rng.binomial(seeds, chances_2BR), 0, -1)
        tables = ([(int(a), seeds, int(b), seeds) for a, b in rows] for rows in drawn_BR2)
        if np.mean([stratified_test(table) <= alpha for table in tables]) >= _POWER:
            return seeds
    return None


def _count(runs: Sequence[Classified]) -> _Count:
    """Return (unstable, all) runs."""
    return sum(r.unstable for r in runs), len(runs)


def smallest_shift(seeds: int, rungs: int, alpha: float) -> float | None:
    """Return at how many rungs every seed of one arm and none of the other must break to be seen; None: never."""
    for count in range(1, rungs + 1):
        if stratified_test([(seeds, seeds, 0, seeds)] * count) <= alpha:
            return float(count)
    return None
