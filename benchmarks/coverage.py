"""How often the intervals hold the truth, and how wide they are: `python benchmarks/coverage.py [--draws 2000]`.

Each draw makes a new benchmark (problems from the population that `abilities` draws from), new samples and new seeds;
the truth is that of the population. Prints Markdown; exit 1 where a two-sided 95 % interval covers less than 93 % or
more than 98 %, rows in brackets apart: they show what not to do, or what is wide on purpose, or too few problems. One
core, minutes.
"""

import argparse
import sys
from collections.abc import Callable, Iterator

import numpy as np

from evaluation.curves import Classified, Criterion
from evaluation.drops import mean_interval
from evaluation.ladders import boundary_interval, shift_interval
from evaluation.scores import estimate_pass_at_ks
from evaluation.statistics import bootstrap_interval, sampling_error, wilson_interval

Interval = tuple[float, float] | None
Draw = Callable[[np.random.Generator], Iterator[tuple[str, float, Interval]]]
"""One experiment: (name, truth, interval), the same names each time."""
SAMPLES = 160
KS = (1, 10, 100)


def rates(rng: np.random.Generator, count: int) -> np.ndarray:
    """Return pass rates like those of real results: many problems near 0 or 1."""
    return 1 / (1 + np.exp(-rng.normal(-1.1, 2.2, count)))


POPULATION = rates(np.random.default_rng(1), 2_000_000)
TRUE = {k: float(1 - np.mean((1 - POPULATION) ** k)) for k in KS}


def single(problems: int) -> Draw:
    """pass@k of one checkpoint: problem bootstrap, and beside it the sampling error on these problems."""

    def draw(rng: np.random.Generator) -> Iterator[tuple[str, float, Interval]]:
        p = rates(rng, problems)
        judged = [(SAMPLES, int(c)) for c in rng.binomial(SAMPLES, p)]
        for k, e in estimate_pass_at_ks(judged, KS).items():
            assert e.value is not None and e.low is not None and e.high is not None
            name = f"pass@{k}, bootstrap, {problems} problems"
            yield name if problems > 200 else f"({name})", TRUE[k], (e.low, e.high)
            error = sampling_error(judged, k)
            assert error is not None
            here, half = float(1 - np.mean((1 - p) ** k)), 1.96 * error
            yield f"pass@{k}, sampling error, {problems} problems", here, (e.value - half, e.value + half)

    return draw


def paired(rng: np.random.Generator) -> Iterator[tuple[str, float, Interval]]:
    """Two checkpoints on the same problems: the second one better by half a logit, unevenly."""
    ability, own = rng.normal(-1.1, 2.2, 378), rng.normal(0.5, 0.5, 378)
    first, second = (rng.binomial(SAMPLES, 1 / (1 + np.exp(-x))) / SAMPLES for x in (ability, ability + own))
    yield "pass@1, paired difference, 378 problems", PAIRED, bootstrap_interval(second - first)


def _paired_truth() -> float:
    rng = np.random.default_rng(2)
    ability, own = rng.normal(-1.1, 2.2, 2_000_000), rng.normal(0.5, 0.5, 2_000_000)
    return float(np.mean(1 / (1 + np.exp(-ability - own)) - 1 / (1 + np.exp(-ability))))


PAIRED = _paired_truth()


def clustered(rng: np.random.Generator) -> Iterator[tuple[str, float, Interval]]:
    """Near-duplicates: groups of 1 to 4 problems of one ability; drawn together, and as if they were apart."""
    sizes = rng.choice([1, 2, 4], p=[0.6, 0.25, 0.15], size=190)
    group = np.repeat(np.arange(len(sizes)), sizes)
    p = rates(rng, len(sizes))[group]
    found = rng.binomial(SAMPLES, p) / SAMPLES
    yield "pass@1, near-duplicates drawn together", TRUE[1], bootstrap_interval(found, clusters_P=group.tolist())
    yield "(the same, drawn apart: what not to do)", TRUE[1], bootstrap_interval(found)


def greedy(rng: np.random.Generator) -> Iterator[tuple[str, float, Interval]]:
    """One greedy answer to each of 500 questions."""
    for rate in (0.02, 0.5, 0.86):
        yield f"Wilson, 500 greedy answers at {rate}", rate, wilson_interval(int(rng.binomial(500, rate)), 500)


def over_seeds(rng: np.random.Generator) -> Iterator[tuple[str, float, Interval]]:
    """A limb of the rule `drop`: mean over seeds, Student's t."""
    for seeds in (2, 4, 8):
        yield f"mean of {seeds} seeds, Student's t", 0.018, mean_interval(list(rng.normal(0.018, 0.02, seeds)), 0.95)


def boundary(rng: np.random.Generator) -> Iterator[tuple[str, float, Interval]]:
    """An arm's boundary over seeds; a ladder says no more than between which rungs, so this one is wide on purpose."""
    lrs = 10.0 ** np.arange(-7, 0)
    for seeds in (4, 8):
        edge = rng.uniform(1.5, 4.5)
        chance = 1 / (1 + np.exp(-(np.arange(7) - edge) / 0.25))
        broken = rng.random((seeds, 7)) < chance
        runs = [
            Classified(label="x", arm="a", lr=float(lr), seed=s, why="", onset_step=None,
                       run_class="collapsed" if broken[s, i] else "stable")
            for s in range(seeds) for i, lr in enumerate(lrs)
        ]  # fmt: skip
        low, high = boundary_interval(runs, Criterion())
        found = (np.log10(low) if low else -7.0, np.log10(high) if high else -1.0)
        yield f"(boundary of an arm, {seeds} seeds, in rungs)", edge - 7, found
        moved = float(rng.choice([0.0, 0.5, 1.0, 2.0]))
        others = 1 / (1 + np.exp(-(np.arange(7) - min(edge + moved, 5.0)) / 0.25))
        broken = rng.random((seeds, 7)) < others
        second = [r.replace(run_class="collapsed" if broken[r.seed, i % 7] else "stable") for i, r in enumerate(runs)]
        shift = shift_interval(runs, second, Criterion())
        yield f"(shift between two arms, {seeds} seeds, in rungs)", min(edge + moved, 5.0) - edge, shift


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--draws", type=int, default=2000)
    parser.add_argument("--only", default="", help="names of draws, e.g. boundary,greedy")
    args = parser.parse_args()
    met = True
    print("| interval | draws | covers | mean width |\n|---|---|---|---|")
    for draw in (single(378), single(334), single(276), single(100), paired, clustered, greedy, over_seeds, boundary):
        if args.only and getattr(draw, "__name__", "") not in args.only.split(","):
            continue
        rng = np.random.default_rng([20261203, len(getattr(draw, "__name__", ""))])
        held: dict[str, list[bool]] = {}
        width: dict[str, list[float]] = {}
        for _ in range(args.draws):
            for name, truth, interval in draw(rng):
                assert interval is not None
                held.setdefault(name, []).append(interval[0] <= truth <= interval[1])
                width.setdefault(name, []).append(interval[1] - interval[0])
        for name, found in held.items():
            covers = float(np.mean(found))
            print(f"| {name} | {args.draws} | {covers:.3f} | {np.mean(width[name]):.4f} |", flush=True)
            met &= name.startswith("(") or 0.93 <= covers <= 0.98
    print(f"\nevery 95 % interval covers 93 to 98 %: {met}")
    return 0 if met else 1


if __name__ == "__main__":
    sys.exit(main())
