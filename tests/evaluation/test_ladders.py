"""Boundaries and shifts on ladders whose classes are known: brackets, odd shapes, and the test's error and power."""

from itertools import combinations

import numpy as np
import pytest

from evaluation.curves import Class, Classified, Criterion
from evaluation.ladders import ArmBoundary, compare, locate, rate_text, seeds_needed, smallest_shift
from evaluation.statistics import stratified_test
from evaluation.thresholds import shift_interval, threshold_interval

RULES = Criterion()
LABELS = {"nobuf": "no replay", "replay": "replay"}
RATES = (6e-7, 1e-6, 3e-6, 6e-6, 1e-5, 1e-4, 1e-3)
WORDS: dict[str, Class] = {"s": "stable", "c": "collapsed", "d": "degraded", "x": "diverged", "?": "incomplete"}


def arm(*rows: str, name: str = "nobuf", rates: tuple[float, ...] = RATES) -> list[Classified]:
    """One string a seed, one letter a rate."""
    return [
        Classified(label=f"{name}{i}{x}", arm=name, lr=x, seed=i, run_class=WORDS[w], onset_step=None, why="")
        for i, row in enumerate(rows)
        for w, x in zip(row, rates, strict=False)
    ]


def bracket(found: ArmBoundary) -> tuple[float | None, float | None]:
    return found.last_stable, found.first_unstable


def test_rates_are_written_as_people_do() -> None:
    assert [rate_text(x) for x in (3e-4, 6e-7, 2.5e-6, 1e-3, 0.1, 0.00002)] == [
        "3e-4", "6e-7", "2.5e-6", "1e-3", "1e-1", "2e-5",
    ]  # fmt: skip


def test_one_seed_gives_the_bracket_and_says_so() -> None:
    found = locate(arm("ssssdcx"), RULES)
    assert bracket(found) == (6e-6, 1e-5)
    assert (found.low, found.high) == (None, None)
    assert "one seed, no interval" in found.text
    assert "6e-6 (last stable)" in found.text and "1e-5 (first unstable)" in found.text


def test_rates_are_compared_as_numbers() -> None:
    """REPORT-128: as text 1e-6 < 3e-6 < 6e-6 < 6e-7."""
    rates = (6e-6, 3e-6, 6e-7, 1e-6)
    assert bracket(locate(arm("csss", rates=rates), RULES)) == (3e-6, 6e-6)
    assert bracket(locate(arm("ccsc", rates=rates), RULES)) == (6e-7, 1e-6)


def test_a_ladder_that_is_not_monotone_breaks_at_its_lowest_unstable_rate() -> None:
    found = locate(arm("sscsscc"), RULES)
    assert bracket(found) == (1e-6, 3e-6)
    assert "not monotone: stable again at 6e-6, 1e-5" in found.text


@pytest.mark.parametrize(
    ("row", "ends"), [("sssssss", (1e-3, None)), ("ccccccc", (None, 6e-7)), ("???????", (None, None))]
)
def test_ends_of_the_ladder_are_no_boundary(row: str, ends: tuple[float | None, float | None]) -> None:
    found = locate(arm(row), RULES)
    assert bracket(found) == ends
    assert "breaks between" not in found.text


def test_rates_without_an_ended_run_are_named_and_not_taken_for_the_ladders_end() -> None:
    found = locate(arm("ss?sss?"), RULES)
    assert bracket(found) == (1e-4, None)
    assert "no ended run at 3e-6, 1e-3" in found.text
    assert "1e-4, the highest rate that ended" in found.text
    assert bracket(locate(arm("sss?ccc"), RULES)) == (3e-6, 1e-5)


def test_half_of_the_seeds_make_a_rate_unstable() -> None:
    assert bracket(locate(arm("sssscc", "sssccc"), RULES)) == (3e-6, 6e-6)
    assert bracket(locate(arm("sssscc", "sssscc", "sssccc"), RULES)) == (6e-6, 1e-5)
    assert "6e-6 1/3, 1e-5 3/3" in locate(arm("sssscc", "sssscc", "sssccc"), RULES).text


def test_an_interval_needs_four_whole_seeds_and_is_never_narrower_than_the_bracket() -> None:
    three = locate(arm(*["sssscc"] * 3), RULES)
    assert (three.low, three.high) == (None, None) and "3 seeds, no interval" in three.text
    four = locate(arm(*["sssscc"] * 4), RULES)
    assert (four.low, four.high) == pytest.approx((6e-6, 1e-5))  # all agree: what a ladder cannot say is between rungs
    assert "95 % interval 6e-6 to 1e-5 (4 seeds)" in four.text
    assert locate(arm(*["sssscc"] * 3, "ss?scc"), RULES).low is None
    mixed = locate(arm("ssssscc", "ssscccc", "sssccsc", "sssscc?", "sscsccc"), RULES)
    assert mixed.low is not None and mixed.high is not None
    assert mixed.low < mixed.high and mixed.low < (mixed.first_unstable or 0) and mixed.high > (mixed.last_stable or 1)
    again = locate(arm("ssssscc", "ssscccc", "sssccsc", "sssscc?", "sscsccc", *["sssccc?"] * 5), RULES)
    assert again.low is not None and again.high is not None
    assert again.high / again.low < mixed.high / mixed.low  # more seeds say more
    assert locate(arm(*["sssssss"] * 4), RULES).low is None
    beyond = locate(arm(*["scccccc"] * 3, "ccccccc"), RULES)
    assert beyond.low is None and beyond.high is not None and "beyond the ladder" in beyond.text


@pytest.mark.parametrize("seeds", [4, 8, 16])
def test_where_all_runs_agree_the_interval_is_the_space_between_two_rungs(seeds: int) -> None:
    sharp = [(0, seeds)] * 3 + [(seeds, seeds)] * 2
    assert threshold_interval(sharp) == pytest.approx((2, 3), abs=0.021)
    assert threshold_interval([(0, seeds)] * 4 + [(1, seeds)])[1] is None
    assert threshold_interval([(seeds - 1, seeds)] + [(seeds, seeds)] * 4)[0] is None
    with pytest.raises(ValueError, match="rungs"):
        shift_interval(sharp, sharp[1:])


def test_the_interval_of_a_threshold_holds_the_truth_and_shrinks() -> None:
    rng, held, width = np.random.default_rng(4), [], {4: 0.0, 16: 0.0}
    for _ in range(40):
        edge = rng.uniform(2, 4)
        chance = 1 / (1 + np.exp(-(np.arange(7) - edge) / 0.4))
        for seeds in width:
            low, high = threshold_interval([(int(k), seeds) for k in rng.binomial(seeds, chance)])
            held.append((low or 0) <= edge <= (high or 6))
            width[seeds] += ((high or 6) - (low or 0)) / 40
    assert np.mean(held) >= 0.9 and width[16] < 0.75 * width[4]


def test_one_seed_never_shows_a_shift() -> None:
    runs = arm("sscccc") + arm("sssssc", name="replay")
    found = compare(runs, "nobuf", "replay", LABELS, RULES)
    assert (found.shift, found.min_detectable, found.p) == ("not_detectable", None, None)
    assert "3 broke 'no replay' more often and 0 broke 'replay' more; one seed, no test" in found.text


@pytest.mark.parametrize("row", ["sssssss", "ccccccc", "???????"])
def test_all_stable_all_unstable_or_nothing_is_not_identified(row: str) -> None:
    other = arm(*["ssscccc"] * 4)
    found = compare(other + arm(*[row] * 4, name="replay"), "nobuf", "replay", LABELS, RULES)
    assert found.shift == "not_identified" and "'replay'" in found.text
    assert compare(arm(row) + arm(row, name="replay"), "nobuf", "replay", LABELS, RULES).shift == "not_identified"


def test_shifts_that_all_seeds_show() -> None:
    low, high = ["ssscccc"] * 4, ["ssssscc"] * 4
    up = compare(arm(*low) + arm(*high, name="replay"), "nobuf", "replay", LABELS, RULES)
    down = compare(arm(*high) + arm(*low, name="replay"), "nobuf", "replay", LABELS, RULES)
    assert (up.shift, down.shift) == ("up", "down") and up.p == down.p and up.min_detectable == 1
    none = compare(arm(*low) + arm(*low, name="replay"), "nobuf", "replay", LABELS, RULES)
    assert none.shift == "not_detectable" and none.p == 1.0


def test_the_shift_has_an_interval_from_four_seeds_on() -> None:
    """Boundaries between rungs 2 and 3, and 4 and 5, in every seed: two rungs, and one that a ladder cannot say."""
    low, high = ["ssscccc"] * 4, ["sssss" + "cc"] * 4
    up = compare(arm(*low) + arm(*high, name="replay"), "nobuf", "replay", LABELS, RULES)
    assert (up.low, up.high) == pytest.approx((1, 3), abs=0.05)
    assert "95 % interval of the shift +1.0 to +3.0 rungs" in up.text
    down = compare(arm(*high) + arm(*low, name="replay"), "nobuf", "replay", LABELS, RULES)
    assert (down.low, down.high) == pytest.approx((-3, -1), abs=0.05)
    three = compare(arm(*low[:3]) + arm(*high[:3], name="replay"), "nobuf", "replay", LABELS, RULES)
    assert (three.low, three.high) == (None, None)
    holes = compare(arm(*low) + arm(*high[:3], "ss?sscc", name="replay"), "nobuf", "replay", LABELS, RULES)
    assert holes.p is not None and holes.low is None


def test_an_end_that_the_ladder_cannot_bound_is_none() -> None:
    runs = arm(*["ssscccc"] * 4) + arm("ssssssc", *["sssssss"] * 3, name="replay")
    found = compare(runs, "nobuf", "replay", LABELS, RULES)
    assert found.low is not None and found.low > 1 and found.high is None
    assert f"{found.low:+.1f} to beyond the ladder rungs" in found.text


def test_the_interval_holds_no_shift_wherever_the_test_does_not_rule_it_out() -> None:
    rng, alone = np.random.default_rng(5), 0
    for _ in range(25):
        runs = drawn(rng, "nobuf", 2.8, 4), drawn(rng, "replay", 3.8, 4)
        found = compare([*runs[0], *runs[1]], "nobuf", "replay", LABELS, RULES)
        if found.shift == "not_detectable":
            assert (found.low or -1) <= 0 <= (found.high or 1)
            tables = [[(sum(r.unstable for r in a if r.lr == x), 4) for x in RATES] for a in runs]
            alone += (shift_interval(*tables)[0] or 0) > 0
    assert alone  # the likelihood alone would have claimed more


def test_seeds_needed_is_what_power_needs() -> None:
    """At the simulation's width the test finds one rung four times in five from seven seeds a rate on."""
    rng, needed = np.random.default_rng(2), []
    for _ in range(7):
        runs = [drawn(rng, name, 3.2, 8) for name in LABELS]
        counts = [tuple((sum(r.unstable for r in a if r.lr == x), 8) for a in runs) for x in RATES]
        needed.append(seeds_needed(counts, RULES) or 17)
    assert 6 <= np.median(needed) <= 8 and max(needed) <= 11


def test_the_interval_of_the_shift_holds_the_truth() -> None:
    rng, held = np.random.default_rng(11), []
    for shift in (0.0, 1.0, 1.5):
        for _ in range(40):
            runs = drawn(rng, "nobuf", 2.5, 6), drawn(rng, "replay", 2.5 + shift, 6)
            found = compare([*runs[0], *runs[1]], "nobuf", "replay", LABELS, RULES)
            assert found.low is not None and found.high is not None
            held.append(found.low <= shift <= found.high)
    assert np.mean(held) >= 0.93


def test_smallest_shift() -> None:
    assert smallest_shift(4, 7, 0.05) == 1  # 2 / C(8, 4)
    assert smallest_shift(3, 7, 0.05) == 2  # 2 / C(6, 3) = .1 for one rung
    assert smallest_shift(1, 4, 0.05) is None and smallest_shift(1, 7, 0.05) == 6


def permutation_p(tables: list[tuple[int, int, int, int]]) -> float:
    """Every way to hand out each stratum's labels, counted."""
    sums = {0: 1}
    for first, runs, second, others in tables:
        outcomes = [1] * (first + second) + [0] * (runs + others - first - second)
        drawn = [sum(outcomes[i] for i in chosen) for chosen in combinations(range(runs + others), runs)]
        totals = {s + d for s in sums for d in drawn}
        sums = {t: sum(n for s, n in sums.items() for d in drawn if s + d == t) for t in totals}
    seen, total = sum(t[0] for t in tables), sum(sums.values())
    tails = [sum(n for s, n in sums.items() if s <= seen), sum(n for s, n in sums.items() if s >= seen)]
    return min(1.0, 2 * min(tails) / total)


def test_the_exact_test_is_the_permutation_within_rates() -> None:
    rng = np.random.default_rng(0)
    for _ in range(20):
        sizes = rng.integers(1, 5, (3, 2))
        tables = [(int(rng.integers(n + 1)), int(n), int(rng.integers(m + 1)), int(m)) for n, m in sizes]
        assert stratified_test(tables) == pytest.approx(permutation_p(tables), abs=1e-12)
    assert stratified_test([]) == 1.0


def drawn(rng: np.random.Generator, name: str, boundary: float, seeds: int) -> list[Classified]:
    """The truth of simulated ladders: unstable at rung i with probability logistic((i - boundary) / .25)."""
    chance = 1 / (1 + np.exp(-(np.arange(len(RATES)) - boundary) / 0.25))
    return arm(*("".join("c" if u else "s" for u in rng.random(len(RATES)) < chance) for _ in range(seeds)), name=name)


def claims(seeds: int, shift: float, count: int) -> dict[str, float]:
    rng = np.random.default_rng(7)
    found = [
        compare(
            drawn(rng, "nobuf", 3.5, seeds) + drawn(rng, "replay", 3.5 + shift, seeds),
            "nobuf", "replay", LABELS, RULES,
        ).shift
        for _ in range(count)
    ]  # fmt: skip
    return {word: found.count(word) / count for word in ("up", "down", "not_detectable")}


def test_false_claims_and_power() -> None:
    assert sum(claims(4, 0, 60)[w] for w in ("up", "down")) <= 0.05
    assert claims(4, 2, 60)["up"] >= 0.90
    assert claims(8, 1, 60)["up"] >= 0.80


@pytest.mark.campaign
@pytest.mark.parametrize("seeds", [4, 6, 8])
def test_false_claims_power_and_coverage_at_length(seeds: int) -> None:
    null = claims(seeds, 0, 1000)
    assert null["up"] + null["down"] <= 0.05
    assert claims(seeds, 2, 500)["up"] >= 0.90
    assert seeds < 8 or claims(seeds, 1, 500)["up"] >= 0.85
    rng = np.random.default_rng(3)
    truth = 10 ** np.interp(3.25, np.arange(len(RATES)), np.log10(RATES))
    held = [locate(drawn(rng, "nobuf", 3.25, seeds), RULES) for _ in range(300)]
    assert np.mean([(b.low or 0) <= truth <= (b.high or 1) for b in held]) >= 0.93
