"""Estimators and intervals: pass@k, the bootstrap over problems, exact tests. No benchmark or cell is known here.

Sources: Chen et al. 2021 (arXiv 2107.03374), eq. 1, for pass@k; Efron 1987 and Efron and Tibshirani 1993, ch. 14, for
the bootstrap (BCa); McNemar 1947 in its exact form for paired binary outcomes; Efron and Stein 1981 for the jackknife.
What each estimator assumes, and how it was tested, is in docs/statistics.md.
"""

import math
from collections.abc import Sequence
from functools import lru_cache
from statistics import NormalDist

import numpy as np

RESAMPLES = 4000
"""Bootstrap resamples: the Monte-Carlo error of a 95 % limit is then about 3 % of the interval's width."""


@lru_cache(maxsize=1 << 16)  # a report asks for the same few thousand triples half a million times
def pass_at_k(n: int, c: int, k: int) -> float:
    """Return the unbiased estimate of P(at least one of k samples passes): 1 - C(n-c, k) / C(n, k).

    Args:
        n: judged samples.
        c: those that pass.
        k: draws without replacement.

    Raises:
        ValueError: not 0 <= c <= n or not 1 <= k <= n; with fewer samples than k there is no unbiased estimate.
    """
    if not 0 <= c <= n:
        raise ValueError(f"c={c}: outside 0..n={n}")
    if not 1 <= k <= n:
        raise ValueError(f"k={k}: outside 1..n={n}; draw more samples")
    return 1.0 - math.comb(n - c, k) / math.comb(n, k)


def resample_means(
    values_PX: np.ndarray, seed: int = 0, resamples: int = RESAMPLES, clusters_P: Sequence[int] | None = None
) -> np.ndarray:
    """Return bootstrap means over problems.

    Args:
        values_PX: (P,) or (P, X): one row a problem; columns are resampled together, which pairs them.
        seed: of the resampling.
        resamples: number R.
        clusters_P: a label a problem; problems of one label are drawn together, as one draw of near-duplicates is
            (the cluster bootstrap; a mean is then a ratio, since clusters differ in size). None: each is its own.

    Returns:
        (R,) or (R, X).

    Raises:
        ValueError: no problem, or not one label a problem.
    """
    sums_GX, sizes_G = _by_cluster(np.asarray(values_PX, dtype=float), clusters_P)
    drawn_RG = _draws(len(sums_GX), seed, resamples)
    sizes_R = drawn_RG @ sizes_G
    return (drawn_RG @ sums_GX) / (sizes_R if sums_GX.ndim == 1 else sizes_R[:, None])


def _by_cluster(values_PX: np.ndarray, clusters_P: Sequence[int] | None) -> tuple[np.ndarray, np.ndarray]:
    """Return (G, ...) sums and (G,) sizes of the clusters; without labels each problem is its own."""
    if not len(values_PX):
        raise ValueError("values: no problem to resample")
    if clusters_P is None:
        return values_PX, np.ones(len(values_PX))
    if len(clusters_P) != len(values_PX):
        raise ValueError(f"clusters: {len(clusters_P)} labels for {len(values_PX)} problems; give one a problem")
    _, group_P = np.unique(np.asarray(clusters_P), return_inverse=True)
    sums_GX = np.zeros((group_P.max() + 1, *values_PX.shape[1:]))
    np.add.at(sums_GX, group_P, values_PX)
    return sums_GX, np.bincount(group_P).astype(float)


@lru_cache(maxsize=8)  # a report asks thousands of times for the same draw, which takes a hundred times the product
def _draws(count: int, seed: int, resamples: int) -> np.ndarray:
    """Return (R, P): how often each problem is drawn in each resample; rows sum to P, exactly."""
    rng = np.random.default_rng(seed)
    drawn_RP = rng.multinomial(count, np.full(count, 1 / count), size=resamples).astype(float)
    drawn_RP.setflags(write=False)
    return drawn_RP


def bootstrap_interval(
    values_P: Sequence[float] | np.ndarray,
    level: float = 0.95,
    seed: int = 0,
    clusters_P: Sequence[int] | None = None,
) -> tuple[float, float]:
    """Return the two-sided bootstrap interval of the mean over problems."""
    ((low, high),) = bootstrap_intervals(np.asarray(values_P, dtype=float)[:, None], level, seed, clusters_P)
    return low, high


def bootstrap_intervals(
    values_PX: np.ndarray, level: float = 0.95, seed: int = 0, clusters_P: Sequence[int] | None = None
) -> list[tuple[float, float]]:
    """Return the interval of each column's mean, from the same resamples.

    Efron's BCa: percentiles, moved by the skewness of the mean, without which intervals of pass@k at a large k, where
    most problems lie at 1, end too high. For a mean the correction for bias is the acceleration, to the order to which
    BCa is exact, and is taken to be so: the share of resamples below the mean would say the same with more noise.
    """
    values_PX, normal = np.asarray(values_PX, dtype=float), NormalDist()
    means_RX = resample_means(values_PX, seed, clusters_P=clusters_P)
    half, found = normal.inv_cdf((1 + level) / 2), []
    for values_P, means_R, skew in zip(values_PX.T, means_RX.T, _acceleration(values_PX, clusters_P), strict=True):
        if values_P.min() == values_P.max():  # else rounding is taken for a spread
            found.append((float(values_P[0]), float(values_P[0])))
            continue
        shares = [normal.cdf(skew + (skew + z) / (1 - skew * (skew + z))) for z in (-half, half)]
        low, high = np.quantile(means_R, shares)
        found.append((float(low), float(high)))
    return found


def _acceleration(values_PX: np.ndarray, clusters_P: Sequence[int] | None) -> list[float]:
    """Return a sixth of the skewness of each column's mean, by the jackknife over clusters."""
    sums_GX, sizes_G = _by_cluster(values_PX, clusters_P)
    if len(sizes_G) == 1:
        return [0.0] * values_PX.shape[1]
    without_GX = (sums_GX.sum(0) - sums_GX) / (sizes_G.sum() - sizes_G)[:, None]
    apart_GX = without_GX.mean(0) - without_GX
    spread_X = (apart_GX**2).sum(0)
    return [float(c / (6 * s**1.5)) if s else 0.0 for c, s in zip((apart_GX**3).sum(0), spread_X, strict=True)]


def lower_bound(
    values_P: np.ndarray, level: float = 0.95, seed: int = 0, clusters_P: Sequence[int] | None = None
) -> float:
    """Return the one-sided lower bound of the mean over problems (paired differences go in as one value each).

    The plain percentile: what the declared rules mean by a bound.
    """
    return float(np.quantile(resample_means(values_P, seed, clusters_P=clusters_P), 1 - level))


def sampling_error(judged: Sequence[tuple[int, int]], k: int) -> float | None:
    """Return the standard error of mean pass@k on these very problems: what drawing other samples would change.

    The jackknife over each problem's samples (Efron and Stein 1981; conservative); for k = 1 it is exactly
    p (1 - p) / (n - 1) a problem. None where a problem has no more than k samples: leaving one out leaves too few.

    Args:
        judged: (n, c) of each problem.
        k: of pass@k.
    """
    if not judged or any(n <= k for n, _ in judged):
        return None
    return math.sqrt(sum(_jackknife_variance(n, c, k) for n, c in judged)) / len(judged)


@lru_cache(maxsize=1 << 16)
def _jackknife_variance(n: int, c: int, k: int) -> float:
    without_pass = pass_at_k(n - 1, c - 1, k) if c else 0.0
    without_fail = pass_at_k(n - 1, c, k) if c < n else 0.0
    mean = (c * without_pass + (n - c) * without_fail) / n
    spread = c * (without_pass - mean) ** 2 + (n - c) * (without_fail - mean) ** 2
    return (n - 1) / n * spread


def flat_drop(rates_TP: np.ndarray, n: int) -> float:
    """Return the mean drop from peak to end that picking a maximum shows on a flat run of the same noise.

    Each problem keeps its mean rate and each checkpoint is a binomial draw of it. The mean over problems is then
    normal to good accuracy, so that the expected drop is its standard deviation times the expected maximum of T
    standard normal numbers (the integral of x d(Phi(x)^T)).

    Args:
        rates_TP: (T, P) pass rates of T checkpoints.
        n: samples behind each rate.
    """
    count, problems = rates_TP.shape
    flat_P = rates_TP.mean(0)
    deviation = math.sqrt(float((flat_P * (1 - flat_P)).mean()) / (n * problems))
    return deviation * _expected_maximum(count)


@lru_cache(maxsize=64)
def _expected_maximum(count: int) -> float:
    """Return the mean of the largest of `count` standard normal numbers."""
    edges = np.linspace(-8.0, 8.0, 3201)
    below = np.array([0.5 * math.erfc(-x / math.sqrt(2)) for x in edges]) ** count
    return float((np.diff(below) * (edges[1:] + edges[:-1]) / 2).sum())


def wilson_interval(passed: int, n: int, level: float = 0.95) -> tuple[float, float]:
    """Return Wilson's score interval of a single rate (for one greedy sample a problem)."""
    from scipy import stats  # a second to import, and the specifications only need this module's records

    found = stats.binomtest(passed, n).proportion_ci(level, method="wilson")
    return float(found.low), float(found.high)


def mcnemar(only_first: int, only_second: int) -> float:
    """Return the exact two-sided p-value of paired binary outcomes, from the discordant pairs alone."""
    if only_first + only_second == 0:
        return 1.0
    from scipy import stats

    return float(stats.binomtest(only_first, only_first + only_second).pvalue)


def fewest_discordant(level: float = 0.05) -> int:
    """Return how many discordant pairs, all one way, `mcnemar` needs to reach `level`."""
    count = 1
    while mcnemar(count, 0) > level:
        count += 1
    return count


def stratified_test(tables: Sequence[tuple[int, int, int, int]]) -> float:
    """Return the exact two-sided p-value for two groups with one common difference in rates over several strata.

    Given each stratum's total, the first group's count is hypergeometric if the groups do not differ (Fisher's test;
    over strata, the exact form of Mantel and Haenszel's). The sum over strata is their convolution; two-sided is twice
    the smaller tail.

    Args:
        tables: (events, runs) of the first and of the second group, for each stratum.
    """
    chances, seen = np.ones(1), 0
    for first, runs, second, others in tables:
        chances = np.convolve(chances, _hypergeometric(runs, others, first + second))
        seen += first
    return min(1.0, 2 * float(min(chances[: seen + 1].sum(), chances[seen:].sum())))


@lru_cache(maxsize=4096)  # a ladder asks for the same few again and again
def _hypergeometric(runs: int, others: int, events: int) -> np.ndarray:
    """Return (runs + 1,): the chance of each count of the events among `runs`, the rest among `others`."""
    from scipy import stats

    return stats.hypergeom.pmf(np.arange(runs + 1), runs + others, events, runs)
