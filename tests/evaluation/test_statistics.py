"""The estimators against brute force, plain loops, direct simulation and published values."""

import math
from fractions import Fraction
from itertools import combinations

import numpy as np
import pytest

from evaluation.statistics import (
    RESAMPLES,
    bootstrap_interval,
    fewest_discordant,
    flat_drop,
    lower_bound,
    mcnemar,
    pass_at_k,
    resample_means,
    wilson_interval,
)

KNOWN = [  # PASSK-056, PASSK-057, PASSK-064: exact fractions, (n, c, k)
    (5, 1, 5, 1.0),
    (160, 8, 10, 0.4104323157670946),
    (160, 1, 1, 0.00625),
    (160, 3, 10, 0.17706591831860521),
    (160, 7, 32, 0.7972644020541745),
    (160, 80, 10, 0.9992759645057323),
    (160, 2, 100, 0.8608490566037735),
    (160, 1, 160, 1.0),
    (160, 4, 1, 0.025),
    (160, 4, 160, 1.0),
]


@pytest.mark.parametrize("n", range(1, 8))
def test_pass_at_k_is_the_share_of_subsets_with_a_pass(n: int) -> None:
    for c in range(n + 1):
        for k in range(1, n + 1):
            subsets = list(combinations(range(n), k))
            hit = sum(any(i < c for i in s) for s in subsets)
            assert pass_at_k(n, c, k) == pytest.approx(hit / len(subsets), abs=1e-15)


@pytest.mark.parametrize(("n", "c", "k", "value"), KNOWN)
def test_pass_at_k_known_values(n: int, c: int, k: int, value: float) -> None:
    assert pass_at_k(n, c, k) == pytest.approx(value, abs=1e-12)


def test_pass_at_k_is_neither_the_plug_in_nor_the_bootstrap() -> None:
    assert abs(pass_at_k(160, 8, 10) - 0.4012630607616213) > 0.009  # 1 - (1 - c/n)^k
    assert abs(pass_at_k(5, 1, 5) - 0.67232) > 0.3  # draws with replacement
    found = [pass_at_k(160, 4, k) for k in (1, 8, 32, 64, 160)]
    assert [round(x, 6) for x in found] == [0.025, 0.187124, 0.594286, 0.873663, 1.0]


def test_pass_at_k_agrees_with_fractions_and_grows_with_k_and_c() -> None:
    for n, c, k in ((160, 37, 64), (1000, 999, 2), (4096, 3, 2048), (160, 159, 2)):
        exact = 1 - Fraction(math.comb(n - c, k), math.comb(n, k))
        assert pass_at_k(n, c, k) == pytest.approx(float(exact), abs=1e-15)
    by_k = [pass_at_k(160, 5, k) for k in range(1, 161)]
    by_c = [pass_at_k(160, c, 16) for c in range(161)]
    assert by_k == sorted(by_k) and by_c == sorted(by_c) and by_c[0] == 0.0 and by_c[-1] == 1.0


@pytest.mark.parametrize(("n", "c", "k"), [(90, 0, 100), (5, 6, 1), (5, -1, 1), (5, 2, 0), (0, 0, 1), (5, 2, -3)])
def test_pass_at_k_refuses_what_has_no_unbiased_estimate(n: int, c: int, k: int) -> None:
    with pytest.raises(ValueError, match=r"outside"):
        pass_at_k(n, c, k)


def test_bootstrap_equals_a_plain_loop() -> None:
    values = [0.0, 0.25, 1.0, 0.5, 1.0]
    rng = np.random.default_rng(3)
    means = []
    for counts in rng.multinomial(5, [0.2] * 5, size=200):
        drawn = [v for v, times in zip(values, counts, strict=True) for _ in range(times)]
        assert len(drawn) == 5
        means.append(sum(drawn) / 5)
    assert resample_means(np.array(values), seed=3, resamples=200) == pytest.approx(means, abs=1e-12)


def test_bootstrap_interval_is_deterministic_and_of_a_symmetric_sample_the_percentiles() -> None:
    half = np.random.default_rng(0).random(20)
    values = np.concatenate([half, 1 - half])  # no skewness
    low, high = bootstrap_interval(values)
    assert (low, high) == bootstrap_interval(list(values)) and low < values.mean() < high
    means = sorted(resample_means(values))
    assert len(means) == RESAMPLES
    assert sum(m < low for m in means) / RESAMPLES == pytest.approx(0.025, abs=1e-3)
    assert sum(m > high for m in means) / RESAMPLES == pytest.approx(0.025, abs=1e-3)
    assert bootstrap_interval(values, seed=1) != (low, high)
    # The textbook standard error of a mean, which the percentiles must show: 1.96 sd / sqrt(P).
    assert (high - low) / 2 == pytest.approx(1.96 * values.std() / math.sqrt(40), rel=0.06)


@pytest.mark.parametrize("labels", [None, [i // 2 for i in range(60)]])
def test_bootstrap_interval_of_a_skewed_sample_is_scipys_bca(labels: list[int] | None) -> None:
    from scipy import stats

    rng = np.random.default_rng(6)
    groups = 60 if labels is None else 30
    means = 1 - rng.random(groups) ** 6  # most near 1, as pass@k at a large k is
    values = means if labels is None else np.repeat(means, 2)
    low, high = bootstrap_interval(values, clusters_P=labels)
    known = stats.bootstrap((means,), np.mean, n_resamples=20_000, method="BCa", rng=1).confidence_interval
    width = known.high - known.low
    assert (low, high) == pytest.approx((known.low, known.high), abs=0.03 * width)
    plain = np.quantile(resample_means(values, clusters_P=labels), [0.025, 0.975])
    assert low < plain[0] - 0.02 * width and high < plain[1] - 0.02 * width
    mirrored = bootstrap_interval(1 - values, clusters_P=labels)
    assert mirrored == pytest.approx((1 - high, 1 - low), abs=1e-9)


def test_bootstrap_interval_of_one_cluster_or_of_equal_values_has_no_width() -> None:
    assert bootstrap_interval([1 / 3] * 12) == (1 / 3, 1 / 3)  # whatever 12 thirds add up to
    assert bootstrap_interval([0.2, 0.4], clusters_P=[5, 5]) == pytest.approx((0.3, 0.3))


def test_bootstrap_pairs_columns_and_refuses_nothing() -> None:
    one = np.random.default_rng(0).random(30)
    means = resample_means(np.stack([one, one + 0.125], axis=1))
    assert np.allclose(means[:, 1] - means[:, 0], 0.125)
    assert bootstrap_interval([1.0] * 378) == (1.0, 1.0)  # not 1.0000000000000002
    with pytest.raises(ValueError, match="no problem"):
        bootstrap_interval([])


def test_lower_bound_is_one_sided() -> None:
    values = np.random.default_rng(1).normal(0.05, 0.3, 400)
    bound = lower_bound(values)
    assert bound == pytest.approx(values.mean() - 1.645 * values.std() / 20, abs=0.002)
    assert bound > bootstrap_interval(values)[0]


@pytest.mark.parametrize(("checkpoints", "problems", "n"), [(18, 378, 160), (3, 128, 8), (10, 60, 1), (2, 20, 4)])
def test_flat_drop_against_direct_simulation(checkpoints: int, problems: int, n: int) -> None:
    rng = np.random.default_rng(5)
    true_P = rng.random(problems) ** 2
    curves_RT = np.empty((400, checkpoints))
    for r in range(400):
        curves_RT[r] = [(rng.binomial(n, true_P) / n).mean() for _ in range(checkpoints)]
    simulated = float((curves_RT.max(1) - curves_RT[:, -1]).mean())
    # What a report sees: observed rates, whose spread tells what chance does.
    seen = np.mean([flat_drop(rng.binomial(n, true_P, (checkpoints, problems)) / n, n) for _ in range(20)])
    assert seen == pytest.approx(simulated, rel=0.12)


def test_flat_drop_of_certain_or_single_points_is_nothing() -> None:
    assert flat_drop(np.ones((5, 10)), 8) == 0.0
    assert flat_drop(np.full((1, 10), 0.5), 8) == pytest.approx(0.0, abs=1e-12)
    # Two points: the maximum of two standard normal numbers is 1/sqrt(pi) on average.
    assert flat_drop(np.full((2, 100), 0.5), 1) == pytest.approx(0.05 / math.sqrt(math.pi), rel=1e-4)


def test_wilson_known_values() -> None:
    """Against the closed form (Wilson 1927) and Agresti and Coull's example of 0 of 25."""
    for passed, n in ((0, 25), (7, 10), (100, 378), (378, 378)):
        z, p = 1.959963984540054, passed / n
        centre = (p + z * z / (2 * n)) / (1 + z * z / n)
        half = z * math.sqrt(p * (1 - p) / n + z * z / (4 * n * n)) / (1 + z * z / n)
        assert wilson_interval(passed, n) == pytest.approx((centre - half, centre + half), abs=1e-12)
    assert wilson_interval(0, 25) == pytest.approx((0.0, 0.13319), abs=1e-4)


def test_mcnemar_is_the_exact_binomial_test() -> None:
    assert mcnemar(0, 0) == 1.0
    assert mcnemar(6, 0) == mcnemar(0, 6) == pytest.approx(2 / 64)
    assert mcnemar(5, 0) == pytest.approx(2 / 32)
    assert mcnemar(5, 5) == pytest.approx(1.0)
    assert mcnemar(10, 2) == pytest.approx(2 * sum(math.comb(12, i) for i in range(3)) / 2**12)


def test_fewest_discordant_pairs() -> None:
    assert fewest_discordant() == 6
    assert fewest_discordant(0.01) == 8
