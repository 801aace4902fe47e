"""A reward is a verdict: 1, 0, or no step at all where the judge itself failed."""

import contextlib
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest

from evaluation.judge import Judge
from evaluation.problems.toy import generate
from evaluation.prompts import PromptSpec, resolve
from evaluation.records import Outcome, Problem, Program, Verdict
from training.folder import RunFolder
from training.reward import HarnessFailed, RewardStream
from training.run import main

ROOT = Path(__file__).resolve().parents[2]
SPEC = resolve(ROOT / "training" / "toy_model", name="toy/1", rendering="plain")
PROBLEMS = {p.problem_id: p for p in generate(0).train[:4]}


def decode(batch: Sequence[Sequence[int]]) -> list[str]:
    return ["".join(map(chr, ids)) for ids in batch]


def encode(text: str) -> list[int]:
    return [ord(c) for c in text]


def score_rollouts(
    judge: Judge, spec: PromptSpec, problems: dict[str, Problem], problem_ids: Sequence[str], completions: Sequence[str]
) -> list[Outcome]:
    """Judge a step of which nothing was put before."""
    stream = RewardStream(judge, spec, problems, decode)
    try:
        return stream.outcomes(problem_ids, [encode(c) for c in completions])
    finally:
        stream.close()


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
def judge_under_fire(begin: Callable[[], bool] = lambda: True) -> Iterator[threading.Event]:
    """Kill every process of the judge as soon as it is there, from `begin` on; yields what says that one was hit."""
    over, hit = threading.Event(), threading.Event()

    def shoot() -> None:
        while not over.is_set():
            for pid in children() if begin() else ():
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
                    hit.set()
            time.sleep(0.005)

    thread = threading.Thread(target=shoot)
    thread.start()
    try:
        yield hit
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
        with judge_under_fire() as hit, pytest.raises(HarnessFailed, match=r"no verdict") as failed:
            assert hit.wait(10)  # else four short programs may be judged before the first shot
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


class SlowJudge:
    """Passes programs that say so, in a thread that is seen; takes its time, as a judge does."""

    def __init__(self, seconds: float) -> None:
        self.seconds, self.batches, self.threads = seconds, [], set()

    def judge(self, programs: Sequence[Program]) -> list[Verdict]:
        self.threads.add(threading.current_thread().name)
        self.batches.append([p.source for p in programs])
        time.sleep(self.seconds)
        if any("broken judge" in p.source for p in programs):
            raise OSError("no room for another process")
        return [
            Verdict(
                problem_id=p.problem_id,
                base=Outcome.PASS if "right" in p.source else Outcome.FAIL,
                plus=None,
                tests_passed=0,
                tests_total=3,
                seconds=0.0,
            )
            for p in programs
        ]


def stream_over(judge: SlowJudge) -> RewardStream:
    return RewardStream(judge, SPEC, PROBLEMS, decode)  # type: ignore[arg-type]


def test_rollouts_are_judged_while_others_are_drawn_and_once_each() -> None:
    judge, problem = SlowJudge(0.1), next(iter(PROBLEMS))
    stream = stream_over(judge)
    texts = [f"right {i}" if i % 3 else f"wrong {i}" for i in range(12)]
    for text in texts[:9]:
        stream.put(problem, encode(text))
        time.sleep(0.03)  # drawing
    assert sum(map(len, judge.batches)) >= 4
    found = stream.outcomes([problem] * 12, [encode(t) for t in texts])
    stream.close()
    assert found == [Outcome.PASS if i % 3 else Outcome.FAIL for i in range(12)]
    assert sorted(x for batch in judge.batches for x in batch) == sorted(texts)
    assert len(judge.threads) == 1 and threading.current_thread().name not in judge.threads


def test_a_step_owes_nothing_to_the_one_before() -> None:
    judge, problem = SlowJudge(0.0), next(iter(PROBLEMS))
    stream = stream_over(judge)
    for _ in range(2):
        stream.put(problem, encode("right"))
        assert stream.outcomes([problem], [encode("right")]) == [Outcome.PASS]
    assert stream.found == {} and len(judge.batches) == 2
    stream.close()


def test_a_judge_that_breaks_beside_the_drawing_stops_the_step() -> None:
    judge, problem = SlowJudge(0.0), next(iter(PROBLEMS))
    stream = stream_over(judge)
    stream.put(problem, encode("broken judge"))
    with pytest.raises(OSError, match="no room"):
        stream.outcomes([problem], [encode("broken judge")])
    stream.close()


def test_closing_leaves_what_waits_unjudged() -> None:
    judge, problem = SlowJudge(0.2), next(iter(PROBLEMS))
    stream = stream_over(judge)
    for i in range(50):
        stream.put(problem, encode(f"right {i}"))
    stream.close()
    assert len(judge.batches) <= 2
