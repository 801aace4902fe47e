"""A whole drop experiment: the document's own numbers through finding, result.json and report."""

import json
from pathlib import Path
from typing import Any, Literal

import pytest

from evaluation.curves import Criterion, RunEvidence
from evaluation.files import write_json
from evaluation.findings import Finding
from evaluation.protocol import Protocol
from evaluation.report import ReportInput, make_finding, write_report
from evaluation.results import drop_result
from evaluation.scores import Counts, Score

DOCUMENT = Path(__file__).resolve().parents[3] / "shared" / "seeds" / "002_fb24d66cdf3584f4.txt"
PROBLEMS = 500
LABELS = {"plain": "plain", "center": "score centering", "plain_int8": "plain, int8", "center_int8": "centering, int8"}
STEPS = tuple(range(10, 101, 10))
PEAKS = {("plain", 0): 437, ("plain", 1): 424, ("center", 0): 430, ("center", 1): 428}
"""Right of 500: .874, .848, .860, .856, from the document's finals and drops."""
FINALS = {("plain", 0): 411, ("plain", 1): 421, ("center", 0): 420, ("center", 1): 427}
FIGURES: dict[str, dict[str, tuple[float, ...]]] = {
    "plain": {
        "grad_norm": (0.0658, *[0.0324] * 99),
        "entropy": (*[0.3] * 90, *[0.0896] * 10),
        "logprob_gap": (0.0059,),
    },
    "center": {
        "grad_norm": (0.0431, *[0.0263] * 99),
        "entropy": (*[0.3] * 90, *[0.1914] * 10),
        "logprob_gap": (0.0062,),
    },
}


def score(right: int) -> Score:
    return Score(
        label="x", cell=None, global_step=0, benchmark="gsm8k", n=1, num_problems=PROBLEMS,
        outcomes={"pass": right, "fail": PROBLEMS - right, "timeout": 0, "harness_error": 0},
        pass_at_k={"base": {}, "plus": None},
        problems={f"Gsm8k/{i}": Counts(n=1, base=int(i < right), plus=None, errors=0) for i in range(PROBLEMS)},
        protocol_sha256=None, prompt_sha256=None, judge_version="exact/1",
    )  # fmt: skip


BASE = score(373)  # .746; the document evaluated it for each run: .747 and .746


def run(arm: str, seed: int, steps: tuple[int, ...] = STEPS, suffix: str = "") -> RunEvidence:
    scores = {s: score(380) for s in steps}
    scores |= {50: score(PEAKS[arm, seed]), 100: score(FINALS[arm, seed])} if 100 in steps else {}
    last = {"plain": 0.849, "center": 0.8686}[arm]
    end: Literal["finished", "diverged"] | None = "finished" if 100 in steps else None
    return RunEvidence(
        label=f"m_gsm8k_{arm}{suffix}_lr1e4_s{seed}", arm=arm + suffix, lr=1e-4, seed=seed, steps=100,
        checkpoints=STEPS, rewards=(*[0.5] * 90, *[last] * 10), end=end, scores={"gsm8k": scores},
        figures=FIGURES[arm],
    )  # fmt: skip


def given(runs: list[RunEvidence], **changes: Any) -> ReportInput:
    fields: dict[str, Any] = {
        "experiment": "score_centering", "question": "?", "registered_sha256": "r", "model": "m",
        "protocols": (Protocol(benchmark="gsm8k", n=1, temperature=0, top_p=1, max_new_tokens=512, prompt="gsm8k/1"),),
        "criterion": Criterion(rule="drop"), "runs": tuple(runs), "base": {"gsm8k": BASE}, "arm_labels": LABELS,
        "pairs": (("plain", "center"), ("plain_int8", "center_int8")), "top_k": 32, "wall_minutes": 77.04,
    }  # fmt: skip
    return ReportInput(**{**fields, **changes})


FOUR = [run(arm, seed) for arm in ("plain", "center") for seed in (0, 1)]
CONTROLS = [run(arm, seed, suffix="_int8") for arm in ("plain", "center") for seed in (0, 1)]


def documents_numbers() -> dict[str, float]:
    """Read the key, value pairs that follow the registered experiment."""
    lines = [x.strip() for x in DOCUMENT.read_text(encoding="utf-8").splitlines() if x.strip()]
    start = lines.index("base_peak_acc")
    return {key: float(value) for key, value in zip(lines[start::2], lines[start + 1 :: 2], strict=True)}


@pytest.mark.skipif(not DOCUMENT.is_file(), reason="needs the document")
def test_the_documents_own_results_fail_are_inconclusive_and_have_its_means(tmp_path):
    found = write_report(tmp_path, given(FOUR, pairs=(("plain", "center"),)))
    assert (found.rule, found.verdict) == ("drop", "failed")
    assert found.statistical_status.startswith("inconclusive")
    result = json.loads((tmp_path / "result.json").read_text(encoding="utf-8"))
    document = documents_numbers()
    assert set(document) == set(result) - {"schema"}
    approximate = {"base_init_acc", "wall_minutes"}  # one base here, two draws there; rounded to a tenth
    means = {"base_grad_norm_mean", "sc_grad_norm_mean"}  # of a made log
    for key in set(document) - approximate - means:
        assert result[key] == pytest.approx(document[key], abs=5e-5), key
    assert result["wall_minutes"] == 77.0 and result["base_init_acc"] == result["sc_init_acc"] == 0.746
    assert result["base_grad_norm_mean"] == pytest.approx((0.0658 + 99 * 0.0324) / 100, abs=1e-6)


def test_every_limb_and_every_run_is_in_the_report(tmp_path):
    found = write_report(tmp_path, given(FOUR + CONTROLS))
    text = (tmp_path / "report.md").read_text(encoding="utf-8")
    assert [limb.name for limb in found.limbs] == [
        "treatment_drop", "drop_difference", "final_difference", "baseline_drop",
    ]  # fmt: skip
    for words in ("drop of the treated arm", "no part of the rule", "Control: centering, int8", "Stability signals"):
        assert words in text
    assert "| m_gsm8k_plain_lr1e4_s0 | 0.746 | 0.874 | 0.822 | 0.052 |" in text
    assert not (tmp_path / "ladder.png").exists() and (tmp_path / "curves.png").exists()
    assert found.controls["center_int8"].verdict == "failed"
    write_json(tmp_path / "again.json", found)
    assert Finding.model_validate_json((tmp_path / "again.json").read_text(encoding="utf-8")) == found


def test_a_control_decides_nothing(tmp_path):
    """A pair of controls that lacks a run, or that shows the opposite, leaves the verdict as it is."""
    alone = make_finding(given(FOUR, pairs=(("plain", "center"),)))
    short = make_finding(given(FOUR + CONTROLS[:3]))
    assert (short.verdict, short.limbs, short.sentence) == (alone.verdict, alone.limbs, alone.sentence)
    assert short.controls["center_int8"].verdict is None and "not paired" in short.controls["center_int8"].status


def test_a_run_that_has_not_ended_leaves_no_verdict_and_null_means():
    runs = [*FOUR[:3], run("center", 1, steps=(10, 20))]
    found = make_finding(given(runs, pairs=(("plain", "center"),)))
    assert found.verdict is None and "1 of 4 runs lack a finished curve" in found.sentence
    assert [r.class_ for r in found.runs][-1] == "incomplete" and found.missing
    result = drop_result(runs, BASE, "gsm8k", ("plain", "center"), top_k=32, wall_minutes=None)
    assert (
        result["sc_drop"] is result["sc_s1_drop"] is result["drop_diff_base_minus_sc"] is result["wall_minutes"] is None
    )
    assert (result["base_drop"], result["sc_s0_drop"]) == (0.029, 0.02)


def test_a_run_that_drops_to_its_end_from_the_base_peaks_at_step_0():
    falling = run("plain", 0)
    falling.scores["gsm8k"].update({s: score(300) for s in STEPS})
    result = drop_result([falling], BASE, "gsm8k", ("plain", "center"), top_k=32, wall_minutes=1.0)
    assert (result["base_peak_acc"], result["base_drop"]) == (0.746, 0.146) and result["sc_peak_acc"] is None


def test_one_arm_alone_has_no_verdict():
    found = make_finding(given(FOUR[:2], pairs=(), arm_labels={"plain": "plain"}))
    assert found.verdict is None and "one arm" in found.sentence
