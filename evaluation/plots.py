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

from evaluation.curves import Classified, RunEvidence, trailing_means
from evaluation.scores import Score

MARKERS = {"stable": "o", "degraded": "v", "collapsed": "X", "diverged": "*", "incomplete": "|"}
STYLES = ("-", "--", ":", "-.")
COLOURS = ("#1b6ca8", "#c8553d", "#588157", "#6d597a")
DPI = 110


def plot_ladder(runs: Sequence[Classified], arm_labels: dict[str, str]) -> bytes:
    """Return a PNG of every run's class by rate and arm."""
    figure, axes = plt.subplots(figsize=(8, 1.1 + 0.7 * len(arm_labels)), layout="constrained")
    arms = list(arm_labels)
    for run in runs:
        offset = 0.08 * run.seed
        fill = COLOURS[1] if run.unstable else COLOURS[0] if run.run_class == "stable" else "#999999"
        axes.plot(run.lr, arms.index(run.arm) + offset, MARKERS[run.run_class], color=fill, markersize=11)
    for name, marker in MARKERS.items():
        colour = COLOURS[0] if name == "stable" else "#999999" if name == "incomplete" else COLOURS[1]
        axes.plot([], [], marker, color=colour, label=name)
    axes.set(xscale="log", xlabel="learning rate", yticks=range(len(arms)), ylim=(-0.6, len(arms) - 0.3))
    axes.set_yticklabels([arm_labels[a] for a in arms])
    axes.legend(ncols=5, loc="upper center", bbox_to_anchor=(0.5, -0.35), frameon=False)
    axes.grid(axis="x", alpha=0.3)
    return _png(figure)


def plot_curves(runs: Sequence[RunEvidence], base: Score | None, benchmark: str, arm_labels: dict[str, str]) -> bytes:
    """Return a PNG with a column a rate: pass@1 with its 95 % band above, the training reward below."""
    rates = sorted({r.lr for r in runs})
    figure, grid = plt.subplots(
        2, len(rates), figsize=(max(4.0, 2.7 * len(rates)), 5.2), sharex="col", sharey="row", squeeze=False,
        layout="constrained",
    )  # fmt: skip
    for column, lr in enumerate(rates):
        top, bottom = grid[0][column], grid[1][column]
        top.set_title(f"lr {lr:g}", fontsize=10)
        for run in (r for r in runs if r.lr == lr):
            index = list(arm_labels).index(run.arm)
            look: dict[str, Any] = {"color": COLOURS[index % 4], "linestyle": STYLES[index % 4]}
            _draw_scores(top, run, base, benchmark, look, arm_labels[run.arm] if run.seed == 0 else None)
            steps = range(1, len(run.rewards) + 1)
            bottom.plot(steps, trailing_means(run.rewards, 5), linewidth=1.2, **look)
        bottom.set_xlabel("global step")
    grid[0][0].set_ylabel("pass@1 (95 % band)")
    grid[1][0].set_ylabel("reward (mean of 5 steps)")
    grid[0][0].legend(fontsize=8, frameon=False)
    for axes in grid.flat:
        axes.set_ylim(bottom=0)
        axes.grid(alpha=0.3)
    return _png(figure)


def _draw_scores(
    axes: Axes, run: RunEvidence, base: Score | None, benchmark: str, look: dict[str, Any], label: str | None
) -> None:
    scores = ({0: base} if base else {}) | run.scores.get(benchmark, {})
    points = [(step, scores[step].estimate(scores[step].suite, 1)) for step in sorted(scores)]
    points = [(s, e) for s, e in points if e.value is not None]
    if not points:
        return
    steps = [s for s, _ in points]
    axes.plot(steps, [e.value or 0.0 for _, e in points], marker="o", markersize=4, label=label, **look)
    low = [e.low if e.low is not None else math.nan for _, e in points]
    high = [e.high if e.high is not None else math.nan for _, e in points]
    axes.fill_between(steps, low, high, alpha=0.15, color=look["color"])


def _png(figure: Figure) -> bytes:
    out = io.BytesIO()
    figure.savefig(out, format="png", dpi=DPI, metadata={"Software": ""})
    plt.close(figure)
    return out.getvalue()
