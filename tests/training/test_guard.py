"""Stopping: between steps and within them, by a signal or by the clock; whole steps are never lost."""

import json
import signal
import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
from transformers import TrainerControl, TrainerState

from evaluation.errors import Stopped
from training import guard as guard_module
from training.folder import RunFolder
from training.guard import Guard

Make = Callable[..., RunFolder]


def guard_at(step: int, end_by: float | None = None) -> Guard:
    guard = Guard((4, 8), None, end_by)
    guard.trainer = SimpleNamespace(cell=SimpleNamespace(steps=8), state=TrainerState(global_step=step))  # type: ignore[assignment]
    return guard


def begin(guard: Guard) -> None:
    assert guard.trainer is not None
    guard.on_step_begin(None, guard.trainer.state, TrainerControl())


def test_a_signal_stops_before_the_next_step_and_wherever_a_step_may_be_left() -> None:
    guard = guard_at(5)
    begin(guard)
    guard.break_off()
    guard._on_signal()
    for stop in (guard.break_off, lambda: begin(guard)):
        with pytest.raises(Stopped, match="signal=TERM: stopped after step 5 of 8; run the same command again"):
            stop()


def test_a_step_that_would_not_fit_in_what_is_left_is_not_begun(monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps of 10 s and one of 30 s, saving included; MARGIN of the longest must be left."""
    now = 1000.0
    monkeypatch.setattr(guard_module, "time", SimpleNamespace(time=lambda: now))
    guard = guard_at(3, end_by=1110.0)
    for now in (1000.0, 1010.0, 1040.0, 1050.0):  # noqa: B007  the clock reads it
        begin(guard)
    now = 1050.1
    with pytest.raises(Stopped, match="end_by=reached: stopped after step 3 of 8"):
        begin(guard)


class Interrupt:
    """Sends this process a signal the n-th time that a row of some step ends."""

    def __init__(self, step: int, row: int) -> None:
        self.step, self.left = step, row

    def __call__(self, trainer: Any) -> None:
        if trainer.state.global_step == self.step:
            self.left -= 1
            if self.left == 0:
                signal.raise_signal(signal.SIGTERM)


@pytest.mark.parametrize("place", ["sampling", pytest.param("between micro-batches", marks=pytest.mark.campaign)])
def test_within_a_step_it_stops_at_once_with_every_whole_step_saved(
    make_run: Make, train_to_end: Callable[..., Any], monkeypatch: pytest.MonkeyPatch, tmp_path: Any, place: str
) -> None:
    """Step 4 is left in the middle; 3 steps are saved, although no state was due, and the run goes on to the same."""
    from training.run import main
    from training.trainer import CellTrainer

    whole = make_run(tmp_path / "whole", arm="hardcd_lam0p1", steps=5, stride=4)
    assert train_to_end(whole.root).returncode == 0
    folder = make_run(tmp_path / "run", arm="hardcd_lam0p1", steps=5, stride=4)
    interrupt, reached = Interrupt(3, 3), []

    if place == "sampling":
        put = guard_module.Guard.break_off

        def break_off(self: Guard) -> None:
            interrupt(self.trainer)
            put(self)

        monkeypatch.setattr(guard_module.Guard, "break_off", break_off)
    else:
        step = CellTrainer.training_step

        def training_step(self: CellTrainer, *args: Any, **kwargs: Any) -> Any:
            if self.state.global_step == 3 and self.row.get("loss"):
                signal.raise_signal(signal.SIGTERM)
                reached.append(1)
            return step(self, *args, **kwargs)

        monkeypatch.setattr(CellTrainer, "training_step", training_step)
    handlers = {s: signal.getsignal(s) for s in (signal.SIGTERM, signal.SIGINT)}
    try:
        assert main([str(folder.root)]) == 75
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
    assert reached == ([] if place == "sampling" else [1])
    assert folder.resumes() == [3]
    assert [json.loads(x)["global_step"] for x in folder.steps_jsonl.read_text().splitlines()] == [1, 2, 3]
    done = train_to_end(folder.root)
    assert done.returncode == 0, done.stderr
    for step_number in (4, 5):
        ours, theirs = (f.checkpoint(step_number) / "model.safetensors" for f in (folder, whole))
        assert ours.read_bytes() == theirs.read_bytes()

    def lines(found: RunFolder) -> list[dict[str, Any]]:
        return [{**json.loads(x), "seconds": 0} for x in found.steps_jsonl.read_text().splitlines()]

    assert lines(folder) == lines(whole)


def test_a_cell_whose_time_is_up_ends_with_75_and_goes_on_later(
    make_run: Make, train_to_end: Callable[..., Any], tmp_path: Any
) -> None:
    folder = make_run(tmp_path / "run", runtime={"end_by": time.time() - 1})
    done = train_to_end(folder.root)
    assert done.returncode == 75
    told = done.stderr.splitlines()[-1]
    assert told == "error: end_by=reached: stopped after step 0 of 6; with time left, the same command goes on"
    make_run(tmp_path / "run", runtime={"end_by": time.time() + 3600})
    assert train_to_end(folder.root).returncode == 0
