"""The rule "drop" on the numbers of the document that states it, and at its edges."""

import json
import math

import pytest

from evaluation.curves import Criterion
from evaluation.drops import Ending, judge_drops, standard_error

RULES = Criterion(rule="drop")


def endings(drops: list[float], finals: list[float]) -> list[Ending]:
    return [Ending(seed=i, peak=f + d, final=f) for i, (d, f) in enumerate(zip(drops, finals, strict=True))]


def test_the_documents_own_results_fail_and_are_inconclusive_statistically() -> None:
    """REPORT-129: easy to report as a win, and neither the rule nor two seeds carry it."""
    found = judge_drops(endings([0.052, 0.006], [0.822, 0.842]), endings([0.020, 0.002], [0.840, 0.854]), RULES)
    assert found.verdict == "failed"
    values = {limb.name: (round(limb.value or 0, 9), limb.passed) for limb in found.limbs}
    assert values == {
        "treatment_drop": (0.011, True),
        "drop_difference": (0.018, False),
        "final_difference": (0.015, True),
        "baseline_drop": (0.029, False),
    }
    assert found.status.startswith("inconclusive") and "2 seeds" in found.status
    assert "failed" in found.sentence and "+0.018" in found.sentence
    json.loads(found.model_dump_json())


def test_standard_error_uses_the_sample_deviation() -> None:
    """REPORT-131."""
    error = standard_error([0.052, 0.006])
    assert error == pytest.approx(0.0325269 / math.sqrt(2), abs=1e-7)
    assert error == pytest.approx(0.0230, abs=5e-5)
    assert standard_error([0.05]) is None


@pytest.mark.parametrize(
    ("plain", "treated", "finals", "verdict"),
    [
        (0.05, 0.02, (0.8, 0.8), "validated"),  # both thresholds met exactly, whatever the floats say
        (0.05, 0.02, (0.8, 0.785), "validated"),
        (0.05, 0.02, (0.8, 0.784), "inconclusive"),  # too much final accuracy lost
        (0.08, 0.03, (0.8, 0.8), "inconclusive"),  # large difference, but the treatment drops too
        (0.05, 0.021, (0.8, 0.8), "failed"),
        (0.00, 0.10, (0.8, 0.8), "failed"),  # signed: a treatment that drops more has failed too
    ],
)
def test_verdicts_at_the_thresholds(plain: float, treated: float, finals: tuple[float, float], verdict: str) -> None:
    found = judge_drops(endings([plain] * 3, [finals[0]] * 3), endings([treated] * 3, [finals[1]] * 3), RULES)
    assert found.verdict == verdict


@pytest.mark.parametrize("drop", [0.0, 0.002, 0.08])
def test_seeds_that_differ_by_the_same_are_no_proof(drop: float) -> None:
    """Their interval has no width, and would lie on one side of any threshold."""
    found = judge_drops(endings([drop + 0.01] * 2, [0.8, 0.82]), endings([0.01] * 2, [0.8, 0.81]), RULES)
    assert found.status.startswith("inconclusive") and "2 seeds" in found.status


def test_one_seed_has_a_verdict_by_rule_and_no_interval() -> None:
    found = judge_drops(endings([0.09], [0.8]), endings([0.0], [0.85]), RULES)
    assert found.verdict == "validated" and found.status == "one seed, no interval"


def test_many_equal_seeds_are_conclusive() -> None:
    plain = endings([0.06, 0.061, 0.062, 0.063], [0.8] * 4)
    assert judge_drops(plain, endings([0.0] * 4, [0.8] * 4), RULES).status.startswith("the difference reaches")
    assert judge_drops(plain, endings([0.05] * 4, [0.8] * 4), RULES).status.startswith("the difference stays below")


def test_unpaired_seeds_are_refused() -> None:
    two = endings([0.1, 0.1], [0.8, 0.8])
    for plain, treated in (([], []), (two, two[:1]), (two[:1], two[1:]), ([two[0]] * 2, [two[0]] * 2)):
        with pytest.raises(ValueError, match="same seeds"):
            judge_drops(plain, treated, RULES)
