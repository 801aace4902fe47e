"""A reward is a verdict: 1, 0, or no step at all where the judge itself failed."""

import contextlib
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from evaluation.judge import Judge
from evaluation.problems.toy import generate
from evaluation.prompts import resolve
from evaluation.records import Outcome
from training.folder import RunFolder
from training.reward import HarnessFailed, score_rollouts
from training.run import main

ROOT = Path(__file__).resolve().parents[2]
SPEC = resolve(ROOT / "training" / "toy_model", name="toy/1", rendering="plain")
PROBLEMS = {p.problem_id: p for p in generate(0).train[:4]}


@pytest.fixture(autouse=True)
def our_process() -> Iterator[None]:
    handlers = {s: signal.getsignal(s) for s in (signal.SIGTERM, signal.SIGINT)}
    yield
    for number, handler in handlers.items():
        signal.signal(number, handler)


def children() -> list[int]:
    """Return the judge's processes that this process has started."""
    found = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            fields = stat.read_text().rpartition(")")[2].split()
            if int(fields[1]) == os.getpid() and b"judge/child.py" in (stat.parent / "cmdline").read_bytes():
                found.append(int(stat.parent.name))
    return found


@contextlib.contextmanager
def judge_under_fire(begin: Callable[[], bool] = lambda: True) -> Iterator[None]:
    """Kill every process of the judge as soon as it is there, from `begin` on."""
    over = threading.Event()

    def shoot() -> None:
        while not over.is_set():
            for pid in children() if begin() else ():
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            time.sleep(0.005)

    thread = threading.Thread(target=shoot)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


def test_each_completion_is_judged_on_its_own_problem() -> None:
    ids = list(PROBLEMS)
    right = [PROBLEMS[p].reference for p in ids]
    with Judge(list(PROBLEMS.values()), suites="reward") as judge:
        assert score_rollouts(judge, SPEC, PROBLEMS, ids, right) == [Outcome.PASS] * 4
        swapped = score_rollouts(judge, SPEC, PROBLEMS, ids, right[::-1])
        assert Outcome.PASS not in swapped
        assert score_rollouts(judge, SPEC, PROBLEMS, ids[:2], ["", right[1]]) == [Outcome.FAIL, Outcome.PASS]


def test_a_judge_that_dies_is_never_a_wrong_answer() -> None:
    ids = list(PROBLEMS)
    with Judge(list(PROBLEMS.values()), suites="reward") as judge:
        with judge_under_fire(), pytest.raises(HarnessFailed, match=r"no verdict") as failed:
            score_rollouts(judge, SPEC, PROBLEMS, ids, [PROBLEMS[p].reference for p in ids])
        assert failed.value.exit_code == 1
        assert score_rollouts(judge, SPEC, PROBLEMS, ids[:1], [PROBLEMS[ids[0]].reference]) == [Outcome.PASS]


def test_a_step_whose_judge_fails_is_not_taken_and_the_next_start_takes_it(
    make_run: Callable[..., RunFolder], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """REWARD-014: an executor that cannot be reached is an error, never a reward of 0."""
    folder, whole = make_run(tmp_path / "run", steps=4), make_run(tmp_path / "whole", steps=4)
    with judge_under_fire(lambda: folder.checkpoint(2).is_dir()):
        assert main([str(folder.root)]) == 1
    assert "error: judge=" in capsys.readouterr().err
    assert folder.resumes() == folder.checkpoints() == [2]
    assert not folder.result_json.exists()
    assert main([str(folder.root)]) == 0
    assert main([str(whole.root)]) == 0
    weights = [(f.checkpoint(4) / "model.safetensors").read_bytes() for f in (folder, whole)]
    assert weights[0] == weights[1]
