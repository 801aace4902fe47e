"""Run directories of tiny cells: eight generated problems, the model shipped with the package."""

import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from evaluation.files import write_json, write_jsonl
from evaluation.manifests import Revisions
from evaluation.problems.toy import generate
from evaluation.prompts import resolve
from training.arms import ARMS, Replay
from training.cell import Cell
from training.folder import CellFile, RunFolder, Runtime
from training.grpo import Grpo

ROOT = Path(__file__).resolve().parents[2]
MODEL = ROOT / "training" / "toy_model"
TINY = Grpo(prompts_per_step=4, rollouts_per_prompt=4, max_new_tokens=48, compute_dtype="float32")
ENV = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}


@pytest.fixture(scope="session")
def make_run() -> Callable[..., RunFolder]:
    """`make_run(root, arm="nobuf", num_problems=8, runtime={}, **cell fields)`: write a run directory."""
    train = generate(0).train
    spec = resolve(MODEL, name="toy/1", rendering="plain")

    def make(
        root: Path, arm: str = "nobuf", num_problems: int = 8, runtime: dict[str, Any] | None = None, **changes: Any
    ) -> RunFolder:
        root.mkdir(parents=True, exist_ok=True)
        problems = root.parent / f"train{num_problems}.jsonl"
        write_jsonl(problems, train[:num_problems])
        small = {"draws": 8, "cooldown": 2, "max_reuse": 2}
        terms = tuple(t.replace(**small) if isinstance(t, Replay) else t for t in ARMS[arm].terms)
        fields = {"model": "toy", "benchmark": "toy", "lr": 1e-3, "steps": 6, "stride": 2, "grpo": TINY}
        cell = Cell(**{**fields, "arm": arm, "terms": terms, "mismatch": ARMS[arm].mismatch, **changes})
        revisions = Revisions(model="shipped", datasets={"toy": "0"})
        write_json(root / "cell.json", CellFile(cell=cell, prompt=spec, split_sha256="0" * 64, revisions=revisions))
        settings = {"model_path": str(MODEL), "problems_path": str(problems), "micro_batch": 8, **(runtime or {})}
        write_json(root / "runtime.json", Runtime(**settings))
        return RunFolder(root)

    return make


@pytest.fixture(scope="session")
def make_trainer() -> Callable[..., Any]:
    """`make_trainer(folder, judge)`: the trainer of a run directory, at its first step."""
    from evaluation.problems import read_problems
    from training.callbacks import StepLog
    from training.guard import Guard
    from training.run import load_policy, read_folder
    from training.trainer import CellTrainer

    def make(folder: RunFolder, judge: Any) -> CellTrainer:
        cell_file, runtime = read_folder(folder)
        model, tokenizer = load_policy(cell_file, runtime, None)
        log, guard = StepLog(folder, cell_file.cell.steps), Guard(cell_file.cell.checkpoints, None)
        trainer = CellTrainer(
            cell_file=cell_file,
            runtime=runtime,
            folder=folder,
            problems=read_problems(Path(runtime.problems_path)),
            judge=judge,
            model=model,
            tokenizer=tokenizer,
            callbacks=[log, guard],
        )
        log.trainer = guard.trainer = trainer
        return trainer

    return make


def command(root: Path) -> Sequence[str]:
    """Return the command that trains the cell in a run directory."""
    return [sys.executable, "-m", "training.run", str(root)]


@pytest.fixture(scope="session")
def start() -> Callable[[Path], "subprocess.Popen[str]"]:
    """`start(root)`: start training as a child that leads its own session; stderr is captured."""

    def go(root: Path) -> "subprocess.Popen[str]":
        return subprocess.Popen(
            command(root),
            cwd=ROOT,
            env=ENV,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )

    return go


@pytest.fixture(scope="session")
def train_to_end() -> Callable[..., "subprocess.CompletedProcess[str]"]:
    """`train_to_end(root)`: run the command and return what it said."""

    def go(root: Path, *flags: str, timeout: float = 240) -> "subprocess.CompletedProcess[str]":
        return subprocess.run(
            [*command(root), *flags], cwd=ROOT, env=ENV, capture_output=True, text=True, timeout=timeout, check=False
        )

    return go
