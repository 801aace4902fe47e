"""What happens around a step, asked of the callbacks themselves: rewinding, stopping, and the quiet overflow."""

import json
import math
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import TrainerCallback, TrainerControl, TrainerState

from evaluation.files import read_jsonl, write_json, write_jsonl
from evaluation.manifests import Provenance, is_complete, write_manifest
from training.callbacks import drop_old_resumes, rewind
from training.folder import RunFolder
from training.guard import Guard
from training.started import newest_resume


@pytest.fixture
def folder(tmp_path: Path) -> RunFolder:
    return RunFolder(tmp_path)


def lines(*steps: int) -> list[dict[str, Any]]:
    return [{"global_step": s, "reward": s / 10} for s in steps]


def save(folder: RunFolder, step: int, whole: bool = True) -> None:
    write_json(folder.resume(step) / "cell_state.json", {"global_step": step})
    write_jsonl(folder.resume(step) / "steps.jsonl", lines(*range(1, step + 1)))
    write_manifest(folder.resume(step), "resume", Provenance(global_step=step))
    if not whole:
        (folder.resume(step) / "cell_state.json").write_text("")


def test_rewinding_takes_the_log_of_the_state_and_drops_what_came_later(folder: RunFolder) -> None:
    save(folder, 2)
    write_jsonl(folder.steps_jsonl, lines(1, 2, 3))
    with folder.steps_jsonl.open("a") as f:
        f.write('{"global_step": 4, "rew')
    folder.rollouts.mkdir()
    for step in (1, 2, 3, 11):
        folder.rollout(step).write_bytes(b"rows")
    left = [folder.root / "global_step_4.partial", folder.root / "resume" / "step_4.partial"]
    for path in left:
        (path / "deep").mkdir(parents=True)
    (folder.rollouts / "step_000004.parquet.partial").write_bytes(b"ro")
    rewind(folder, 2)
    assert read_jsonl(folder.steps_jsonl) == lines(1, 2)
    assert sorted(p.name for p in folder.rollouts.iterdir()) == ["step_000001.parquet", "step_000002.parquet"]
    assert not any(p.exists() for p in left)


def test_rewinding_to_the_start_leaves_an_empty_log(folder: RunFolder) -> None:
    rewind(folder, 0)
    assert folder.steps_jsonl.read_bytes() == b""
    write_jsonl(folder.steps_jsonl, lines(1, 2))
    rewind(folder, 0)
    assert folder.steps_jsonl.read_bytes() == b""


def test_a_log_lost_on_this_disk_comes_back_with_the_state(folder: RunFolder) -> None:
    save(folder, 30)
    rewind(folder, 30)
    assert read_jsonl(folder.steps_jsonl) == lines(*range(1, 31))


def test_the_newest_two_whole_states_stay_by_number_whatever_is_damaged(folder: RunFolder) -> None:
    """CHECKPOINT-089, CHECKPOINT-090, CHECKPOINT-095: 30 < 120; neither a damaged nor a later state counts."""
    for step in (30, 60, 90, 120):
        save(folder, step)
    save(folder, 100, whole=False)
    save(folder, 1000, whole=False)
    assert newest_resume(folder) == 120
    drop_old_resumes(folder, 120, 2)
    assert folder.resumes() == [90, 120, 1000]
    assert newest_resume(folder) == 120


def test_a_state_whose_bytes_have_changed_is_passed_over(folder: RunFolder, caplog: pytest.LogCaptureFixture) -> None:
    for step in (30, 60):
        save(folder, step)
    path = next(p for p in sorted(folder.resume(60).iterdir()) if p.name != "MANIFEST.json")
    path.write_bytes(bytes(path.stat().st_size))
    assert newest_resume(folder) == 30
    assert f"{path.name} has other bytes than its manifest says" in caplog.text


def test_a_state_under_the_name_of_another_step_is_passed_over(
    folder: RunFolder, caplog: pytest.LogCaptureFixture
) -> None:
    """Nor is it kept for one of the newest, or given to the store."""
    for step in (30, 60):
        save(folder, step)
    shutil.copytree(folder.resume(30), folder.resume(90))
    assert newest_resume(folder) == 60
    assert f"{folder.resume(90)} is passed over: it is of step 30 by its manifest" in caplog.text
    assert not is_complete(folder.resume(90))
    save(folder, 120)
    drop_old_resumes(folder, 120, 2)
    assert folder.resumes() == [60, 120]


def test_a_checkpoint_under_the_name_of_another_step_is_none(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    folder.checkpoint(30).mkdir()
    write_manifest(folder.checkpoint(30), "checkpoint", Provenance(global_step=30))
    assert is_complete(folder.checkpoint(30))
    folder.checkpoint(30).rename(folder.checkpoint(60))
    assert not is_complete(folder.checkpoint(60))
    folder.checkpoint(60).rename(tmp_path / "mine")  # a name that says nothing says nothing wrong
    assert is_complete(tmp_path / "mine")


def test_a_folder_without_a_manifest_is_passed_over_with_a_warning(
    folder: RunFolder, caplog: pytest.LogCaptureFixture
) -> None:
    """CHECKPOINT-095."""
    save(folder, 120)
    folder.resume(1000).mkdir()
    assert newest_resume(folder) == 120
    assert f"{folder.resume(1000)} is passed over: has no MANIFEST.json" in caplog.text


@pytest.mark.parametrize(("every", "due"), [(None, [4, 8]), (3, [3, 4, 6, 8]), (1, [1, 2, 3, 4, 5, 6, 7, 8])])
def test_states_are_saved_at_checkpoints_and_as_often_as_asked(every: int | None, due: list[int]) -> None:
    guard, saved = Guard((4, 8), every), []
    for step in range(1, 9):
        control = TrainerControl()
        guard.on_step_end(None, TrainerState(global_step=step), control)
        saved += [step] if control.should_save else []
    assert saved == due


class Inflate(TrainerCallback):
    """Scale the gradient so that its norm overflows while every number of it is finite."""

    def __init__(self, step: int) -> None:
        self.step = step

    def on_step_begin(self, args: Any, state: Any, control: Any, model: Any = None, **_: Any) -> None:
        if state.global_step + 1 == self.step:
            weight = next(p for p in model.parameters() if p.requires_grad)
            handle = weight.register_hook(lambda g: (handle.remove(), torch.full_like(g, 1e30))[1])


@pytest.fixture
def ended(make_run: Callable[..., RunFolder], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[RunFolder]:
    """A run whose gradient norm overflows at step 3."""
    import signal

    from training import run, trainer

    handlers = {s: signal.getsignal(s) for s in (signal.SIGTERM, signal.SIGINT)}

    class Faulty(trainer.CellTrainer):
        def __init__(self, *, callbacks: list[Any], **rest: Any) -> None:
            super().__init__(callbacks=[*callbacks, Inflate(3)], **rest)

    monkeypatch.setattr(trainer, "CellTrainer", Faulty)
    folder = make_run(tmp_path / "run")
    assert run.main([str(folder.root)]) == 0
    yield folder
    for number, handler in handlers.items():
        signal.signal(number, handler)


def test_a_norm_that_overflows_is_a_divergence_though_clipping_would_hide_it(ended: RunFolder) -> None:
    """Clipped by an infinite norm the gradient is zero, and the run would look as if it had gone on."""
    assert json.loads(ended.result_json.read_text())["onset_step"] == 3
    rows = read_jsonl(ended.steps_jsonl)
    assert [r["global_step"] for r in rows] == [1, 2, 3]
    assert rows[-1]["grad_norm"] == "Infinity"
    assert math.isfinite(rows[-1]["reward"])
    assert ended.checkpoints() == ended.resumes() == [2]
