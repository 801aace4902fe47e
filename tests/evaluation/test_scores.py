"""Counts and pass@k of a score: what cannot be judged is no wrong answer, and nothing leaves the mean unsaid."""

import json
from collections.abc import Iterable

import pytest

from evaluation.records import Outcome, Verdict
from evaluation.scores import Score, build_score, estimate_pass_at_k, sample_outcome
from evaluation.statistics import bootstrap_interval, pass_at_k

WORDS = {"p": Outcome.PASS, "f": Outcome.FAIL, "t": Outcome.TIMEOUT, "e": Outcome.HARNESS_ERROR, "-": None}
KEYS = {
    "schema", "label", "cell", "global_step", "benchmark", "n", "num_problems", "outcomes", "pass_at_k", "problems",
    "protocol_sha256", "prompt_sha256", "judge_version",
}  # fmt: skip


def verdicts(problem_id: str, word: str) -> list[tuple[int, Verdict]]:
    """Return one verdict a pair of letters, base and plus: `pp pf fe`."""
    found = []
    for index, (base, plus) in enumerate(word.split()):
        first = WORDS[base]
        assert first is not None
        suites = {"base": first, "plus": WORDS[plus]}
        found.append((index, Verdict(problem_id=problem_id, tests_passed=0, tests_total=1, seconds=0.0, **suites)))
    return found


def build(rows: dict[str, str], ks: Iterable[int] = (1,), ids: Iterable[str] = (), *, has_plus: bool = True) -> Score:
    """Build a score of `{problem: letters}`."""
    return build_score(
        label="x/global_step_30",
        cell="x",
        global_step=30,
        benchmark="mbpp_plus",
        ks=tuple(ks),
        problem_ids=list(ids) or list(rows),
        verdicts=[pair for p, word in rows.items() for pair in verdicts(p, word)],
        has_plus=has_plus,
        protocol_sha256="a" * 64,
        prompt_sha256="b" * 64,
        judge_version="judge/1",
    )


def test_counts_by_hand() -> None:
    score = build({"Mbpp/2": "pp pf pt fp", "Mbpp/3": "ff tt pp pp"})
    two, three = score.problems["Mbpp/2"], score.problems["Mbpp/3"]
    assert (two.n, two.base, two.plus, two.errors) == (4, 3, 1, 0)
    assert (three.n, three.base, three.plus, three.errors) == (4, 2, 2, 0)
    assert score.outcomes == {"pass": 3, "fail": 3, "timeout": 2, "harness_error": 0}
    assert score.estimate("base", 1).value == pytest.approx((3 / 4 + 2 / 4) / 2)
    assert score.estimate("plus", 1).value == pytest.approx((1 / 4 + 2 / 4) / 2)
    assert (score.n, score.num_problems, score.suite) == (4, 2, "plus")


def test_an_error_of_the_harness_is_never_a_wrong_answer() -> None:
    """REPORT-132: rewards 1, 1, error, error."""
    score = build({"Mbpp/2": "pp pp ee pe"})
    counts = score.problems["Mbpp/2"]
    assert (counts.n, counts.base, counts.plus, counts.errors) == (2, 2, 2, 2)
    assert score.estimate("plus", 1).value == score.estimate("base", 1).value == 1.0
    assert (score.num_errors, score.n) == (2, 4)
    assert sum(score.outcomes.values()) == 4


@pytest.mark.parametrize(
    ("word", "outcome"),
    [
        ("pp", "pass"),
        ("p-", "pass"),
        ("pf", "fail"),
        ("ft", "timeout"),
        ("te", "harness_error"),
        ("ef", "harness_error"),
    ],
)
def test_one_word_for_two_suites(word: str, outcome: str) -> None:
    assert sample_outcome(verdicts("Mbpp/2", word)[0][1]) == outcome


def test_fewer_samples_than_k_gives_no_value_but_coverage() -> None:
    """PASSK-054 and PASSK-060: neither 1.0 for the short problem nor a mean over the others."""
    long, short = " ".join(["pp"] * 4 + ["ff"] * 156), " ".join(["ff"] * 90)
    score = build({"A/1": long, "A/2": short}, ks=(1, 90, 100))
    short_of = score.pass_at_k["plus"]
    assert short_of is not None
    found = short_of["100"]
    assert (found.value, found.low, found.high, found.num_problems) == (None, None, None, 1)
    assert short_of["90"].value == pytest.approx(pass_at_k(160, 4, 90) / 2)
    assert estimate_pass_at_k([(160, 160), (20, 0)], 32).num_problems == 1
    assert estimate_pass_at_k([(160, 160), (20, 0)], 32).value is None
    assert estimate_pass_at_k([], 1).value is None


def test_errors_can_leave_too_few_judged_samples() -> None:
    score = build({"A/1": "pp ee", "A/2": "pp pp"}, ks=(1, 2))
    assert score.estimate("plus", 1).value == 1.0
    assert (score.estimate("plus", 2).value, score.estimate("plus", 2).num_problems) == (None, 1)
    assert build({"A/1": "ee ee", "A/2": "pp pp"}).estimate("plus", 1).value is None


def test_missing_problems_are_an_error() -> None:
    """PASSK-058 and EVAL-145."""
    ids = [f"Mbpp/{i}" for i in range(378)]
    with pytest.raises(ValueError, match="2 problems have no samples"):
        build(dict.fromkeys(ids[2:], "pp"), ids=ids)
    with pytest.raises(ValueError, match="377 problems have no samples"):
        build({ids[0]: "pp"}, ids=ids)
    with pytest.raises(ValueError, match="378 problems have no samples"):
        build({}, ids=ids)


def test_doubled_and_unknown_samples_are_errors() -> None:
    """PASSK-062: a late second row of a sample, here fail then pass."""
    pairs = verdicts("Mbpp/2", "ff pp")
    twice = [pairs[0], (0, pairs[1][1])]
    given = {"label": "x", "cell": None, "global_step": None, "benchmark": "b", "ks": (1,), "judge_version": "j"}
    given |= {"has_plus": True, "protocol_sha256": None, "prompt_sha256": None}
    with pytest.raises(ValueError, match="2 times"):
        build_score(problem_ids=["Mbpp/2"], verdicts=twice, **given)
    with pytest.raises(ValueError, match="not a problem"):
        build_score(problem_ids=["Mbpp/3"], verdicts=pairs, **given)
    assert build_score(problem_ids=["Mbpp/2"], verdicts=pairs[::-1], **given).n == 2


def test_a_verdict_without_the_second_suite_is_not_a_wrong_answer() -> None:
    with pytest.raises(ValueError, match="lacks the plus suite"):
        build({"Mbpp/2": "pp p-"})


def test_one_suite() -> None:
    score = build({"Mbpp/11": "p- f-"}, has_plus=False)
    assert score.pass_at_k["plus"] is None and score.problems["Mbpp/11"].plus is None
    assert score.suite == "base" and score.passes("Mbpp/11", "base") == 1


def test_json_is_the_contract_and_comes_back() -> None:
    score = build({"Mbpp/2": "pp ff ee", "Mbpp/3": "pp pf tt"}, ks=(1, 2, 3))
    raw = json.loads(score.model_dump_json())
    assert set(raw) == KEYS and raw["schema"] == "score/1"
    assert set(raw["outcomes"]) == {"pass", "fail", "timeout", "harness_error"}
    assert set(raw["pass_at_k"]) == {"base", "plus"} and set(raw["pass_at_k"]["base"]) == {"1", "2", "3"}
    assert {"value", "low", "high"} <= set(raw["pass_at_k"]["plus"]["1"])
    assert raw["problems"]["Mbpp/2"] == {"n": 2, "base": 1, "plus": 1, "errors": 1}
    assert raw["pass_at_k"]["base"]["3"]["value"] is None
    assert Score.model_validate_json(json.dumps(raw)) == score
    assert json.loads(score.replace(num_planned=5).model_dump_json())["num_planned"] == 5


def test_pass_at_k_can_be_computed_again_from_the_counts() -> None:
    """Also that of a subset, which is how the clean subset is reported."""
    rows = {f"Mbpp/{i}": " ".join(["pp"] * (i % 9) + ["pf"] * (8 - i % 9)) for i in range(30)}
    score = Score.model_validate_json(build(rows, ks=(1, 2, 4, 8)).model_dump_json())
    for k in (1, 2, 4, 8):
        stored = (score.pass_at_k["plus"] or {})[str(k)]
        values = [pass_at_k(c.n, c.plus or 0, k) for c in score.problems.values()]
        assert stored.value == pytest.approx(sum(values) / 30, abs=1e-12)
        assert (stored.low, stored.high) == bootstrap_interval(values)
        assert score.estimate("plus", k) == stored
        clean = frozenset(list(rows)[:7]) | {"Mbpp/9999"}
        assert score.estimate("plus", k, clean).value == pytest.approx(sum(values[:7]) / 7, abs=1e-12)
        assert score.estimate("plus", k, clean).num_problems == 7


def test_problems_that_evalplus_decides_by_speed_are_told_apart() -> None:
    found = build({"Mbpp/2": "pp ff", "Mbpp/599": "pp pp", "Mbpp/3": "pf pf"})
    assert found.excepted is not None
    assert found.excepted.problems == ("Mbpp/599",)
    assert found.excepted.pass_at_1["plus"].value == 0.25
    assert found.pass_at_k["plus"]["1"].value == 0.5
    assert build({"Mbpp/2": "pp ff"}).excepted is None
    assert "excepted" not in build({"Mbpp/2": "pp ff"}).model_dump(mode="json", by_alias=True)
