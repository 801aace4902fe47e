"""Where events begin on a ladder of rungs, by likelihood: the interval of one threshold, and of a shift between two.

The chance of an event at rung i is logistic((i - threshold) / width), the width unknown and free: whether an edge is
sharp or blurred is told by the counts themselves. An interval holds every threshold that no width makes too unlikely
(profile likelihood: Williams 1986, Biometrics 42, 641; Kelly 2001, The Statistician 50, 41). Where all runs agree it is
the space between two rungs, about which a ladder says nothing; where they do not, as wide as the counts make it.
"""

from collections.abc import Sequence
from functools import lru_cache
from statistics import NormalDist

import numpy as np

Counts = Sequence[tuple[int, int]]
"""(events, runs) at each rung, ascending."""
Ends = tuple[float | None, float | None]
"""In rungs, the first being 0; None where an end lies beyond the ladder."""

_STEP = 0.02
"""Of the grid of thresholds, in rungs; intervals are rounded outwards by one step."""
_WIDTHS = np.geomspace(0.01, 10.0, 50)


def threshold_interval(counts: Counts, level: float = 0.95) -> Ends:
    """Return the interval of the threshold."""
    first, last = _accepted(_likelihoods(counts).max(1), [counts], level) * _STEP - len(counts)
    return _end(first, 0, len(counts) - 1), _end(last, 0, len(counts) - 1)


def shift_interval(first: Counts, second: Counts, level: float = 0.95) -> Ends:
    """Return the interval of how many rungs higher the second threshold lies; both have the same rungs."""
    if len(first) != len(second):
        raise ValueError(f"counts: {len(first)} and {len(second)} rungs; give both at the same ones")
    one_M, other_M = (_likelihoods(counts).max(1) for counts in (first, second))
    around_S = np.pad(other_M, len(one_M) - 1, constant_values=-np.inf)
    best_D = (np.lib.stride_tricks.sliding_window_view(around_S, len(one_M)) + one_M).max(1)
    ends = (_accepted(best_D, [first, second], level) - len(one_M) + 1) * _STEP
    most = len(first) - 1
    return _end(ends[0], -most, most), _end(ends[1], -most, most)


def _end(rung: float, lowest: int, highest: int) -> float | None:
    rounded = round(float(rung), 6)
    return rounded if lowest <= rounded <= highest else None


def _accepted(likelihood_M: np.ndarray, groups: Sequence[Counts], level: float) -> np.ndarray:
    """Return the first and the last position whose likelihood is near enough to the greatest, a step further out.

    Twice the difference is compared with the square of the normal quantile, times n / (n - 1) as a variance from n runs
    a rung is: the widths are told by the same few runs.
    """
    runs = sum(min(n for _, n in counts) for counts in groups)
    most = NormalDist().inv_cdf((1 + level) / 2) ** 2 * runs / (runs - 1)
    near = np.flatnonzero(2 * (likelihood_M.max() - likelihood_M) <= most)
    return np.array([near[0] - 1, near[-1] + 1])


def _likelihoods(counts: Counts) -> np.ndarray:
    """Return (M, W): the log-likelihood of each threshold from one ladder below to one above, and of each width."""
    events_R, runs_R = np.array(counts, dtype=float).T
    log_event_MWR, log_none_MWR = _log_chances(len(counts))
    return log_event_MWR @ events_R + log_none_MWR @ (runs_R - events_R)


@lru_cache(maxsize=4)
def _log_chances(rungs: int) -> tuple[np.ndarray, np.ndarray]:
    """Return (M, W, R) logarithms of the chance of an event, and of none, at each rung."""
    apart_MR = np.arange(rungs) - _thresholds(rungs)[:, None]
    x_MWR = apart_MR[:, None] / _WIDTHS[:, None]
    return -np.logaddexp(0, -x_MWR), -np.logaddexp(0, x_MWR)


def _thresholds(rungs: int) -> np.ndarray:
    return np.arange(round(3 * rungs / _STEP) + 1) * _STEP - rungs


def draw_chances(groups: Sequence[Counts], count: int, shift: float, rng: np.random.Generator) -> np.ndarray:
    """Return (2, count, R) chances of an event at each rung for a control and for a threshold `shift` rungs higher.

    Each of the `count` ladders has a width drawn by its likelihood under the groups, whose thresholds are their own, so
    that runs which agree are not taken for certain; the control's threshold is drawn with it, by the first group's.
    """
    tables = [np.exp(found - found.max()) for found in map(_likelihoods, groups)]
    weight_MW = tables[0] * np.prod([t.sum(0) for t in tables[1:]], axis=0)
    drawn_B = rng.choice(weight_MW.size, size=count, p=(weight_MW / weight_MW.sum()).ravel())
    at_B, width_B = np.unravel_index(drawn_B, weight_MW.shape)
    threshold_B = _thresholds(len(groups[0]))[at_B]
    rungs = np.arange(len(groups[0]))
    return np.array(
        [1 / (1 + np.exp(-(rungs - threshold_B[:, None] - s) / _WIDTHS[width_B, None])) for s in (0.0, shift)]
    )
