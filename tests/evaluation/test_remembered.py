"""Verdicts that outlive the process: found again exactly, never in the way."""

import json
import os
import signal
import sqlite3
import subprocess
import sys
import time
from pathlib import Path

import pytest

from evaluation.judge import Judge
from evaluation.judge.remembered import FILE, Remembered
from evaluation.records import Outcome, Problem, Program, Verdict

RIGHT = "def f(x):\n    return 2 * x\n"
WRONG = "def f(x):\n    return x + 2\n"


def problem(**more):
    fields = {
        "problem_id": "Test/1", "text": "", "entry_point": "f", "reference": RIGHT,
        "asserts": ("assert f(2) == 4",), "base_inputs": [[2]], "plus_inputs": [[3]],
    }  # fmt: skip
    return Problem(**{**fields, **more})


def verdicts(p, sources, cache, suites="both"):
    with Judge([p], cache=cache, suites=suites) as judge:
        return judge.judge([Program(problem_id=p.problem_id, source=s) for s in sources])


def rows(cache):
    with sqlite3.connect(cache / FILE) as file:
        return file.execute("SELECT count(*) FROM verdicts").fetchone()[0]


def test_what_was_judged_is_not_run_again(tmp_path, monkeypatch):
    first = verdicts(problem(), [RIGHT, WRONG], tmp_path)
    monkeypatch.setattr("evaluation.judge.judge.Judge._judge_one", lambda *_: pytest.fail("judged again"))
    renamed = "def f(number):\n    '''Twice.'''\n    return 2 * number\n"
    assert verdicts(problem(), [RIGHT, WRONG, renamed], tmp_path) == [*first, first[0]]


@pytest.mark.parametrize(
    "other",
    [
        problem(plus_inputs=[[4]]),
        problem(base_inputs=[[5]]),
        problem(reference="def f(x):\n    return x + x\n"),
        problem(atol=1e-3),
    ],
    ids=["plus", "base", "reference", "tolerance"],
)
def test_another_suite_is_judged_anew(tmp_path, other):
    verdicts(problem(), [RIGHT], tmp_path)
    verdicts(other, [RIGHT], tmp_path)
    assert rows(tmp_path) == 2


def test_other_suites_of_a_problem_are_judged_anew(tmp_path):
    assert verdicts(problem(), [RIGHT], tmp_path, "reward")[0].plus is None
    assert verdicts(problem(), [RIGHT], tmp_path, "both")[0].plus is Outcome.PASS
    assert verdicts(problem(), ["def f(x): return 0\n"], tmp_path, "score")[0].plus is Outcome.FAIL


def test_another_judge_version_judges_anew(tmp_path, monkeypatch):
    verdicts(problem(), [RIGHT], tmp_path)
    monkeypatch.setattr("evaluation.judge.judge.JUDGE_VERSION", "judge/99")
    verdicts(problem(), [RIGHT], tmp_path)
    assert rows(tmp_path) == 2


def test_a_failure_of_the_harness_is_not_remembered(tmp_path):
    broken = problem(reference="def f(x):\n    return 1 // 0\n")
    assert verdicts(broken, [RIGHT], tmp_path)[0].errored
    assert rows(tmp_path) == 0


@pytest.mark.parametrize("content", [b"", b"no database at all" * 100, b"SQLite format 3\0" + b"\xff" * 4096])
def test_a_damaged_file_costs_a_warning_only(tmp_path, content, caplog):
    (tmp_path / FILE).write_bytes(content)
    assert [v.passed for v in verdicts(problem(), [RIGHT, WRONG], tmp_path)] == [True, False]
    assert not content or "not remembered" in caplog.text


def test_a_row_that_is_no_verdict_is_judged_anew(tmp_path):
    verdicts(problem(), [RIGHT], tmp_path)
    with sqlite3.connect(tmp_path / FILE) as file:
        file.execute("UPDATE verdicts SET base = 'maybe'")
    assert verdicts(problem(), [RIGHT], tmp_path)[0].passed


def test_many_are_found(tmp_path):
    keys = [i.to_bytes(20, "big") for i in range(2500)]
    found = Verdict(
        problem_id="Test/1", base=Outcome.PASS, plus=None, tests_passed=1, tests_total=1, seconds=0.5, detail="",
    )  # fmt: skip
    one, two = Remembered(tmp_path), Remembered(tmp_path)
    for key in keys:
        one.add(key, found)
    one.flush()
    assert two.find(keys, ["Test/1"] * len(keys)) == dict.fromkeys(keys, found)
    one.close()
    two.close()


def test_a_killed_judge_goes_on_where_it_was(tmp_path):
    """kill -9 in the middle; what was written is not judged again, and every verdict is the same."""
    slow = "import time\ndef f(x):\n    time.sleep(0.05)\n    return {} * x\n"
    sources = [slow.format(i % 4) + f"# {i}\n_n = {i}\n" for i in range(80)]
    p = problem()
    expected = [v.passed for v in verdicts(p, sources, None)]
    script = (
        "import sys, json\nfrom pathlib import Path\nfrom evaluation.judge import Judge\n"
        "from evaluation.records import Problem, Program\n"
        f"p = Problem.model_validate_json({p.model_dump_json()!r})\n"
        f"sources = json.loads({json.dumps(sources)!r})\n"
        f"judge = Judge([p], workers=2, cache=Path({str(tmp_path)!r}))\n"
        "judge.judge([Program(problem_id=p.problem_id, source=s) for s in sources])\n"
    )
    process = subprocess.Popen([sys.executable, "-c", script], cwd=Path(__file__).resolve().parents[2])
    until = time.monotonic() + 60
    while time.monotonic() < until and process.poll() is None and not _some(tmp_path):
        time.sleep(0.02)
    assert process.poll() is None, "it ended before it could be killed"
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    kept = rows(tmp_path)
    assert 0 < kept < 80
    assert [v.passed for v in verdicts(p, sources, tmp_path)] == expected
    assert rows(tmp_path) == 80


def _some(cache):
    try:
        return rows(cache) > 0
    except sqlite3.Error:
        return False
