"""What happens around the steps: the log, the progress file, resume states, checkpoints, and noticing divergence."""

import json
import logging
import math
import shutil
import signal
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from transformers import TrainerCallback

from evaluation.files import PARTIAL, read_jsonl, write_json, write_jsonl
from evaluation.manifests import is_complete, write_manifest
from training.cell import MODELS, Identity
from training.exports import export_checkpoint
from training.folder import RunFolder

if TYPE_CHECKING:
    from training.trainer import CellTrainer

logger = logging.getLogger(__name__)


class Diverged(Exception):
    """A loss, gradient or weight stopped being finite at `step`."""

    def __init__(self, step: int, what: str) -> None:
        self.step, self.what = step, what
        super().__init__(f"{what} is not finite at step {step}")


def jsonable(value: float | None) -> float | str | None:
    """Return a number as strict JSON has it: non-finite ones as the strings `NaN`, `Infinity`, `-Infinity`."""
    if value is None or math.isfinite(value):
        return value
    return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"


class StepLog(TrainerCallback):
    """Appends a line a step to steps.jsonl, and keeps progress.json fresh for whoever watches."""

    def __init__(self, folder: RunFolder, steps: int) -> None:
        self.folder, self.steps = folder, steps
        self.trainer: CellTrainer | None = None
        self.started, self.first_step = time.monotonic(), 0

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Drop the lines of steps that will be taken again."""
        path = self.folder.steps_jsonl
        rows = [r for r in read_jsonl(path) if r["global_step"] <= state.global_step] if path.exists() else []
        write_jsonl(path, rows)
        self.started, self.first_step = time.monotonic(), state.global_step

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, Any] | None = None, **kwargs: Any) -> None:
        """Write the step's line; Trainer calls this with the gradient norm, before it saves."""
        if logs and "grad_norm" in logs:
            self.write(state.global_step, float(logs["grad_norm"]))

    def write(self, step: int, grad_norm: float) -> None:
        """Append one line and report progress."""
        assert self.trainer is not None
        row = self.trainer.row
        replay = row["replay"] and {k: jsonable(v) for k, v in row["replay"].items()}
        line = {
            "global_step": step,
            "reward": jsonable(row["reward"]),
            "loss": jsonable(row["loss"]),
            "grad_norm": jsonable(grad_norm),
            "entropy": jsonable(row["entropy"]),
            "mean_tokens": row["mean_tokens"],
            "truncated_fraction": row["truncated_fraction"],
            "replay": replay,
            "seconds": round(time.monotonic() - row["started"], 3),
        }
        with self.folder.steps_jsonl.open("a", encoding="utf-8") as f:
            f.write(json.dumps(line, allow_nan=False) + "\n")
        pace = (time.monotonic() - self.started) / max(1, step - self.first_step)
        left = pace * (self.steps - step)
        write_json(
            self.folder.root / "progress.json",
            {"step": step, "steps": self.steps, "reward": line["reward"], "seconds_left": round(left, 1)},
        )
        logger.info(
            "step %d of %d: reward %.3f, grad norm %s, %.0f s left",
            step,
            self.steps,
            row["reward"],
            line["grad_norm"],
            left,
        )


class Guard(TrainerCallback):
    """Stops the cell at the first non-finite number, and at SIGTERM after saving."""

    def __init__(self, checkpoints: tuple[int, ...], resume_every: int | None) -> None:
        self.checkpoints, self.resume_every = frozenset(checkpoints), resume_every
        self.trainer: CellTrainer | None = None
        self.stopped = False

    def install(self) -> None:
        """Take SIGTERM: the step in progress is finished and saved."""
        signal.signal(signal.SIGTERM, self._on_signal)
        signal.signal(signal.SIGINT, self._on_signal)

    def _on_signal(self, *_: object) -> None:
        self.stopped = True

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        """Look at loss and gradient before the weights change."""
        assert self.trainer is not None
        step = state.global_step + 1
        if not math.isfinite(self.trainer.row["loss"]):
            raise Diverged(step, "loss")
        if not all(bool(torch.isfinite(p.grad).all()) for p in model.parameters() if p.grad is not None):
            raise Diverged(step, "gradient")

    def on_step_end(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        """Look at the weights; ask for a save where one is due."""
        step = state.global_step
        if not all(bool(torch.isfinite(p).all()) for p in model.parameters()):
            raise Diverged(step, "weight")
        due = step in self.checkpoints or (self.resume_every is not None and step % self.resume_every == 0)
        control.should_save = due or self.stopped
        control.should_training_stop = control.should_training_stop or self.stopped


def save_resume(trainer: "CellTrainer", save_trainer_state: Callable[[], None]) -> None:
    """Write `resume/step_N`, then `global_step_N` if it is a checkpoint; each whole or absent, in this order."""
    folder, step = trainer.folder, trainer.state.global_step
    final = folder.resume(step)
    scratch = final.with_name(final.name + PARTIAL)
    shutil.rmtree(scratch, ignore_errors=True)
    scratch.mkdir(parents=True)
    trainer.args.output_dir = str(scratch)
    save_trainer_state()
    inner = scratch / f"checkpoint-{step}"
    write_json(
        inner / "cell_state.json",
        {
            "schema": "cell_state/1",
            "global_step": step,
            "replay": trainer.buffer.state() if trainer.buffer is not None else None,
        },
    )
    shutil.copyfile(folder.steps_jsonl, inner / "steps.jsonl")
    write_manifest(inner, "resume", identity_of(trainer).provenance(trainer.cell.name, step))
    shutil.rmtree(final, ignore_errors=True)
    inner.rename(final)
    shutil.rmtree(scratch)
    if step in trainer.cell.checkpoints:
        publish_ready(trainer.model, trainer.processing_class, trainer, step)
    past = [s for s in folder.resumes() if s <= step]  # a later one is damaged: it would have been gone on from
    kept = [s for s in past if is_complete(folder.resume(s))][-trainer.runtime.keep_resume :]
    for old in sorted({*past} - {*kept}):
        shutil.rmtree(folder.resume(old))


def publish_ready(model: Any, tokenizer: Any, owner: Any, step: int) -> None:
    """Write `global_step_N` unless it is there; `owner` has cell, spec, folder and identity."""
    out = owner.folder.checkpoint(step)
    if is_complete(out):
        return
    inner = owner.accelerator.unwrap_model(model) if hasattr(owner, "accelerator") else model
    export_checkpoint(
        inner,
        tokenizer,
        out,
        dtype=MODELS[owner.cell.model].published_dtype,
        stop_ids=owner.spec.stop_ids,
        provenance=identity_of(owner).provenance(owner.cell.name, step),
    )


def identity_of(owner: Any) -> Identity:
    """Return the identity that the owner's folder belongs to."""
    from training.folder import CellFile

    text = owner.folder.cell_json.read_text(encoding="utf-8")
    return CellFile.model_validate_json(text).identity
