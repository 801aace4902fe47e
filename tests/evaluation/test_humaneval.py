"""HumanEval+ through the same door: problems of our own in its format, judged as EvalPlus itself judges them."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from evaluation.errors import InputError
from evaluation.problems.humaneval import load_humaneval_plus
from evaluation.problems.prepare import load_benchmark
from evaluation.scoring import score_samples

FIND_ZERO = '''import math

def poly(xs: list, x: float):
    return sum([coeff * math.pow(x, i) for i, coeff in enumerate(xs)])

def find_zero(xs: list):
    """Return one root of a polynomial."""
'''
BISECT = """    low, high = -1.0, 1.0
    while poly(xs, low) * poly(xs, high) > 0:
        low, high = 2 * low, 2 * high
    while high - low > 1e-10:
        middle = (low + high) / 2.0
        if poly(xs, middle) * poly(xs, low) > 0:
            low = middle
        else:
            high = middle
    return low
"""
NEWTON = """    x = 0.3
    for _ in range(200):
        d = sum(i * c * x ** (i - 1) for i, c in enumerate(xs) if i)
        x -= poly(xs, x) / (d or 1.0)
    return x
"""


def row(i):
    if i == 32:
        return {
            "task_id": "HumanEval/32", "prompt": FIND_ZERO, "entry_point": "find_zero", "canonical_solution": BISECT,
            "base_input": [[[1, 2]], [[-6, 11, -6, 1]]], "plus_input": [[[-3, -6, 9, 1]], [[2, 1]]], "atol": 1e-6,
            "contract": "", "test": "",
        }  # fmt: skip
    body = f"    return x / {i + 1}\n" if i % 2 else f"    return x + {i}\n"
    return {
        "task_id": f"HumanEval/{i}", "prompt": f'def f{i}(x):\n    """Problem {i}."""\n', "entry_point": f"f{i}",
        "canonical_solution": body, "base_input": [[2], [6]], "plus_input": [[10], [-7], [1000]], "atol": 0,
        "contract": "", "test": "",
    }  # fmt: skip


def completion(i):
    """Right, wrong on base, wrong on plus, and close enough, in turn."""
    right = row(i)["canonical_solution"]
    if i == 32:
        return NEWTON
    return [
        right,
        f"    return x / {i + 1} + 1e-9\n" if i % 2 else right,
        "    return None\n",
        right.replace("return", "return 0 if x == 1000 else"),
        "    import os\n    os._exit(0)\n",
    ][i % 5]


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    folder = tmp_path_factory.mktemp("humaneval")
    problems, samples = folder / "HumanEvalPlus.jsonl", folder / "samples.jsonl"
    problems.write_text("".join(json.dumps(row(i)) + "\n" for i in range(164)))
    rows = [{"task_id": f"HumanEval/{i}", "completion": completion(i)} for i in range(164)]
    samples.write_text("".join(json.dumps(r) + "\n" for r in rows))
    return problems, samples


def test_every_verdict_is_evalplus_own_but_that_of_its_bug(files, tmp_path):
    problems, samples = files
    score_samples(samples, "humaneval_plus", load_benchmark("humaneval_plus", humaneval_plus=str(problems)), tmp_path)
    ours = json.loads((tmp_path / "samples_eval_results.json").read_text())["eval"]

    theirs_samples = tmp_path / "theirs.jsonl"
    theirs_samples.write_text(samples.read_text())
    command = [Path(sys.executable).parent / "evalplus.evaluate", "--dataset", "humaneval", "--samples", theirs_samples]
    env = {**os.environ, "HUMANEVAL_OVERRIDE_PATH": str(problems), "XDG_CACHE_HOME": str(tmp_path)}
    subprocess.run([*map(str, command)], env=env, check=True, capture_output=True, cwd=tmp_path)
    theirs = json.loads((tmp_path / "theirs_eval_results.json").read_text())["eval"]
    different = [
        (task, suite, ours[task][0][suite], theirs[task][0][suite])
        for task in theirs
        for suite in ("base_status", "plus_status", "solution")
        if ours[task][0][suite] != theirs[task][0][suite]
    ]
    # 0.3.1 forgets to count a root that it has accepted, so that even the reference fails (evalplus pull request 201).
    assert different == [("HumanEval/32", s, "pass", "fail") for s in ("base_status", "plus_status")]
    found = [e[0]["base_status"] == e[0]["plus_status"] == "pass" for e in ours.values()]
    assert 50 < sum(found) < 80


@pytest.mark.parametrize(
    ("rows", "reason"),
    [
        ([row(i) for i in range(163)], "163 problems"),
        ([{**row(i), "task_id": f"HumanEval/{i + 1}"} for i in range(164)], "HumanEval/0 is not there"),
        ([{k: v for k, v in row(i).items() if k != "atol"} for i in range(164)], "has no 'atol'"),
    ],
)
def test_a_wrong_file_is_refused(tmp_path, rows, reason):
    path = tmp_path / "problems.jsonl"
    path.write_text("".join(json.dumps(r) + "\n" for r in rows))
    with pytest.raises(InputError, match=reason):
        load_humaneval_plus(str(path))
