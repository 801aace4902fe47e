"""The real TensorBoard, W&B (offline) and trackio, where they are installed: one curve a cell, also across a stop.

pip install -c requirements.lock -e '.[dev,watch]' && pytest tests/training/test_reporters.py
"""

import importlib.util
import json
import math
import os
import signal
import sqlite3
import struct
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from evaluation.files import write_json
from training.folder import CellFile, RunFolder
from training.reporters import run_id, wandb_run
from training.watching import flat

ROOT = Path(__file__).resolve().parents[2]
STEPS = 16
Make = Callable[..., RunFolder]


def needs(package: str) -> pytest.MarkDecorator:
    return pytest.mark.skipif(importlib.util.find_spec(package) is None, reason=f"{package} is not installed")


def train(folder: RunFolder, env: dict[str, str], stop_at: int | None = None) -> "subprocess.CompletedProcess[str]":
    """Train as the flow does; with `stop_at`, send SIGTERM once that resume state is there."""
    argv = [sys.executable, "-m", "training.run", str(folder.root)]
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("WANDB_", "TRACKIO_"))}
    whole = kept | {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"} | env
    with subprocess.Popen(
        argv, cwd=ROOT, env=whole, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        while stop_at is not None and process.poll() is None:
            if (folder.resume(stop_at) / "MANIFEST.json").is_file():
                process.send_signal(signal.SIGTERM)
                break
            time.sleep(0.01)
        out, err = process.communicate(timeout=240)
    return subprocess.CompletedProcess(argv, process.returncode, out, err)


def stopped_and_ended(make_run: Make, root: Path, reporter: str, env: dict[str, str]) -> RunFolder:
    runtime = {"report_to": [reporter], "experiment": "micro"}
    folder = make_run(root / "run", arm="hardcd_lam0p1", steps=STEPS, stride=2, runtime=runtime)
    first = train(folder, env, stop_at=2)
    assert first.returncode == 75, first.stderr[-2000:]
    second = train(folder, env)
    assert second.returncode == 0, second.stderr[-2000:]
    assert "going on from step" in second.stderr
    return folder


def lines(folder: RunFolder) -> list[dict[str, Any]]:
    return [json.loads(line) for line in folder.steps_jsonl.read_text().splitlines()]


def expected(folder: RunFolder) -> dict[int, dict[str, float]]:
    """What must have been told of each step, but for its seconds."""
    return {r["global_step"]: {k: v for k, v in flat(r).items() if k != "seconds"} for r in lines(folder)}


@needs("tensorboard")
def test_tensorboard_has_every_step_once(make_run: Make, tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    folder = stopped_and_ended(make_run, tmp_path, "tensorboard", {})
    assert sorted(p.name for p in folder.logs.iterdir()) == ["MANIFEST.json", "result.json", "steps.jsonl"]
    found = EventAccumulator(str(folder.tensorboard)).Reload()
    for key in ("reward", "grad_norm", "entropy", "varied_groups", "replay/drawn"):
        told = {e.step: e.value for e in found.Scalars(f"train/{key}")}
        assert told == pytest.approx({step: row[key] for step, row in expected(folder).items()}, rel=1e-6)
        assert len(found.Scalars(f"train/{key}")) == STEPS
    assert "train/learning_rate" in found.Tags()["scalars"]


def records(file: Path) -> Iterator[Any]:
    """Yield the records of a W&B file: LevelDB's log format after a header of seven bytes."""
    from wandb.proto.wandb_internal_pb2 import Record

    raw, at, parts = file.read_bytes(), 7, b""
    while at + 7 <= len(raw):
        if 32768 - at % 32768 < 7:
            at += 32768 - at % 32768
            continue
        _, size, kind = struct.unpack("<IHB", raw[at : at + 7])
        parts += raw[at + 7 : at + 7 + size]
        at += 7 + size
        if kind in (1, 4):  # whole, or the last part
            record = Record()
            record.ParseFromString(parts)
            parts = b""
            yield record


def history(file: Path) -> list[dict[str, Any]]:
    rows = [r.history.item for r in records(file) if r.HasField("history")]
    return [{"/".join(i.nested_key) or i.key: json.loads(i.value_json) for i in items} for items in rows]


@needs("wandb")
def test_wandb_has_one_run_with_the_curve_and_what_was_found(make_run: Make, tmp_path: Path) -> None:
    env = {"WANDB_MODE": "offline", "WANDB_PROJECT": "rl-ablation", "WANDB_CACHE_DIR": str(tmp_path / "cache")}
    folder = stopped_and_ended(make_run, tmp_path, "wandb", env)
    cell_file = CellFile.model_validate_json(folder.cell_json.read_bytes())
    entry = {
        "run": wandb_run(cell_file.identity, "micro"),
        "dir": str(folder.root),
        "done": str(folder.root / "wandb_told.json"),
        "steps": [{"train/global_step": s, "eval/toy_plus/pass@1": s / 100} for s in (0, 2, 4)],
        "summary": {"class": "stable", "onset_step": None, "why": "pass@1 rose", "signs": []},
    }
    write_json(tmp_path / "told.json", [entry])
    argv = [sys.executable, "-m", "training.wandb_results", str(tmp_path / "told.json")]
    subprocess.run(argv, cwd=ROOT, env=os.environ | env, check=True, capture_output=True, timeout=120)
    assert json.loads((folder.root / "wandb_told.json").read_text()) == entry

    files = sorted(folder.root.glob("wandb/offline-run-*/run-*.wandb"))
    assert len(files) == 3
    runs = [next(r.run for r in records(f) if r.HasField("run")) for f in files]
    assert {r.run_id for r in runs} == {run_id(cell_file.identity)}
    assert {r.run_group for r in runs} == {"micro"}
    assert {(r.project, r.display_name) for r in runs} == {("rl-ablation", cell_file.cell.name)}
    told = {row["train/global_step"]: row for f in files[:2] for row in history(f)}
    for step, row in expected(folder).items():
        mine = {k: _number(told[step][f"train/{k}"]) for k in row}
        assert mine == pytest.approx(row, nan_ok=True)
    assert "train/learning_rate" in told[1]
    assert [(r["train/global_step"], r["eval/toy_plus/pass@1"]) for r in history(files[2])] == [
        (0, 0.0), (2, 0.02), (4, 0.04),
    ]  # fmt: skip
    summary = {i.key: i.value_json for r in records(files[2]) if r.HasField("summary") for i in r.summary.update}
    assert json.loads(summary["class"]) == "stable"


def _number(value: object) -> float:
    return float(value) if isinstance(value, int | float | str) else math.nan


@needs("wandb")
def test_wandb_without_a_key_costs_its_curve_only(make_run: Make, tmp_path: Path) -> None:
    folder = make_run(tmp_path / "run", runtime={"report_to": ["wandb"]})
    done = train(folder, {"HOME": str(tmp_path), "WANDB_INIT_TIMEOUT": "5"})
    assert done.returncode == 0, done.stderr[-2000:]
    assert "wandb tells nothing more of this attempt: " in done.stderr
    assert folder.result_json.is_file()


@needs("wandb")
def test_wandb_out_of_reach_costs_its_curve_only(make_run: Make, tmp_path: Path) -> None:
    folder = make_run(tmp_path / "run", runtime={"report_to": ["wandb"]})
    away = {"WANDB_API_KEY": "0" * 40, "WANDB_BASE_URL": "http://127.0.0.1:9", "WANDB_INIT_TIMEOUT": "5"}
    done = train(folder, {"HOME": str(tmp_path)} | away)
    assert done.returncode == 0, done.stderr[-2000:]
    assert "wandb tells nothing more of this attempt: " in done.stderr
    assert folder.result_json.is_file()


@needs("trackio")
def test_trackio_has_one_run(make_run: Make, tmp_path: Path) -> None:
    env = {"TRACKIO_DIR": str(tmp_path / "trackio")}
    folder = stopped_and_ended(make_run, tmp_path, "trackio", env)
    cell_file = CellFile.model_validate_json(folder.cell_json.read_bytes())
    (file,) = (tmp_path / "trackio").glob("rl-ablation-micro*.db")
    with sqlite3.connect(file) as db:
        found = db.execute("select run_name, metrics from metrics order by id").fetchall()
    assert {name for name, _ in found} == {f"{cell_file.cell.name}-{run_id(cell_file.identity)}"}
    told = [json.loads(metrics) for _, metrics in found]
    by_step = {row["train/global_step"]: row for row in told if "train/reward" in row}
    for step, row in expected(folder).items():
        assert {k: _number(by_step[step][f"train/{k}"]) for k in row} == pytest.approx(row, nan_ok=True)
