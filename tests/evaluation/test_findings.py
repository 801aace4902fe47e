"""The finding of whole experiments: what its sentence claims, what it lists as missing, and its JSON."""

import json
from typing import Literal

import pytest

from evaluation.curves import Criterion, RunEvidence
from evaluation.files import write_json
from evaluation.findings import Finding, find
from evaluation.scores import Counts, Score

LABELS = {"nobuf": "no replay", "hardcd_lam0p1": "replay"}
RATES = (3e-4, 1e-3, 2e-3, 3e-3)
N, PROBLEMS = 8, 64


def score(passes: int) -> Score:
    """Every problem has so many of its 8 samples right."""
    return Score(
        label="x", cell=None, global_step=0, benchmark="toy_plus", n=N, num_problems=PROBLEMS,
        outcomes={"pass": 0, "fail": 0, "timeout": 0, "harness_error": 0}, pass_at_k={"base": {}, "plus": {}},
        problems={f"Toy/{i}": Counts(n=N, base=passes, plus=passes, errors=0) for i in range(PROBLEMS)},
        protocol_sha256=None, prompt_sha256=None, judge_version="j",
    )  # fmt: skip


def run(arm: str, lr: float, word: str, seed: int = 0) -> RunEvidence:
    """One run: s stable, c collapsed, d degraded, x diverged at step 25, m without its last score, - not ended."""
    last = {"d": 1, "c": 0}.get(word, 5)
    scores = {20: score(4), 40: score(last)}
    end: Literal["finished", "diverged"] | None = {"x": "diverged", "-": None}.get(word, "finished")  # type: ignore[assignment]
    if word in "mx-":
        del scores[40]
    rewards = [0.5] * 40 if word != "c" else [0.5] * 20 + [0.0] * 20
    return RunEvidence(
        label=f"toy_{arm}_{lr}_{seed}", arm=arm, lr=lr, seed=seed, steps=40, checkpoints=(20, 40),
        rewards=tuple(rewards if word != "x" else [*rewards[:24], float("nan")]), end=end,
        onset_step=25 if word == "x" else None, scores={"toy_plus": scores},
    )  # fmt: skip


def finding(
    plain: list[str],
    replay: list[str],
    base: Score | None = None,
    missing: tuple[str, ...] = (),
    criterion: Criterion | None = None,
) -> Finding:
    """One string a seed, one letter a rate."""
    arms = {"nobuf": plain, "hardcd_lam0p1": replay}
    runs = [
        run(arm, lr, word, seed)
        for arm, rows in arms.items()
        for seed, row in enumerate(rows)
        for lr, word in zip(RATES, row, strict=True)
    ]
    return find(
        experiment="smoke", criterion=criterion or Criterion(), runs=runs, base=base or score(3), benchmark="toy_plus",
        protocol_sha256="p", registered_sha256="r", arm_labels=LABELS, missing=missing,
    )  # fmt: skip


def test_one_seed_says_what_was_seen_and_claims_no_shift() -> None:
    found = finding(["sscc"], ["sssc"])
    assert [r.class_ for r in found.runs] == ["stable", "stable", "collapsed", "collapsed"] + ["stable"] * 3 + [
        "collapsed"
    ]
    assert found.boundary["nobuf"].first_unstable == 2e-3 and found.boundary["hardcd_lam0p1"].first_unstable == 3e-3
    assert (found.shift, found.min_detectable, found.verdict) == ("not_detectable", None, None)
    assert found.sentence == (
        "No replay: breaks between 1e-3 (last stable) and 2e-3 (first unstable); one seed, no interval. "
        "Replay: breaks between 2e-3 (last stable) and 3e-3 (first unstable); one seed, no interval. "
        "The boundary of 'replay' against that of 'no replay': its bracket lies higher, but with so few seeds a shift "
        "is not detectable."
    )
    assert found.statistical_status == (
        "of 4 rates, 1 broke 'no replay' more often and 0 broke 'replay' more; "
        "one seed, no test (at least 4 seeds needed)"
    )
    assert found.missing == ()


def test_four_seeds_that_agree_show_a_shift() -> None:
    found = finding(["sscc"] * 4, ["sssc"] * 4)
    assert (found.shift, found.min_detectable) == ("up", 1.0)
    assert "moved up" in found.sentence and "p = 0.029" in found.statistical_status
    assert found.comparisons["hardcd_lam0p1"].shift == "up"
    same = finding(["sscc"] * 4, ["sscc"] * 4)
    assert same.shift == "not_detectable" and "the smallest that could be seen being 1 rungs" in same.sentence


def test_every_class_counts_as_the_rules_say() -> None:
    found = finding(["sdxc"], ["ssss"])
    assert [r.class_ for r in found.runs[:4]] == ["stable", "degraded", "diverged", "collapsed"]
    assert found.runs[2].onset_step == 25 and found.runs[3].onset_step is not None
    assert found.shift == "not_identified" and "every ended run of 'replay' is stable" in found.sentence


def test_incomplete_runs_are_said_and_listed_once() -> None:
    found = finding(["s-mc"], ["sssc"], missing=("toy_nobuf_0.001_0 (not ended)",))
    assert [r.class_ for r in found.runs[:4]] == ["stable", "incomplete", "incomplete", "collapsed"]
    assert found.missing == ("toy_nobuf_0.001_0 (not ended)", "toy_nobuf_0.002_0 (no score at step 40)")
    assert found.boundary["nobuf"].last_stable == 3e-4
    assert "no ended run at 1e-3, 2e-3" in found.sentence and "2 of 8 runs are incomplete" in found.sentence


def test_without_the_base_nothing_can_be_called_stable() -> None:
    runs = [run("nobuf", lr, "s") for lr in RATES]
    found = find(
        experiment="smoke", criterion=Criterion(), runs=runs, base=None, benchmark="toy_plus", protocol_sha256="p",
        registered_sha256="r", arm_labels={"nobuf": "no replay"},
    )  # fmt: skip
    assert {r.class_ for r in found.runs} == {"incomplete"}
    assert found.missing[0] == "global_step_0 of the base model (score)" and len(found.missing) == 5
    assert found.shift == "not_identified" and "no run has ended" in found.sentence


def test_the_record_is_strict_json_with_the_contracts_keys(tmp_path) -> None:
    found = finding(["sxcc"], ["sssc"])
    write_json(tmp_path / "finding.json", found)

    def refuse(token: str) -> None:
        pytest.fail(f"{token} is not JSON")

    read = json.loads((tmp_path / "finding.json").read_text(), parse_constant=refuse)
    assert {
        "schema", "experiment", "protocol_sha256", "rule", "sentence", "runs", "boundary", "shift", "min_detectable",
        "limbs", "verdict", "statistical_status", "missing", "departures",
    } <= set(read)  # fmt: skip
    assert read["schema"] == "finding/1" and set(read["runs"][0]) == {"cell", "class", "onset_step", "why"}
    assert set(read["boundary"]["nobuf"]) == {"last_stable", "first_unstable", "low", "high", "text"}
    assert Finding.model_validate(read) == found


def test_the_drop_rule_reads_peaks_and_ends_from_the_curves() -> None:
    """Base 3/8, 4/8 at step 20, then 5/8 (stable) or 1/8 (degraded)."""
    rules = Criterion(rule="drop")
    found = finding(["dddd"], ["ssss"], criterion=rules)
    # Four rates are no seeds: the same seed four times over is refused rather than averaged.
    assert found.verdict is None and "cannot be applied" in found.sentence
    runs = [run("nobuf", 1e-3, "d", s) for s in (0, 1)] + [run("hardcd_lam0p1", 1e-3, "s", s) for s in (0, 1)]
    asked = {
        "experiment": "x", "criterion": rules, "base": score(3), "benchmark": "toy_plus", "protocol_sha256": "p",
        "registered_sha256": "r", "arm_labels": LABELS,
    }  # fmt: skip
    whole = find(runs=runs, **asked)
    assert whole.rule == "drop" and whole.verdict == "validated" and whole.boundary == {}
    assert [limb.value for limb in whole.limbs] == [0.0, 0.375, 0.5, 0.375]
    short = find(runs=[*runs[:3], run("hardcd_lam0p1", 1e-3, "m", 1)], **asked)
    assert short.verdict is None and "1 of 4 runs" in short.sentence
    assert short.missing == ("toy_hardcd_lam0p1_0.001_1 (no score at step 40)",)
