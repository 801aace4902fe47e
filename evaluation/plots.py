"""Pictures of the report: the ladder, and the learning curves. Readable in black and white: markers and line styles."""

import io
import math
from collections.abc import Sequence
from typing import Any

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from evaluation.curves import Classified, RunEvidence, trailing_means
from evaluation.given import ReportInput
from evaluation.ladders import rate_text

MARKERS = {"stable": "o", "degraded": "v", "collapsed": "X", "diverged": "*", "incomplete": "s"}
STYLES = ("-", "--", ":", "-.")
POINTS = ("o", "s", "^", "D")
COLOURS = ("#1b6ca8", "#c8553d", "#588157", "#6d597a")
DPI = 110
WIDEST = 4
"""Columns of curves side by side; more rates go below."""


def plot_ladder(runs: Sequence[Classified], arm_labels: dict[str, str]) -> bytes:
    """Return a PNG of every run's class by rate and arm; hollow: unstable, small and grey: incomplete."""
    figure, axes = plt.subplots(figsize=(8, 1.6 + 0.7 * len(arm_labels)), layout="constrained")
    arms, seeds = list(arm_labels), sorted({r.seed for r in runs})
    apart = min(0.16, 0.64 / max(len(seeds), 1))
    for run in runs:
        offset = apart * (seeds.index(run.seed) - (len(seeds) - 1) / 2)
        axes.plot(run.lr, arms.index(run.arm) + offset, **_marker(run.run_class, 11 if len(seeds) < 4 else 8))
    for name in MARKERS:
        axes.plot([], [], label=name, **_marker(name, 9))
    rates = sorted({r.lr for r in runs})
    axes.set(xscale="log", xlabel="learning rate", yticks=range(len(arms)), ylim=(len(arms) - 0.4, -0.6))
    axes.set_xticks(rates, [rate_text(x) for x in rates])
    axes.set_xticks([], minor=True)
    axes.set_yticks(range(len(arms)), [arm_labels[a] for a in arms])
    figure.legend(ncols=len(MARKERS), loc="outside lower center", frameon=False)
    axes.grid(axis="x", alpha=0.3)
    return _png(figure)


def _marker(run_class: str, size: float) -> dict[str, Any]:
    """Return the look of a class: told apart by shape and fill, so that it survives a photocopier."""
    edge = "#777777" if run_class == "incomplete" else COLOURS[0] if run_class == "stable" else COLOURS[1]
    return {
        "marker": MARKERS[run_class],
        "linestyle": "none",
        "markersize": size / 2 if run_class == "incomplete" else size,
        "markerfacecolor": edge if run_class == "stable" else "white",
        "markeredgecolor": edge,
        "markeredgewidth": 1.6,
    }


def plot_curves(given: ReportInput) -> bytes:
    """Return a PNG with a column a rate: pass@1 with its 95 % band above, the training reward below."""
    runs, arm_labels = given.runs, given.arm_labels
    rates = sorted({r.lr for r in runs})
    columns = max(1, min(WIDEST, len(rates)))
    pairs = max(1, -(-len(rates) // columns))
    figure, grid = plt.subplots(
        2 * pairs, columns, figsize=(max(4.0, 2.9 * columns), 5.2 * pairs), sharex=True, squeeze=False,
        layout="constrained",
    )  # fmt: skip
    looks: dict[str, dict[str, Any]] = {
        arm: {"color": COLOURS[i % 4], "linestyle": STYLES[i % 4], "marker": POINTS[i % 4]}
        for i, arm in enumerate(arm_labels)
    }
    for index in range(pairs * columns):
        row, column = divmod(index, columns)
        top, bottom = grid[2 * row][column], grid[2 * row + 1][column]
        if index >= len(rates):
            top.set_axis_off()
            bottom.set_axis_off()
            continue
        _draw_rate(top, bottom, [r for r in runs if r.lr == rates[index]], given, looks)
        top.set_title(f"learning rate {rate_text(rates[index])}", fontsize=10)
        bottom.set_xlabel("global step")
        bottom.tick_params(labelbottom=True)
        if column == 0:
            top.set_ylabel("pass@1 (95 % band)")
            bottom.set_ylabel("reward (mean of 5 steps)")
    _same_heights([axes for line in grid[0::2] for axes in line])
    _same_heights([axes for line in grid[1::2] for axes in line])
    handles = [Line2D([], [], markersize=4, label=label, **looks[arm]) for arm, label in arm_labels.items()]
    figure.legend(handles=handles, ncols=len(handles), loc="outside lower center", frameon=False)
    return _png(figure)


def _draw_rate(
    top: Axes,
    bottom: Axes,
    runs: Sequence[RunEvidence],
    given: ReportInput,
    looks: dict[str, dict[str, Any]],
) -> None:
    for run in runs:
        look = looks[run.arm]
        _draw_scores(top, run, given, look)
        steps = range(1, len(run.rewards) + 1)
        bottom.plot(steps, trailing_means(run.rewards, 5), linewidth=1.2, **{**look, "marker": ""})


def _same_heights(panels: Sequence[Axes]) -> None:
    """Give panels one scale from just below 0, so that a curve lying on 0 is seen."""
    top = max(axes.get_ylim()[1] for axes in panels if axes.axison)
    for axes in panels:
        axes.set_ylim(-0.03 * top, top)
        axes.grid(alpha=0.3)


def _draw_scores(axes: Axes, run: RunEvidence, given: ReportInput, look: dict[str, Any]) -> None:
    base = given.base.get(given.primary)
    scores = ({0: base} if base else {}) | run.scores.get(given.primary, {})
    points = [(step, given.estimates(given.protocols[0], scores[step])[1]) for step in sorted(scores)]
    points = [(s, e) for s, e in points if e.value is not None]
    if not points:
        return
    steps = [s for s, _ in points]
    axes.plot(steps, [e.value or 0.0 for _, e in points], markersize=4, **look)
    low = [e.low if e.low is not None else math.nan for _, e in points]
    high = [e.high if e.high is not None else math.nan for _, e in points]
    axes.fill_between(steps, low, high, alpha=0.15, color=look["color"])


def _png(figure: Figure) -> bytes:
    out = io.BytesIO()
    figure.savefig(out, format="png", dpi=DPI, metadata={"Software": ""})
    plt.close(figure)
    return out.getvalue()
