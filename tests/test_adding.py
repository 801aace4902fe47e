"""docs/adding.md: its changes apply to a copy of this tree, and its commands run there."""

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
PAGE = (ROOT / "docs" / "adding.md").read_text()
DIFFS = re.findall(r"```diff\n(.*?)```", PAGE, re.DOTALL)
COMMANDS = [m.partition("#")[0].split() for m in re.findall(r"(?m)^    ablation (.*)$", PAGE)]


@pytest.fixture(scope="module")
def changed(tmp_path_factory):
    """A copy of the tree with every change of the page."""
    copy = tmp_path_factory.mktemp("adding") / "tree"
    copy.mkdir()
    for name in ("flows", "tasks", "training", "evaluation", "deployments", "tests"):
        shutil.copytree(ROOT / name, copy / name, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / "pyproject.toml", copy)
    for diff in DIFFS:
        env = {**os.environ, "GIT_CEILING_DIRECTORIES": str(copy.parent)}
        done = subprocess.run(
            ["git", "apply", "-C1", "-"], cwd=copy, input=diff, text=True, capture_output=True, env=env
        )
        assert done.returncode == 0, done.stderr + diff
    return copy


def run(copy, *argv):
    env = {k: v for k, v in os.environ.items() if not k.startswith("PREFECT_")} | {"PYTHONPATH": str(copy)}
    done = subprocess.run([sys.executable, "-m", *argv], cwd=copy, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_the_page_has_a_change_for_each_thing_that_is_added():
    assert len(DIFFS) == 4
    assert [c[0] for c in COMMANDS] == ["plan", "doctor", "score", "plan", "run"]


@pytest.mark.parametrize("words", [c for c in COMMANDS if c[0] == "plan"], ids=shlex.join)
def test_what_was_added_is_planned(changed, words):
    plan = json.loads(run(changed, "flows.cli", *words, "--json"))
    assert plan["totals"]["cells"] == len(plan["cells"]) > 0
    names = " ".join(c["name"] for c in plan["cells"])
    assert ("qwen3_0p6b_base_mbpp_" in names) or ("toy_toy_hardcd_lam0p3_lr3e4" in names)


def test_what_was_added_is_scored(changed):
    row = {"task_id": "Team/0", "solution": "def square(x):\n    return x * x\n"}
    (changed / "samples.jsonl").write_text(json.dumps(row) + "\n")
    (words,) = [c for c in COMMANDS if c[0] == "score"]
    score = json.loads(run(changed, "flows.cli", *words, "--json", "--no-cache"))
    assert score["outcomes"] == {"pass": 1, "fail": 0, "timeout": 0, "harness_error": 0}
    assert (changed / "scored" / "score.json").is_file()


def test_what_was_added_keeps_the_rules_of_the_registries(changed):
    """The suite's own tests of forms, plans and rates, in the changed tree; what is stored keeps its fingerprints."""
    tests = ("tests/flows/test_deployments.py", "tests/flows/test_plan.py", "tests/flows/test_experiments.py")
    chosen = "form_offers or entry_points or every_experiment or every_model or sha or identity"
    run(changed, "pytest", "-q", "-n", "0", "-p", "no:cacheprovider", *tests, "-k", chosen, "-m", "not prefect")
    code = "from flows.experiments import EXPERIMENTS as e; print(e['full'].sha256, e['smoke'].sha256)"
    from flows.experiments import EXPERIMENTS

    env = {**os.environ, "PYTHONPATH": str(changed)}
    there = subprocess.run(
        [sys.executable, "-c", code], cwd=changed, env=env, capture_output=True, text=True, check=True
    )
    assert there.stdout.split() == [EXPERIMENTS["full"].sha256, EXPERIMENTS["smoke"].sha256]


@pytest.mark.campaign
def test_what_was_added_runs(changed):
    (words,) = [c for c in COMMANDS if c[0] == "run"]
    answer = json.loads(run(changed, "flows.cli", *words, "--json"))
    assert answer["completed"] and len(answer["cells"]) == 3
