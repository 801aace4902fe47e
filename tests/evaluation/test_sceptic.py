"""What a sceptical reader asks for: near-duplicates together, sampling error apart, no certainty out of nothing."""

import json
import math
from dataclasses import replace

import numpy as np
import pytest
from hostile_report import PLUS, hostile_report, run, score

from evaluation.changes import Forgetting, ever_solved, sharpening
from evaluation.contamination import find_clusters, find_contamination
from evaluation.curves import Criterion
from evaluation.drops import Ending, judge_drops, mean_interval
from evaluation.ladders import ArmShift, seeds_needed, with_seeds_needed
from evaluation.records import Problem
from evaluation.report import make_finding
from evaluation.scores import Estimate, estimate_pass_at_ks
from evaluation.statistics import bootstrap_interval, pass_at_k, resample_means, sampling_error
from evaluation.tables import estimate_text, onset_table, sharpened_text


def test_clusters_are_drawn_whole() -> None:
    values, labels = np.array([0.0, 1.0, 0.5, 0.25, 1.0]), [7, 3, 7, 3, 9]
    groups = [[1.0, 0.25], [0.0, 0.5], [1.0]]  # by label: 3, 7, 9
    drawn = np.random.default_rng(5).multinomial(3, [1 / 3] * 3, size=300)
    means = []
    for counts in drawn:
        found = [v for g, times in zip(groups, counts, strict=True) for _ in range(times) for v in g]
        means.append(sum(found) / len(found))
    assert resample_means(values, seed=5, resamples=300, clusters_P=labels) == pytest.approx(means, abs=1e-12)
    both = resample_means(np.stack([values, values + 1], 1), 5, 300, labels)
    assert np.allclose(both[:, 1] - both[:, 0], 1)
    apart = bootstrap_interval(values, clusters_P=[1, 2, 3, 4, 5])
    assert apart == pytest.approx(bootstrap_interval(values))
    with pytest.raises(ValueError, match="2 labels for 5 problems"):
        resample_means(values, clusters_P=[1, 2])


def test_copies_of_problems_do_not_make_the_interval_narrower() -> None:
    values = np.random.default_rng(0).random(60)
    low, high = bootstrap_interval(values)
    copied = bootstrap_interval(np.tile(values, 4), clusters_P=list(range(60)) * 4)
    assert copied == pytest.approx((low, high))
    naive = bootstrap_interval(np.tile(values, 4))
    assert naive[1] - naive[0] < 0.6 * (high - low)


@pytest.mark.parametrize(("n", "k"), [(20, 1), (20, 4), (40, 8)])
def test_sampling_error_is_what_other_samples_would_change(n: int, k: int) -> None:
    rng = np.random.default_rng(2)
    rates = rng.random(30) ** 2
    drawn = rng.binomial(n, rates, (2000, 30))
    table = np.array([pass_at_k(n, c, k) for c in range(n + 1)])
    true = table[drawn].mean(1).std()
    seen = np.mean([sampling_error([(n, int(c)) for c in row], k) or 0 for row in drawn[:200]])
    assert seen == pytest.approx(true, rel=0.1)


def test_sampling_error_of_one_try_has_a_closed_form_and_of_all_samples_none() -> None:
    assert sampling_error([(8, 3)], 1) == pytest.approx(math.sqrt(3 / 8 * 5 / 8 / 7), abs=1e-12)
    assert sampling_error([(8, 0), (8, 8)], 4) == 0.0
    assert sampling_error([(8, 3)], 8) is None and sampling_error([], 1) is None


@pytest.mark.parametrize(
    ("value", "problems", "said"),
    [
        (1 / 3, 7, "0.333], all agree"),
        (0.0, 378, "all agree: at most 0.010"),
        (1.0, 378, "all agree: at least 0.990"),
        (0.5, 12, "0.500], all agree"),
    ],
)
def test_an_interval_without_width_does_not_feign_certainty(value: float, problems: int, said: str) -> None:
    found = estimate_pass_at_ks([(6, round(6 * value))] * problems, (1,))[1]
    assert found.low == found.high == found.value == pytest.approx(value, abs=1e-15)
    assert said in estimate_text(found)
    assert "agree" not in estimate_text(Estimate(value=0.5, low=0.4, high=0.6, num_problems=9))


def test_ever_solved_counts_any_pass_where_equally_many_were_judged() -> None:
    base, later = score(PLUS, [0, 1, 4, 0, 3] * 6), score(PLUS, [1, 0, 4, 0, 3] * 6)
    assert ever_solved(base, later) == Forgetting(retained=12, lost=6, gained=6, neither=6)
    fewer = later.problems | {"Mbpp/0": later.problems["Mbpp/0"].replace(n=3, errors=1)}
    assert ever_solved(base, later.replace(problems=fewer)).gained == 5


def test_sharpening_is_named_when_the_first_try_rises_and_the_best_of_many_falls() -> None:
    base = score(PLUS, [1] * 30)
    sharp = sharpening(base, score(PLUS, [4] * 18 + [0] * 12))
    assert sharp is not None and sharp.found and sharp.k == 4
    assert sharp.first.value == pytest.approx(0.35) and sharp.many.value == pytest.approx(-0.4)
    given = hostile_report()
    once = replace(given, runs=(run("nobuf", 1e-6, {30: [4] * 18 + [0] * 12}, (0.5,) * 30),))
    assert sharpened_text(replace(once, base={"mbpp_plus": base})).endswith(
        "m_nobuf_lr1e-06/global_step_30 on mbpp_plus."
    )
    assert sharpened_text(replace(given, runs=())) == ""
    better = sharpening(base, score(PLUS, [4] * 30))
    assert better is not None and not better.found
    one = base.replace(problems={p: c.replace(n=1) for p, c in base.problems.items()})
    assert sharpening(one, one) is None


def problem(i: int, text: str, assertion: str = "") -> Problem:
    return Problem(
        problem_id=f"Mbpp/{i}",
        text=text,
        entry_point="f",
        reference="",
        asserts=(assertion or f"assert f({i}) == {i}",),
    )


def test_near_duplicates_by_words_and_clusters_by_chain() -> None:
    train = [problem(1, "Write a function to find the sum of a list.")]
    evaluated = [
        problem(2, "write a FUNCTION to find the sum of a list"),
        problem(3, "Write a function to find the sum of a tuple."),  # 8 of 10 words
        problem(4, "Write a function to find the product of a tuple."),  # near 3, not 1
        problem(5, "Count vowels."),
        problem(6, "Something else entirely.", "assert f(5) == 5"),
    ]
    found = find_contamination(train, {"b": evaluated})
    assert [(d.evaluation_id, d.jaccard) for d in found.near] == [("Mbpp/2", 1.0), ("Mbpp/3", 0.8)]
    assert found.clusters == {"b": (("Mbpp/2", "Mbpp/3", "Mbpp/4"), ("Mbpp/5", "Mbpp/6"))}
    assert found.labels("b") == {"Mbpp/2": 0, "Mbpp/3": 0, "Mbpp/4": 0, "Mbpp/5": 1, "Mbpp/6": 1}
    assert find_clusters([]) == () and find_contamination(train, {"b": evaluated}, drawn=True).clusters == {}


def test_limbs_have_intervals_and_seeds() -> None:
    plain = [Ending(seed=i, peak=0.9, final=0.9 - d) for i, d in enumerate((0.052, 0.006))]
    treated = [Ending(seed=i, peak=0.9, final=0.9 - d) for i, d in enumerate((0.020, 0.002))]
    limb = judge_drops(plain, treated, Criterion(rule="drop")).limbs[1]
    # Differences .032 and .004: mean .018, sd .0198, t(.975, 1) = 12.706.
    assert (limb.low, limb.high) == pytest.approx((0.018 - 12.7062 * 0.014, 0.018 + 12.7062 * 0.014), abs=1e-5)
    assert limb.seeds == 2
    one = judge_drops(plain[:1], treated[:1], Criterion(rule="drop")).limbs[1]
    assert (one.low, one.high, one.seeds) == (None, None, 1) and mean_interval([0.1], 0.95) is None


def test_how_many_seeds_would_be_needed() -> None:
    sharp = [((0, 4), (0, 4)), ((0, 4), (0, 4)), ((4, 4), (4, 4)), ((4, 4), (4, 4))]
    blurred = [((1, 4), (1, 4)), ((2, 4), (2, 4)), ((2, 4), (3, 4)), ((3, 4), (3, 4))]
    few, many = seeds_needed(sharp, Criterion()), seeds_needed(blurred, Criterion())
    assert few is not None and 4 <= few <= 16 and (many is None or many > few)
    said = ArmShift(shift="up", min_detectable=1.0, p=0.01, text="t")
    assert with_seeds_needed(said, [], "a", "b", Criterion()) is said


def test_the_clean_subset_has_its_own_finding() -> None:
    given = hostile_report()
    found = make_finding(given)
    assert found.clean is not None and found.clean.num_problems == 27 and found.clean.changed == ()
    # Degraded on ten problems alone, all of which share asserts with training.
    fallen = run("nobuf", 3e-6, {10: [4] * 10 + [2] * 20, 30: [0] * 10 + [2] * 20}, (0.5,) * 30)
    small = replace(given, runs=(fallen,), base={"mbpp_plus": score(PLUS, [2] * 30)}, arm_labels={"nobuf": "none"})
    small = replace(small, clean={"mbpp_plus": frozenset(f"Mbpp/{i}" for i in range(10, 30))})
    found = make_finding(small)
    assert found.clean is not None
    assert found.runs[0].class_ == "degraded" and found.clean.changed == (f"{fallen.label}: degraded -> stable",)
    assert make_finding(replace(small, clean={})).clean is None


def test_one_nan_costs_one_value_and_no_json() -> None:
    """REPORT-133: a step whose reward is not finite leaves means, pictures and files in place."""
    rewards = (0.4, math.nan, 0.6) * 10
    given = hostile_report()
    broken = run("nobuf", 1e-6, {10: [2] * 30, 30: [0] * 30}, rewards)
    given = replace(given, runs=(broken,), arm_labels={"nobuf": "none"})
    finding = make_finding(given)
    shown = onset_table(given, finding)
    assert shown is not None and shown.rows[1][3].startswith("0.5")
    raw = finding.model_dump_json()
    json.loads(raw, parse_constant=lambda word: pytest.fail(word))
