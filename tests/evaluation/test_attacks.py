"""Programs written to break this judge, from the inside of its protocol, and honest ones that look alike.

Each row of attacks.jsonl has its right verdict: forged frames, values that pose as others, escapes, tricks with the
interpreter, the clock and the identity of programs.
"""

import json
from collections import Counter
from pathlib import Path

import pytest

from evaluation.judge import Judge
from evaluation.problems import load_benchmark
from evaluation.problems.mbpp import load_mbpp
from evaluation.records import Program

DATA = Path(__file__).resolve().parents[3] / "shared/data"
ROWS = [json.loads(line) for line in Path(__file__).with_name("attacks.jsonl").read_text("utf-8").splitlines()]
LOAD = {
    "score": lambda: load_benchmark("mbpp_plus", mbpp_plus=str(DATA / "MbppPlus-v0.2.0.jsonl")),
    "reward": lambda: load_mbpp(str(DATA / "mbpp.jsonl")).problems,
}


@pytest.mark.skipif(not DATA.is_dir(), reason="no copy of MBPP+ here")
@pytest.mark.parametrize(
    ("together", "suites"),
    [
        pytest.param(True, "reward", id="in one batch-reward"),
        pytest.param(False, "score", id="one by one-score"),
        pytest.param(True, "score", id="in one batch-score", marks=pytest.mark.campaign),
        pytest.param(False, "reward", id="one by one-reward", marks=pytest.mark.campaign),
    ],
)
def test_every_attack_and_every_lookalike_gets_its_verdict(together, suites):
    rows = [r for r in ROWS if r.get("suites", "score") == suites]
    named = {r["task_id"] for r in rows}
    problems = [p for p in LOAD[suites]() if p.problem_id in named]
    programs = [Program(problem_id=r["task_id"], source=r["solution"]) for r in rows]
    with Judge(problems, workers=2, suites="both" if suites == "score" else "reward") as judge:
        verdicts = judge.judge(programs) if together else [judge.judge([p])[0] for p in programs]
    wrong = [
        (r["category"], r["name"], r["expected"], v.base.value, v.detail)
        for r, v in zip(rows, verdicts, strict=True)
        if v.errored or ("pass" if v.passed else "fail") != r["expected"]
    ]
    assert not wrong


def test_the_attacks_are_of_many_kinds():
    kinds = Counter(r["category"] for r in ROWS)
    assert len(kinds) >= 8 and len(ROWS) >= 120
    assert {r["expected"] for r in ROWS} == {"pass", "fail"}
