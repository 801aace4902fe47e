"""A killed run goes on to the very same weights, rollouts and log; every process here is a real one."""

import contextlib
import hashlib
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pandas as pd
import pytest

from evaluation.files import PARTIAL
from evaluation.manifests import MANIFEST, is_complete, read_manifest
from training.folder import RunFolder

ROOT = Path(__file__).resolve().parents[2]
ARM = "hardcd_lam0p1"
LORA = {"arm": ARM, "lora_rank": 4, "lr": 5e-3}
END_S = 240
Start = Callable[[Path], "subprocess.Popen[str]"]
Train = Callable[..., "subprocess.CompletedProcess[str]"]


def weights(folder: RunFolder) -> dict[str, str]:
    return {
        p.relative_to(folder.root).as_posix(): hashlib.sha256(p.read_bytes()).hexdigest()
        for p in sorted(folder.root.glob("global_step_*/*.safetensors"))
    }


def steps(folder: RunFolder) -> list[dict[str, Any]]:
    rows = [json.loads(line) for line in folder.steps_jsonl.read_text().splitlines()]
    return [{k: v for k, v in row.items() if k != "seconds"} for row in rows]


def rollouts(folder: RunFolder) -> dict[str, pd.DataFrame]:
    return {p.name: pd.read_parquet(p) for p in sorted(folder.rollouts.glob("*.parquet"))}


def same(found: RunFolder, expected: RunFolder, first_rollout: int = 1) -> None:
    assert steps(found) == steps(expected)
    assert weights(found) == weights(expected)
    mine, theirs = rollouts(found), rollouts(expected)
    assert list(mine) == list(theirs)[first_rollout - 1 :]
    for name, table in mine.items():
        pd.testing.assert_frame_equal(table, theirs[name])
    for part in (found.logs, found.rollouts, *(found.checkpoint(s) for s in found.checkpoints())):
        assert is_complete(part)
    assert not list(found.root.rglob("*" + PARTIAL))


class Missed(AssertionError):
    """The child ended before the file was seen."""


def wait_and_send(child: "subprocess.Popen[str]", path: Path, what: signal.Signals, group: bool = True) -> int:
    """Send a signal as soon as `path` is there; return the exit code."""
    try:
        end = time.monotonic() + END_S
        while not path.exists():
            if child.poll() is not None:
                raise Missed(f"ended before {path.name} was seen: {child.communicate()[1][-2000:]}")
            assert time.monotonic() < end, f"{path.name} never came"
            time.sleep(0.001)
        with contextlib.suppress(ProcessLookupError):
            (os.killpg if group else os.kill)(child.pid, what)
        child.communicate(timeout=END_S)
    finally:
        if child.poll() is None:
            os.killpg(child.pid, signal.SIGKILL)
            child.communicate()
    return child.returncode


def session(leader: int) -> list[int]:
    """Return the living processes of the session that `leader` started."""
    alive = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = stat.read_text().rpartition(")")[2].split()
        except OSError:
            continue
        if int(fields[3]) == leader and fields[0] != "Z":
            alive.append(int(stat.parent.name))
    return alive


def stamps(folder: Path) -> dict[str, tuple[int, int]]:
    return {p.name: (p.stat().st_ino, p.stat().st_mtime_ns) for p in folder.iterdir()}


@pytest.fixture(scope="module")
def uninterrupted(
    make_run: Callable[..., RunFolder], train_to_end: Train, tmp_path_factory: pytest.TempPathFactory
) -> RunFolder:
    """A run that nothing disturbed: 6 steps, 2 an epoch, with replay."""
    folder = make_run(tmp_path_factory.mktemp("whole") / "run", arm=ARM)
    done = train_to_end(folder.root)
    assert done.returncode == 0, done.stderr
    return folder


@pytest.fixture(scope="module")
def uninterrupted_lora(
    make_run: Callable[..., RunFolder], train_to_end: Train, tmp_path_factory: pytest.TempPathFactory
) -> RunFolder:
    """The same with adapters of rank 4."""
    folder = make_run(tmp_path_factory.mktemp("whole_lora") / "run", **LORA)
    done = train_to_end(folder.root)
    assert done.returncode == 0, done.stderr
    return folder


def plant_damage(folder: RunFolder) -> None:
    """What kills, full disks and lost files leave behind, with numbers that a careless reader would prefer."""
    good = folder.resume(2)
    shutil.copytree(good, folder.resume(6).with_name("step_6" + PARTIAL))
    shutil.copytree(good, folder.resume(4))
    (folder.resume(4) / MANIFEST).unlink()
    shutil.copytree(good, folder.resume(5))
    (folder.resume(5) / "optimizer.pt").write_bytes(b"")
    folder.checkpoint(4).mkdir()
    (folder.checkpoint(4) / "config.json").write_text("{}")
    (folder.root / ("global_step_6" + PARTIAL)).mkdir()
    with folder.steps_jsonl.open("a") as f:
        f.write('{"global_step": 3, "rew')


def test_the_run_to_compare_with_is_whole_and_not_trivial(uninterrupted: RunFolder) -> None:
    same(uninterrupted, uninterrupted)
    rows = steps(uninterrupted)
    assert [r["global_step"] for r in rows] == [1, 2, 3, 4, 5, 6]
    assert sum(r["replay"]["drawn"] for r in rows) > 8
    assert all(r["grad_norm"] > 0 for r in rows)
    assert len(set(weights(uninterrupted).values())) == 3
    assert uninterrupted.resumes() == [4, 6]
    assert json.loads(uninterrupted.result_json.read_text()) == {
        "schema": "result/1",
        "end": "finished",
        "last_step": 6,
        "onset_step": None,
        "signs": [],
    }
    tables = list(rollouts(uninterrupted).values())
    pairs = zip(tables[::2], tables[1::2], strict=True)
    orders = [tuple(dict.fromkeys([*a["problem_id"], *b["problem_id"]])) for a, b in pairs]
    assert [len(o) for o in orders] == [8, 8, 8]
    assert len(set(orders)) == 3  # the epochs differ, so a resume that lost its epoch would show


def kill_while_saving_among_damage(folder: RunFolder, start: Start, train_to_end: Train) -> None:
    """Plant damaged folders, kill while the state of step 4 is written, and go on to the end."""
    plant_damage(folder)
    saving = folder.resume(4).with_name("step_4" + PARTIAL) / "checkpoint-4" / "optimizer.pt"
    assert wait_and_send(start(folder.root), saving, signal.SIGKILL) == -signal.SIGKILL
    done = train_to_end(folder.root)
    assert done.returncode == 0, done.stderr
    assert "going on from step" in done.stderr


def test_killed_twice_among_damaged_folders_it_ends_with_the_same_bytes(
    make_run: Callable[..., RunFolder], start: Start, train_to_end: Train, uninterrupted: RunFolder, tmp_path: Path
) -> None:
    folder = make_run(tmp_path / "run", arm=ARM)
    child = start(folder.root)
    assert wait_and_send(child, folder.rollout(3), signal.SIGKILL, group=False) == -signal.SIGKILL
    end = time.monotonic() + 10
    while session(child.pid) and time.monotonic() < end:
        time.sleep(0.05)
    assert session(child.pid) == []  # the judge's processes went with it
    assert folder.checkpoints() == folder.resumes() == [2]
    published = stamps(folder.checkpoint(2))
    kill_while_saving_among_damage(folder, start, train_to_end)
    same(folder, uninterrupted)
    assert stamps(folder.checkpoint(2)) == published
    assert folder.resumes() == [4, 6]


def test_sigterm_saves_every_whole_step_and_another_machine_goes_on_from_the_resume_state_alone(
    make_run: Callable[..., RunFolder], start: Start, train_to_end: Train, uninterrupted: RunFolder, tmp_path: Path
) -> None:
    """The signal goes to the whole group, as a launcher sends it."""
    folder = make_run(tmp_path / "run", arm=ARM)
    child = start(folder.root)
    assert wait_and_send(child, folder.rollout(3), signal.SIGTERM) == 75
    reached = max(folder.resumes())
    assert reached in {2, 3}  # step 3 is left in the middle, or was over
    assert not folder.result_json.exists()
    assert steps(folder) == steps(uninterrupted)[:reached]
    other = RunFolder(tmp_path / "other" / "run")
    other.root.mkdir(parents=True)
    for name in ("cell.json", "runtime.json"):
        shutil.copy(folder.root / name, other.root / name)
    shutil.copytree(folder.resume(reached), other.resume(reached))
    done = train_to_end(other.root)
    assert done.returncode == 0, done.stderr
    for step in folder.checkpoints():
        if not other.checkpoint(step).exists():
            shutil.copytree(folder.checkpoint(step), other.checkpoint(step))
    same(other, uninterrupted, first_rollout=reached + 1)


@pytest.mark.campaign
def test_a_lora_cell_killed_twice_ends_with_the_same_bytes_from_small_resume_states(
    make_run: Callable[..., RunFolder], start: Start, train_to_end: Train, uninterrupted_lora: RunFolder, tmp_path: Path
) -> None:
    """Killed in the second epoch, then among damaged folders while a state is written."""
    assert sum(r["replay"]["drawn"] for r in steps(uninterrupted_lora)) > 8
    assert len(set(weights(uninterrupted_lora).values())) == 3
    folder = make_run(tmp_path / "run", **LORA)
    assert wait_and_send(start(folder.root), folder.rollout(3), signal.SIGKILL) == -signal.SIGKILL
    assert folder.checkpoints() == folder.resumes() == [2]
    kill_while_saving_among_damage(folder, start, train_to_end)
    same(folder, uninterrupted_lora)
    state = folder.resume(6)
    assert (state / "adapter_model.safetensors").is_file()
    assert not (state / "model.safetensors").exists()
    held = sum(f.stat().st_size for f in state.glob("*.safetensors")) + (state / "optimizer.pt").stat().st_size
    assert held < (folder.checkpoint(6) / "model.safetensors").stat().st_size / 4


def test_a_lora_checkpoint_is_made_from_its_resume_state_when_the_kill_came_between_them(
    uninterrupted_lora: RunFolder, train_to_end: Train, tmp_path: Path
) -> None:
    folder = RunFolder(tmp_path / "run")
    shutil.copytree(uninterrupted_lora.root, folder.root)
    shutil.rmtree(folder.checkpoint(6))
    folder.result_json.unlink()
    for sealed in (folder.logs, folder.rollouts):
        (sealed / MANIFEST).unlink()
    done = train_to_end(folder.root)
    assert done.returncode == 0, done.stderr
    same(folder, uninterrupted_lora)


def test_a_lora_folder_is_not_gone_on_with_as_a_cell_of_another_rank(
    uninterrupted_lora: RunFolder, train_to_end: Train, tmp_path: Path
) -> None:
    other = tmp_path / "run"
    shutil.copytree(uninterrupted_lora.root / "resume", other / "resume")
    shutil.copy(uninterrupted_lora.root / "runtime.json", other / "runtime.json")
    cell = json.loads((uninterrupted_lora.root / "cell.json").read_text())
    cell["cell"]["lora_rank"] = None
    cell["cell"]["lora_alpha"] = None
    (other / "cell.json").write_text(json.dumps(cell))
    done = train_to_end(other, timeout=60)
    assert done.returncode == 2
    assert "cell_config.lora_rank: None -> 4" in done.stderr


def test_an_ended_cell_is_left_alone_at_once_and_without_torch(uninterrupted: RunFolder) -> None:
    before = {p: p.stat().st_mtime_ns for p in uninterrupted.root.rglob("*")}
    code = "import sys; from training.run import main; c = main([sys.argv[1]]); print(c, 'torch' in sys.modules)"
    began = time.monotonic()
    done = subprocess.run(
        [sys.executable, "-c", code, str(uninterrupted.root)], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert done.stdout == "0 False\n"
    assert time.monotonic() - began < 15  # about one second on an idle machine
    assert {p: p.stat().st_mtime_ns for p in uninterrupted.root.rglob("*")} == before


@pytest.mark.parametrize("kept", ["resume", "global_step_6", "logs"])
def test_a_folder_of_another_configuration_is_refused_with_the_difference(
    uninterrupted: RunFolder, train_to_end: Train, tmp_path: Path, kept: str
) -> None:
    """Whatever part of the other run is left."""
    other = tmp_path / "run"
    shutil.copytree(uninterrupted.root / kept, other / kept)
    shutil.copy(uninterrupted.root / "runtime.json", other / "runtime.json")
    cell = json.loads((uninterrupted.root / "cell.json").read_text())
    cell["cell"]["seed"] = 7
    (other / "cell.json").write_text(json.dumps(cell))
    done = train_to_end(other, timeout=60)
    assert done.returncode == 2
    assert "cell_config.seed: 7 -> 0" in done.stderr
    assert "Traceback" not in done.stderr


def test_a_folder_of_another_configuration_is_refused_before_its_first_resume_state_too(
    make_run: Callable[..., RunFolder], start: Start, train_to_end: Train, tmp_path: Path
) -> None:
    """And what the other run has left is left alone."""
    folder = make_run(tmp_path / "run", arm=ARM)
    assert wait_and_send(start(folder.root), folder.rollout(1), signal.SIGKILL) == -signal.SIGKILL
    assert folder.resumes() == []
    cell = json.loads(folder.cell_json.read_text())
    cell["cell"]["seed"] = 7
    folder.cell_json.write_text(json.dumps(cell))
    before = {p: p.stat().st_mtime_ns for p in folder.root.rglob("*")}
    done = train_to_end(folder.root)
    assert done.returncode == 2
    assert "cell_config.seed: 7 -> 0" in done.stderr
    assert {p: p.stat().st_mtime_ns for p in folder.root.rglob("*")} == before


def test_what_is_never_hashed_may_change_between_starts(uninterrupted: RunFolder) -> None:
    """Manifests carry the identity, not where it ran."""
    found = read_manifest(uninterrupted.checkpoint(6))
    assert found is not None
    assert str(uninterrupted.root) not in found.model_dump_json()


@pytest.mark.campaign
@pytest.mark.parametrize(
    "moment",
    [
        "logs/steps.jsonl",
        "rollouts/step_000001.parquet",
        "rollouts/step_000002.parquet.partial",
        "resume/step_2.partial",
        "resume/step_2.partial/checkpoint-2/model.safetensors",
        "resume/step_2.partial/checkpoint-2/MANIFEST.json",
        "resume/step_2",
        "global_step_2.partial",
        "global_step_2.partial/MANIFEST.json",
        "global_step_2",
        "rollouts/step_000005.parquet",
        "global_step_6.partial",
        "global_step_6",
        "logs/result.json",
    ],
)
def test_killed_at_any_moment_it_ends_with_the_same_bytes(
    make_run: Callable[..., RunFolder],
    start: Start,
    train_to_end: Train,
    uninterrupted: RunFolder,
    tmp_path: Path,
    moment: str,
) -> None:
    """CHECKPOINT-096, while saving; CHECKPOINT-100, CHECKPOINT-101, at an epoch's end: two steps are one."""
    folder = make_run(tmp_path / "run", arm=ARM)
    try:
        code = wait_and_send(start(folder.root), folder.root / moment, signal.SIGKILL)
    except Missed:
        assert steps(folder) == steps(uninterrupted)
        pytest.skip(f"{moment} came and went unseen")
    assert code in {-signal.SIGKILL, 0}  # 0: the last file appears just before the end
    done = train_to_end(folder.root)
    assert done.returncode == 0, done.stderr
    same(folder, uninterrupted)


@pytest.mark.campaign
@pytest.mark.parametrize("number", range(20))
def test_killed_at_random_moments_it_ends_with_the_same_bytes(
    make_run: Callable[..., RunFolder],
    start: Start,
    train_to_end: Train,
    uninterrupted: RunFolder,
    uninterrupted_lora: RunFolder,
    tmp_path: Path,
    number: int,
) -> None:
    """One to three kills, each within the time that stepping and saving take; even numbers full, odd ones LoRA."""
    rng, lora = random.Random(number), number % 2 == 1
    expected = uninterrupted_lora if lora else uninterrupted
    folder = make_run(tmp_path / "run", runtime={"resume_every": 1}, **(LORA if lora else {"arm": ARM}))
    stepping_s = 1.5 * sum(json.loads(line)["seconds"] for line in expected.steps_jsonl.read_text().splitlines())
    reached = []
    for _ in range(rng.randint(1, 3)):
        if folder.result_json.exists():
            break
        child = start(folder.root)
        try:
            end = time.monotonic() + END_S
            before = folder.steps_jsonl.stat().st_mtime_ns if folder.steps_jsonl.exists() else None
            while not folder.steps_jsonl.exists() or folder.steps_jsonl.stat().st_mtime_ns == before:
                assert child.poll() is None, child.communicate()[1][-2000:]
                assert time.monotonic() < end
                time.sleep(0.002)
            time.sleep(rng.uniform(0, stepping_s))
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(child.pid, signal.SIGKILL)
            child.communicate(timeout=END_S)
        reached.append(len(steps(folder)) if not folder.result_json.exists() else 6)
    print(f"killed after steps {reached}")
    done = train_to_end(folder.root)
    assert done.returncode == 0, done.stderr
    same(folder, expected)
