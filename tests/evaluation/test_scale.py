"""The judge at the size of a checkpoint: 60,480 made samples (the long proof; its figures are in docs/judge.md)."""

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
DATA = ROOT.parent / "shared/data"
sys.path.insert(0, str(ROOT / "benchmarks"))
from made_samples import LEFT_OUT, make, recorded  # noqa: E402


@pytest.mark.parametrize("distinct", [0.2, 1.0])
def test_the_made_set_has_as_many_meanings_as_it_says(distinct):
    from evaluation.judge.identity import read

    programs = {"Mbpp/2": ["def f(x):\n    return x\n"], "Mbpp/3": ["def f(x):\n    return 1\n", "f = abs\n"]}
    rows = list(make(programs, 200, distinct))
    assert len({r["_identifier"] for r in rows}) == 200
    assert len({r["solution"] for r in rows}) > 90
    assert len({(r["task_id"], read(r["solution"], ("f",)).digest) for r in rows}) == 200 * distinct


@pytest.mark.skipif(not DATA.is_dir(), reason="the data files are not beside the checkout")
def test_the_made_set_leaves_out_one_problem():
    programs = recorded(sorted((DATA / "evalplus_verdicts").glob("*.jsonl")))
    assert len(programs) == 377
    assert LEFT_OUT not in programs


@pytest.mark.skipif(not DATA.is_dir(), reason="the data files are not beside the checkout")
@pytest.mark.campaign
@pytest.mark.parametrize("distinct", ["0.2", "1.0"])
def test_the_judge_adds_little_to_the_tests(distinct, tmp_path):
    command = [
        sys.executable, ROOT / "benchmarks/scoring_at_scale.py", "--mbpp", DATA / "mbpp.jsonl",
        "--mbpp-plus", DATA / "MbppPlus-v0.2.0.jsonl", "--distinct", distinct, "--work", tmp_path, "--most-ms", "5",
        *sorted((DATA / "evalplus_verdicts").glob("*.jsonl")),
    ]  # fmt: skip
    done = subprocess.run([*map(str, command)], capture_output=True, text=True, cwd=ROOT)
    print(done.stdout)
    assert done.returncode == 0, done.stdout + done.stderr
