"""The ladder and the curves as inline SVG, drawn 400 units wide so that their letters can be read on a phone.

Everything is told twice: classes by shape and by fill, arms by dash, marker and hatching, so that black and white, and
any theme, will do. Each mark says its figures in a `<title>`.
"""

import math
from collections.abc import Sequence
from itertools import pairwise

from evaluation.curves import Classified, RunEvidence, trailing_means
from evaluation.findings import Finding
from evaluation.given import ReportInput
from evaluation.ladders import rate_text
from evaluation.page.markup import Markup, joined, tag
from evaluation.scores import Estimate

WIDTH, LEFT, RIGHT = 400, 34, 14
ARMS = 4
"""Looks of arms; more arms take them again."""
SHAPES = {
    "stable": "M-5,0a5,5 0 1,0 10,0a5,5 0 1,0 -10,0z",
    "degraded": "M-5.5,-4L5.5,-4L0,6z",
    "collapsed": "M-5,-5L5,5M-5,5L5,-5",
    "diverged": "M0,-6.5L1.6,-2L6.2,-2L2.6,1L4,5.6L0,2.9L-4,5.6L-2.6,1L-6.2,-2L-1.6,-2z",
    "incomplete": "M-2.5,-2.5h5v5h-5z",
}
POINTS = (
    "M-2.5,0a2.5,2.5 0 1,0 5,0a2.5,2.5 0 1,0 -5,0z",
    "M-2.4,-2.4h4.8v4.8h-4.8z",
    "M0,-3L3,2.4L-3,2.4z",
    "M0,-3.2L3.2,0L0,3.2L-3.2,0z",
)
REWARD_WINDOW = 5


def svg(height: float, label: str, *children: object) -> Markup:
    """Return a picture that scales with the page."""
    return tag("svg", *children, viewBox=f"0 0 {WIDTH} {height:g}", role="img", aria_label=label)


def _mark(shape: str, x: float, y: float, look: str, title: str) -> Markup:
    return tag("path", tag("title", title), d=shape, transform=f"translate({x:.1f},{y:.1f})", class_=look)


def ladder_picture(given: ReportInput, finding: Finding, runs: Sequence[Classified]) -> Markup:
    """Return every run's class by rate (evenly spaced) and arm, with each arm's bracket and interval."""
    rates = sorted({r.lr for r in runs})
    seeds = sorted({r.seed for r in runs})
    apart = 13 if len(seeds) < 5 else 9
    row = 34 + apart * len(seeds)
    columns = {x: LEFT + 8 + (WIDTH - LEFT - RIGHT - 16) * (i / max(1, len(rates) - 1)) for i, x in enumerate(rates)}
    parts: list[Markup] = []
    for i, (arm, words) in enumerate(given.arm_labels.items()):
        top = 4 + i * row
        parts += [
            tag("text", words, x=2, y=top + 12, class_="name"),
            _bracket(finding, arm, columns, top + 18, row - 24),
        ]
        for r in (r for r in runs if r.arm == arm):
            y = top + 27 + apart * seeds.index(r.seed)
            title = f"{r.label}: {r.run_class}" + (f" from step {r.onset_step}" if r.onset_step else "") + f". {r.why}"
            parts.append(_mark(SHAPES[r.run_class], columns[r.lr], y, f"mark {r.run_class}", title))
    bottom = 8 + row * len(given.arm_labels)
    for x, at in columns.items():
        parts.append(tag("line", x1=f"{at:.1f}", x2=f"{at:.1f}", y1=bottom - 4, y2=bottom, class_="axis"))
        parts.append(tag("text", rate_text(x), x=f"{at:.1f}", y=bottom + 12, class_="tick middle"))
    parts.append(tag("text", "learning rate (rungs evenly spaced)", x=WIDTH / 2, y=bottom + 27, class_="tick middle"))
    told = f"Class of each of {len(runs)} runs by learning rate and arm; the table Runs says the same in words."
    return joined(svg(bottom + 34, told, *parts), _legend(runs))


def _bracket(finding: Finding, arm: str, columns: dict[float, float], y: float, height: float) -> Markup:
    """Return the hatched space between the last stable and the first unstable rate, and the interval's line."""
    found = finding.boundary.get(arm)
    if found is None:
        return Markup()
    parts = []
    if found.last_stable in columns and found.first_unstable in columns:
        left, right = columns[found.last_stable], columns[found.first_unstable]
        title = tag("title", found.text)
        parts.append(tag("rect", title, x=left, y=y, width=right - left, height=height, class_="bracket"))
    if found.low is not None or found.high is not None:
        ends = [_position(v, columns, end) for v, end in ((found.low, 0), (found.high, -1))]
        d = f"M{ends[0]:.1f},{y}H{ends[1]:.1f}M{ends[0]:.1f},{y - 3}v6M{ends[1]:.1f},{y - 3}v6"
        parts.append(tag("path", tag("title", f"95 % interval. {found.text}"), d=d, class_="interval"))
    return joined(*parts)


def _position(rate: float | None, columns: dict[float, float], end: int) -> float:
    """Return where a rate lies between the rungs; beyond the ladder, its end."""
    rates = list(columns)
    if rate is None:
        return columns[rates[end]]
    for low, high in pairwise(rates):
        if low <= rate <= high:
            share = math.log(rate / low) / math.log(high / low)
            return columns[low] + share * (columns[high] - columns[low])
    return columns[rates[0 if rate < rates[0] else -1]]


def _legend(runs: Sequence[Classified]) -> Markup:
    seen = {r.run_class for r in runs}
    items = (tag("span", _icon(SHAPES[c], f"mark {c}"), f" {c}") for c in SHAPES if c in seen)
    return tag("p", *items, class_="legend")


def _icon(shape: str, look: str) -> Markup:
    return tag("svg", tag("path", d=shape, class_=look), viewBox="-8 -8 16 16", class_="icon", aria_hidden="true")


def curves_pictures(given: ReportInput) -> Markup:
    """Return a pair of pictures a rate: pass@1 with its bands above, the training reward below."""
    rates = sorted({r.lr for r in given.runs})
    arms = list(given.arm_labels)
    estimates = {(r.label, s): e for r in given.runs for s, e in _points(given, r)}
    top = max((e.high or 0.0 for e in estimates.values()), default=0.0) or 1.0
    height = max((v for r in given.runs for v in r.rewards if math.isfinite(v)), default=0.0) or 1.0
    figures = []
    for rate in rates:
        runs = [r for r in given.runs if r.lr == rate]
        steps = max(r.steps for r in runs)
        scores = [_score_curve(given, r, arms.index(r.arm) % ARMS, steps, top) for r in runs]
        rewards = [_reward_curve(r, arms.index(r.arm) % ARMS, steps, height) for r in runs]
        name = rate_text(rate)
        figures.append(
            tag(
                "figure",
                tag("figcaption", f"learning rate {name}"),
                svg(170, f"pass@1 by step at {name}, 95 % bands", _axes(steps, top, "pass@1"), *scores),
                svg(170, f"reward by step at {name}", _axes(steps, height, "reward"), *rewards),
            )
        )
    keys = (
        tag("span", _icon(POINTS[i % ARMS], f"point arm{i % ARMS}"), _dash(i % ARMS), f" {given.arm_labels[a]}")
        for i, a in enumerate(arms)
    )
    return joined(tag("p", *keys, class_="legend"), tag("div", *figures, class_="curves"))


def _dash(look: int) -> Markup:
    line = tag("path", d="M0,8H28", class_=f"curve arm{look}")
    return tag("svg", line, viewBox="0 0 28 16", class_="icon wide", aria_hidden="true")


def _points(given: ReportInput, run: RunEvidence) -> list[tuple[int, Estimate]]:
    base = given.base.get(given.primary)
    scores = ({0: base} if base else {}) | run.scores.get(given.primary, {})
    found = [(s, given.estimates(given.protocols[0], scores[s])[1]) for s in sorted(scores)]
    return [(s, e) for s, e in found if e.value is not None]


def _place(step: float, value: float, steps: int, top: float) -> tuple[float, float]:
    return LEFT + (WIDTH - LEFT - RIGHT) * step / max(1, steps), 148 - 138 * value / top


def _score_curve(given: ReportInput, run: RunEvidence, look: int, steps: int, top: float) -> Markup:
    points = _points(given, run)
    if not points:
        return Markup()
    line = [_place(s, e.value or 0.0, steps, top) for s, e in points]
    edge = [_place(s, e.high or 0.0, steps, top) for s, e in points]
    edge += [_place(s, e.low or 0.0, steps, top) for s, e in reversed(points)]
    marks = (
        _mark(
            POINTS[look], x, y, f"point arm{look}", f"{run.label}, step {s}: {e.value:.3f} [{e.low:.3f}, {e.high:.3f}]"
        )
        for (x, y), (s, e) in zip(line, points, strict=True)
    )
    band, curve = tag("polygon", points=_joined(edge), class_=f"band arm{look}"), _polyline(line, look)
    return tag("g", band, curve, *marks)


def _reward_curve(run: RunEvidence, look: int, steps: int, top: float) -> Markup:
    """Return the trailing mean of the reward, broken where no reward was finite."""
    pieces: list[list[tuple[float, float]]] = [[]]
    for step, mean in enumerate(trailing_means(run.rewards, REWARD_WINDOW), start=1):
        if math.isfinite(mean):
            pieces[-1].append(_place(step, mean, steps, top))
        elif pieces[-1]:
            pieces.append([])
    return tag("g", tag("title", run.label), *(_polyline(p, look) for p in pieces if p))


def _polyline(points: Sequence[tuple[float, float]], look: int) -> Markup:
    return tag("polyline", points=_joined(points), class_=f"curve arm{look}")


def _joined(points: Sequence[tuple[float, float]]) -> str:
    return " ".join(f"{x:.1f},{y:.1f}" for x, y in points)


def _axes(steps: int, top: float, words: str) -> Markup:
    parts = []
    for value in (0.0, top / 2, top):
        _, y = _place(0, value, steps, top)
        parts.append(tag("line", x1=LEFT, x2=WIDTH - RIGHT, y1=f"{y:.1f}", y2=f"{y:.1f}", class_="grid"))
        parts.append(tag("text", f"{value:.2f}", x=LEFT - 3, y=f"{y + 3.5:.1f}", class_="tick end"))
    for step in (0, steps // 2, steps):
        parts.append(tag("text", step, x=f"{_place(step, 0, steps, top)[0]:.1f}", y=162, class_="tick middle"))
    return joined(*parts, tag("text", words, x=LEFT + 4, y=10, class_="tick"))


def patterns() -> Markup:
    """Return the hatchings, once a page: one an arm, and that of brackets."""
    angles = (45, -45, 0, 90, 45)
    found = [
        tag(
            "pattern",
            tag("line", x1=0, y1=0, x2=0, y2=5, class_=f"hatch arm{i}" if i < ARMS else "hatch"),
            id=f"hatch{i}",
            width=5,
            height=5,
            patternUnits="userSpaceOnUse",
            patternTransform=f"rotate({angle})",
        )
        for i, angle in enumerate(angles)
    ]
    return tag("svg", tag("defs", *found), width=0, height=0, class_="defs", aria_hidden="true")
