"""How often the intervals hold the truth, and how wide they are: `python benchmarks/coverage.py [--draws 2000]`.

Each draw makes a new benchmark (problems from the population that `abilities` draws from), new samples and new seeds;
the truth is that of the population. Prints Markdown; `+-` is two standard errors of the share. Exit 1 where a two-sided
95 % interval covers less than 93 % or more than 98 %, by more than that error; rows in brackets apart: they show what
not to do, what no ladder can tell, or too few problems. Some ten minutes of one core.
"""

import argparse
import sys
from collections.abc import Callable, Iterator

import numpy as np

from evaluation.curves import Classified, Criterion
from evaluation.drops import mean_interval
from evaluation.ladders import boundary_interval, compare
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
            yield name if problems >= 100 else f"({name})", TRUE[k], (e.low, e.high)
            error = sampling_error(judged, k)
            assert error is not None
            here, half = float(1 - np.mean((1 - p) ** k)), 1.96 * error
            name = f"pass@{k}, sampling error, {problems} problems"
            yield name if problems >= 100 else f"({name})", here, (e.value - half, e.value + half)

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


LRS = 10.0 ** np.arange(-7, 0)
ARMS = {"a": "a", "b": "b"}


def ladder(width: float) -> Draw:
    """Boundary and shift over seeds, of edges anywhere between the rungs; a sharp one's place no ladder can tell."""

    def seeds_of(rng: np.random.Generator, arm: str, edge: float, seeds: int) -> list[Classified]:
        broken = rng.random((seeds, len(LRS))) < 1 / (
            1 + np.exp(-np.clip((np.arange(len(LRS)) - edge) / width, -99, 99))
        )
        return [
            Classified(label="x", arm=arm, lr=float(lr), seed=s, why="", onset_step=None,
                       run_class="collapsed" if broken[s, i] else "stable")
            for s in range(seeds) for i, lr in enumerate(LRS)
        ]  # fmt: skip

    def draw(rng: np.random.Generator) -> Iterator[tuple[str, float, Interval]]:
        for seeds in (4, 8):
            edge, moved = rng.uniform(1.5, 3.5), float(rng.choice([0.0, 0.5, 1.0, 2.0]))
            first, second = seeds_of(rng, "a", edge, seeds), seeds_of(rng, "b", edge + moved, seeds)
            low, high = boundary_interval(first, Criterion())
            ends = (np.log10(low) if low else -7.0, np.log10(high) if high else -1.0)
            name = f"boundary, edge {width} rungs wide, {seeds} seeds, in rungs"
            if (low, high) != (None, None):  # else all runs, or none, broke: there is no interval
                yield name if width > 0.1 else f"({name})", edge - 7, ends
            found = compare([*first, *second], "a", "b", ARMS, Criterion())
            kind = "no shift" if not moved else "a shift"
            name = f"{kind}, edges {width} rungs wide, {seeds} seeds, in rungs"
            interval = (-6.0 if found.low is None else found.low, 6.0 if found.high is None else found.high)
            if found.p is not None:
                yield name if width > 0.1 and moved else f"({name})", moved, interval

    return draw


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--draws", type=int, default=2000)
    parser.add_argument("--only", default="", help="names of draws, e.g. ladder,greedy")
    args = parser.parse_args()
    met = True
    print("| interval | draws | covers | +- | mean width |\n|---|---|---|---|---|")
    draws: list[tuple[str, Draw]] = [(f"single{n}", single(n)) for n in (378, 334, 276, 164, 100, 30)]
    draws += [(f.__name__, f) for f in (paired, clustered, greedy, over_seeds)]
    draws += [("ladder", ladder(width)) for width in (0.05, 0.25, 0.5)]
    for position, (word, draw) in enumerate(draws):
        if args.only and word not in args.only.split(","):
            continue
        rng = np.random.default_rng([20261203, position])
        held: dict[str, list[bool]] = {}
        width: dict[str, list[float]] = {}
        for _ in range(args.draws):
            for name, truth, interval in draw(rng):
                assert interval is not None
                held.setdefault(name, []).append(interval[0] <= truth <= interval[1])
                width.setdefault(name, []).append(interval[1] - interval[0])
        for name, found in held.items():
            covers = float(np.mean(found))
            error = 2 * float(np.sqrt(covers * (1 - covers) / len(found)))
            print(f"| {name} | {len(found)} | {covers:.3f} | {error:.3f} | {np.mean(width[name]):.4f} |", flush=True)
            met &= name.startswith("(") or 0.93 - error <= covers <= 0.98 + error
    print(f"\nevery 95 % interval covers 93 to 98 %: {met}")
    return 0 if met else 1


if __name__ == "__main__":
    sys.exit(main())
