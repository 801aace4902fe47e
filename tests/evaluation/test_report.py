"""The report of a small experiment with every kind of hole in it: nothing planned is left out, nothing is invented."""

import csv
import io
import json
import math
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from evaluation.curves import Criterion, RunEvidence
from evaluation.markup import table
from evaluation.protocol import Protocol
from evaluation.report import COLUMNS, ReportInput, inline, make_finding, report_markdown, write_report
from evaluation.scores import Counts, Score, estimate_pass_at_k

CONTRACT = (
    "folder,cell,model,arm,lr,seed,global_step,benchmark,suite,subset,k,n,num_problems,value,low,high,"
    "num_harness_errors,protocol,status"
)
FINDING_KEYS = {
    "schema", "experiment", "protocol_sha256", "rule", "sentence", "runs", "boundary", "shift", "min_detectable",
    "limbs", "verdict", "statistical_status", "missing", "departures",
}  # fmt: skip
PLUS = Protocol(benchmark="mbpp_plus", n=4, temperature=0.8, top_p=0.95, max_new_tokens=64)
OTHER = Protocol(benchmark="mbpp_test276", n=1, temperature=0, top_p=1, max_new_tokens=64)
LABELS = {"nobuf": "no replay", "hardcd_lam0p1": "replay"}
IDS = [f"Mbpp/{i}" for i in range(12)]
CLEAN = frozenset(IDS[:9])


def score(protocol: Protocol, passing: int, errors: int = 0) -> Score:
    """Return a score in which `passing` of n samples of every problem pass; `errors` of the first's were not judged."""
    n, plus = protocol.n, protocol is PLUS
    judged = [n - errors if i == 0 else n for i in range(len(IDS))]
    problems = {
        p: Counts(n=m, base=min(passing, m), plus=min(passing, m) if plus else None, errors=n - m)
        for p, m in zip(IDS, judged, strict=True)
    }
    counts = [(c.n, c.base) for c in problems.values()]
    estimates = {str(k): estimate_pass_at_k(counts, k) for k in protocol.reported_ks}
    return Score(
        label="x", cell="x", global_step=0, benchmark=protocol.benchmark, n=n, num_problems=len(IDS),
        outcomes={"pass": 0, "fail": 0, "timeout": 0, "harness_error": errors},
        pass_at_k={"base": estimates, "plus": estimates if plus else None}, problems=problems,
        protocol_sha256=protocol.sha256, prompt_sha256="p", judge_version="j",
    )  # fmt: skip


def evidence(arm: str, lr: float, passing: dict[int, int], **changes: Any) -> RunEvidence:
    """Return a finished run of 20 steps with checkpoints at 10 and 20."""
    scores = {p.benchmark: {s: score(p, min(c, p.n)) for s, c in passing.items()} for p in (PLUS, OTHER)}
    run = RunEvidence(
        label=f"m_{arm}_lr{lr:g}", arm=arm, lr=lr, seed=0, steps=20, checkpoints=(10, 20), rewards=(0.5,) * 20,
        end="finished", onset_step=None, scores=scores,
    )  # fmt: skip
    return replace(run, **changes)


@pytest.fixture(scope="module")
def given() -> ReportInput:
    """Stable, degraded, diverged before any checkpoint, unfinished, and one score with harness errors."""
    broken = evidence("hardcd_lam0p1", 1e-6, {10: 3, 20: 3})
    broken.scores["mbpp_plus"][20] = score(PLUS, 3, errors=2)
    runs = (
        evidence("nobuf", 1e-6, {10: 2, 20: 3}),
        broken,
        evidence("nobuf", 3e-4, {10: 4, 20: 1}),
        evidence("hardcd_lam0p1", 3e-4, {10: 3}, end=None, rewards=(0.5,) * 12),
        evidence("nobuf", 1e-3, {}, end="diverged", onset_step=4, rewards=(0.5, 0.4, 0.2, math.nan)),
        evidence(
            "hardcd_lam0p1",
            1e-3,
            {10: 4},
            end="diverged",
            onset_step=15,
            rewards=(0.5,) * 14 + (math.nan,),
            signs=("constant reward: every reward is 0, from step 4 to step 14",),
        ),
    )
    return ReportInput(
        experiment="tiny",
        question="Does it break?",
        registered_sha256="r" * 64,
        model="m",
        protocols=(PLUS, OTHER),
        criterion=Criterion(),
        runs=runs,
        base={"mbpp_plus": score(PLUS, 2)},
        arm_labels=LABELS,
        clean={"mbpp_plus": CLEAN},
        missing=("m_hardcd_lam0p1_lr0.0003 (not ended)",),
        departures=("half the seeds",),
    )


@pytest.fixture(scope="module")
def folder(given: ReportInput, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("report") / "deep" / "er"
    write_report(out, given)
    return out


@pytest.fixture(scope="module")
def rows(folder: Path) -> list[dict[str, str]]:
    return list(csv.DictReader(io.StringIO((folder / "scores.csv").read_text())))


def test_csv_columns_are_the_contract(folder: Path) -> None:
    assert (folder / "scores.csv").read_text().splitlines()[0] == CONTRACT == ",".join(COLUMNS)


def test_csv_has_each_planned_row_once(rows: list[dict[str, str]], given: ReportInput) -> None:
    names = [("", 0), *((r.label, s) for r in given.runs for s in r.checkpoints)]
    planned = Counter(
        (cell, str(step), p.benchmark, suite, subset, str(k))
        for cell, step in names
        for p, suites, subsets in ((PLUS, ("base", "plus"), ("all", "clean")), (OTHER, ("base",), ("all",)))
        for suite in suites
        for subset in subsets
        for k in p.reported_ks
    )
    keys = ("cell", "global_step", "benchmark", "suite", "subset", "k")
    assert Counter(tuple(r[x] for x in keys) for r in rows) == planned
    assert {r["folder"] for r in rows if not r["cell"]} == {"m/global_step_0"}
    assert all(r["arm"] == r["lr"] == r["seed"] == "" for r in rows if not r["cell"])
    assert {float(r["lr"]) for r in rows if r["cell"]} == {1e-6, 3e-4, 1e-3}


def status(rows: list[dict[str, str]], cell: str, step: int, benchmark: str = "mbpp_plus", k: int = 1) -> set[str]:
    return {
        r["status"]
        for r in rows
        if (r["cell"], r["global_step"], r["benchmark"], r["k"]) == (cell, str(step), benchmark, str(k))
    }


def test_csv_statuses(rows: list[dict[str, str]]) -> None:
    assert status(rows, "m_nobuf_lr1e-06", 20) == {"done"}
    assert status(rows, "m_hardcd_lam0p1_lr0.0003", 10) == {"done"}
    assert status(rows, "m_hardcd_lam0p1_lr0.0003", 20) == {"missing"}
    assert status(rows, "m_nobuf_lr0.001", 10) == status(rows, "m_nobuf_lr0.001", 20) == {"diverged"}
    assert status(rows, "m_hardcd_lam0p1_lr0.001", 10) == {"done"}
    assert status(rows, "m_hardcd_lam0p1_lr0.001", 20) == {"diverged"}
    assert status(rows, "", 0, "mbpp_test276") == {"missing"}
    # Two judged samples of the first problem: enough for k = 2, too few for k = 4.
    assert status(rows, "m_hardcd_lam0p1_lr1e-06", 20, k=2) == {"done"}
    assert status(rows, "m_hardcd_lam0p1_lr1e-06", 20, k=4) == {"failed"}


def test_csv_values_are_there_exactly_when_done(rows: list[dict[str, str]]) -> None:
    for r in rows:
        values = [r[x] for x in ("value", "low", "high")]
        assert all(values) if r["status"] == "done" else not any(values)
        assert (r["num_harness_errors"] == "") == (r["status"] in {"missing", "diverged"})
        if r["status"] == "done":
            assert 0 <= float(r["low"]) <= float(r["value"]) <= float(r["high"]) <= 1
            assert r["num_problems"] == ("9" if r["subset"] == "clean" else "12")
    with_errors = [r for r in rows if r["folder"] == "m_hardcd_lam0p1_lr1e-06/global_step_20"]
    assert {r["num_harness_errors"] for r in with_errors if r["benchmark"] == "mbpp_plus"} == {"2"}


def test_finding_is_strict_json_of_the_contract(folder: Path) -> None:
    def refuse(word: str) -> None:
        raise AssertionError(f"{word} is not JSON")

    raw = json.loads((folder / "finding.json").read_text(), parse_constant=refuse)
    assert set(raw) >= FINDING_KEYS and raw["schema"] == "finding/1"
    assert [r["class"] for r in raw["runs"]] == [
        "stable", "stable", "degraded", "incomplete", "diverged", "diverged",
    ]  # fmt: skip
    assert all(set(r) == {"cell", "class", "onset_step", "why"} for r in raw["runs"])
    for arm in LABELS:
        assert set(raw["boundary"][arm]) >= {"last_stable", "first_unstable", "low", "high", "text"}
    assert "\n" not in raw["sentence"]
    assert any("m_hardcd_lam0p1_lr0.0003" in m for m in raw["missing"])


def test_the_report_answers_first_and_lists_every_hole(folder: Path) -> None:
    text = (folder / "report.md").read_text()
    sentence = json.loads((folder / "finding.json").read_text())["sentence"]
    assert text.splitlines()[:3] == ["# tiny", "", f"**{sentence}**"]
    for name in ("ladder.png", "curves.png"):
        assert f"]({name})" in text
        assert (folder / name).read_bytes().startswith(b"\x89PNG")
    missing = text[text.index("## Missing") : text.index("## Departures")]
    assert "m_hardcd_lam0p1_lr0.0003" in missing and "half the seeds" in text
    assert "3e-4" in text and "| 0.0003 |" not in text
    assert "| m_nobuf_lr0.001/global_step_10 | diverged |" in text
    assert "pass@1, clean subset" in text and "nan" not in text.lower().replace("non-finite", "")
    assert "\n| shift, replay | " in text
    assert "## Forgetting on mbpp_plus" in text and "McNemar" in text
    # 12 of 12 greedy answers: the bootstrap has no width, Wilson's interval has.
    assert "1.000 [1.000, 1.000], all agree: at least 0.758" in text and " 0.758 to 1.000 " in text
    rates = [line.split(" | ")[1] for line in text.splitlines() if line.startswith("| m_") and line.count("|") == 7]
    assert rates[:6] == ["1e-6", "1e-6", "3e-4", "3e-4", "1e-3", "1e-3"]


def test_the_signs_of_the_logs_stand_beside_the_classes_and_change_none(given: ReportInput, tmp_path: Path) -> None:
    finding = write_report(tmp_path / "with", given)
    text = (tmp_path / "with" / "report.md").read_text()
    line = "- m_hardcd_lam0p1_lr0.001: constant reward: every reward is 0, from step 4 to step 14"
    assert line in text[text.index("## Runs") : text.index("## The arms compared")]
    without = replace(given, runs=tuple(replace(r, signs=()) for r in given.runs))
    assert write_report(tmp_path / "without", without) == finding
    assert "Signs in the training logs" not in (tmp_path / "without" / "report.md").read_text()


def test_the_clean_subset_is_counted_among_the_problems_that_were_evaluated(given: ReportInput) -> None:
    """A protocol may evaluate fewer problems than the benchmark has."""
    wider = replace(given, clean={"mbpp_plus": CLEAN | {f"Mbpp/{i}" for i in range(90_000, 90_100)}})
    found, other = make_finding(given).clean, make_finding(wider).clean
    assert found is not None and other is not None
    assert found.num_problems == other.num_problems == len(CLEAN)


def test_the_same_input_gives_the_same_bytes(folder: Path, given: ReportInput, tmp_path: Path) -> None:
    write_report(tmp_path, given)
    names = sorted(p.name for p in folder.iterdir())
    assert names == ["curves.png", "finding.json", "ladder.png", "report.html", "report.md", "scores.csv"]
    for name in names:
        assert (tmp_path / name).read_bytes() == (folder / name).read_bytes(), name


def test_nothing_has_run_yet(given: ReportInput, tmp_path: Path) -> None:
    runs = tuple(replace(r, end=None, rewards=(), scores={}) for r in given.runs)
    finding = write_report(tmp_path, replace(given, runs=runs, base={}))
    assert {r.class_ for r in finding.runs} == {"incomplete"} and finding.shift == "not_identified"
    found = list(csv.DictReader(io.StringIO((tmp_path / "scores.csv").read_text())))
    assert {r["status"] for r in found} == {"missing"}
    for r in given.runs:
        assert any(r.label in m for m in finding.missing)


def test_tables_and_pictures_survive_their_surroundings(given: ReportInput) -> None:
    assert table([("a", "b"), ("x|y", "z")]).splitlines()[-1] == "| x\\|y | z |"
    links = inline({"ladder.png": b"1", "curves.png": b"2"})
    assert links["ladder.png"] == "data:image/png;base64,MQ=="
    assert callable(report_markdown) and given.primary == "mbpp_plus"
