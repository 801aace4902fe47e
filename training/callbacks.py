"""What happens around the steps: the log, the progress file, resume states, checkpoints, and noticing divergence.

Within a step Trainer calls, in this order: step begin, (sampling, loss, gradient), before the optimizer, step end,
log, save. So nothing that has diverged is ever saved, and a line is in the log before the state that contains it.
"""

import json
import logging
import math
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from transformers import TrainerCallback

from evaluation.files import PARTIAL, read_jsonl, write_json, write_jsonl
from evaluation.manifests import is_complete, write_manifest
from evaluation.program import naming
from training.cell import MODELS
from training.exports import export_checkpoint
from training.folder import CellFile, RunFolder
from training.signs import Sign, find_signs
from training.throughput import gpu_figures

if TYPE_CHECKING:
    from training.trainer import CellTrainer
    from training.watching import Watchers

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
    """Appends a line a step to steps.jsonl, and tells whoever watches: progress.json, the program's log, reporters."""

    def __init__(self, folder: RunFolder, steps: int) -> None:
        self.folder, self.steps = folder, steps
        self.trainer: CellTrainer | None = None
        self.watchers: Watchers | None = None
        self.started, self.first_step = time.monotonic(), 0
        self.rows: list[dict[str, Any]] = []
        self.signs: set[str] = set()
        """Names of those told."""

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Drop what later steps left, for they will be taken again."""
        assert self.trainer is not None
        self.trainer.processes.on_main(lambda: rewind(self.folder, state.global_step))
        self.started, self.first_step = time.monotonic(), state.global_step
        self.rows = read_jsonl(self.folder.steps_jsonl)
        self.signs = {s.name for s in self._find_signs()}

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, Any] | None = None, **kwargs: Any) -> None:
        """Write the step's line.

        Raises:
            Diverged: the gradient's norm is not finite. Also where each number of the gradient was: clipping by an
                overflowing norm makes the gradient zero, and the run would go on as if nothing had been.
        """
        if logs and "grad_norm" in logs:
            grad_norm = float(logs["grad_norm"])
            self.write(state.global_step, grad_norm, logs)
            if not math.isfinite(grad_norm):
                raise Diverged(state.global_step, "gradient norm")

    def write(self, step: int, grad_norm: float, logs: dict[str, Any] | None = None) -> None:
        """Append one line and tell it; of a step that broke off in sampling every number is NaN.

        Args:
            step: the step, from 1.
            grad_norm: of the whole gradient, before clipping.
            logs: what TRL has to say of the step, for the reporters.
        """
        assert self.trainer is not None
        self.trainer.processes.on_main(lambda: self._write(self._line(step, grad_norm), logs or {}))

    def _write(self, line: dict[str, Any], logs: dict[str, Any]) -> None:
        append_line(self.folder, line)
        self.rows.append(line)
        pace = (time.monotonic() - self.started) / max(1, line["global_step"] - self.first_step)
        tell_progress(self.folder, line, self.steps, pace)
        for sign in self._find_signs():
            if sign.name not in self.signs:
                self.signs.add(sign.name)
                logger.warning("sign: %s from step %d (%s)", sign.name, sign.onset_step, sign.detail)
        if self.watchers is not None:
            self.watchers.tell(line, logs)

    def _line(self, step: int, grad_norm: float) -> dict[str, Any]:
        assert self.trainer is not None
        seconds = time.monotonic() - self.trainer.row["started"]
        line = line_of(step, self.trainer.row, grad_norm, seconds)
        if self.trainer.accelerator.device.type == "cuda":
            line["gpu"] = gpu_figures(self.trainer, seconds)
        return line

    def _find_signs(self) -> tuple[Sign, ...]:
        assert self.trainer is not None
        return find_signs(self.rows, self.trainer.cell.grpo.max_new_tokens)


def line_of(step: int, row: dict[str, Any], grad_norm: float | None, seconds: float) -> dict[str, Any]:
    """Return a step's line of steps.jsonl; what `row` does not have is NaN."""
    replay = row.get("replay")
    line: dict[str, Any] = {"global_step": step}
    line |= {k: jsonable(row.get(k, math.nan)) for k in ("reward", "loss")}
    line |= {"grad_norm": jsonable(grad_norm)}
    of_rollouts = ("entropy", "mean_tokens", "truncated_fraction", "varied_groups")
    line |= {k: jsonable(row.get(k, math.nan)) for k in of_rollouts}
    line |= {"replay": replay and {k: jsonable(v) for k, v in replay.items()}, "seconds": round(seconds, 3)}
    if "sampler" in row:
        line["sampler"] = {k: jsonable(v) for k, v in row["sampler"].items()}
    return line


def append_line(folder: RunFolder, line: dict[str, Any]) -> None:
    """Add a line to steps.jsonl."""
    with naming(folder.steps_jsonl), folder.steps_jsonl.open("a", encoding="utf-8") as f:
        f.write(json.dumps(line, allow_nan=False) + "\n")


def tell_progress(folder: RunFolder, line: dict[str, Any], steps: int, pace_s: float) -> None:
    """Tell the program's log and progress.json how far a cell of `steps` steps is; `pace_s` is what a step takes."""
    step, reward, grad_norm = line["global_step"], line["reward"], line["grad_norm"]
    left = pace_s * (steps - step)
    said = {"step": step, "steps": steps, "reward": reward, "grad_norm": grad_norm}
    write_json(folder.root / "progress.json", said | {"seconds_left": round(left, 1)})
    norm = "not told" if grad_norm is None else f"{float(grad_norm):.3g}"
    logger.info("step %d of %d: reward %.3f, grad norm %s, %.0f s left", step, steps, float(reward), norm, left)


def rewind(folder: RunFolder, step: int) -> None:
    """Make log and rollouts those of the first `step` steps, and remove what a kill left half-written.

    The lines are the resume state's own; those of later steps, and later rollouts, will be written again.
    """
    saved = folder.resume(step) / "steps.jsonl"
    source = saved if saved.is_file() else folder.steps_jsonl
    rows = read_jsonl(source) if source.is_file() else []
    write_jsonl(folder.steps_jsonl, (r for r in rows if r["global_step"] <= step))
    for path in folder.rollouts.glob("step_*.parquet"):
        number = path.stem.removeprefix("step_")
        if number.isdecimal() and int(number) > step:
            path.unlink()
    remove_partials(folder)


def remove_partials(folder: RunFolder) -> None:
    """Remove everything half-written of a cell that nobody else is training."""
    for parent in (folder.root, folder.root / "resume", folder.logs, folder.rollouts):
        for path in parent.glob(f"*{PARTIAL}"):
            shutil.rmtree(path) if path.is_dir() else path.unlink()


def save_resume(trainer: "CellTrainer", save_trainer_state: Callable[[], None]) -> None:
    """Write `resume/step_N`, then `global_step_N` if it is a checkpoint; each whole or absent, in this order.

    Of several processes each leaves its random state in Trainer's folder; the main one does everything else.
    """
    final = trainer.folder.resume(trainer.state.global_step)
    scratch = final.with_name(final.name + PARTIAL)

    def clear() -> None:
        shutil.rmtree(scratch, ignore_errors=True)
        scratch.mkdir(parents=True)

    trainer.processes.on_main(clear)
    trainer.args.output_dir = str(scratch)
    with naming(final):
        trainer.processes.together(save_trainer_state)
        trainer.processes.on_main(lambda: _complete(trainer, scratch, final))


def _complete(trainer: "CellTrainer", scratch: Path, final: Path) -> None:
    """Add to Trainer's folder what it does not save, put it in its place, and make the checkpoint."""
    folder, step = trainer.folder, trainer.state.global_step
    inner = scratch / f"checkpoint-{step}"
    write_json(
        inner / "cell_state.json",
        {
            "schema": "cell_state/1",
            "global_step": step,
            "replay": trainer.buffer.state() if trainer.buffer is not None else None,
        },
    )
    if trainer.sampler_copy is not None:
        trainer.sampler_copy.save(inner, step)
    shutil.copyfile(folder.steps_jsonl, inner / "steps.jsonl")
    write_manifest(inner, "resume", trainer.cell_file.identity.provenance(trainer.cell.name, step))
    shutil.rmtree(final, ignore_errors=True)
    inner.rename(final)
    shutil.rmtree(scratch)
    if step in trainer.cell.checkpoints:
        policy = trainer.accelerator.unwrap_model(trainer.model)
        make_checkpoint(folder, trainer.cell_file, policy, trainer.tokenizer, step)
    drop_old_resumes(folder, step, trainer.runtime.keep_resume)


def drop_old_resumes(folder: RunFolder, step: int, keep: int) -> None:
    """Keep the newest whole resume states up to `step`; later ones are damaged, or the run had gone on from them."""
    past = [s for s in folder.resumes() if s <= step]
    kept = [s for s in past if is_complete(folder.resume(s))][-keep:]
    for old in sorted({*past} - {*kept}):
        shutil.rmtree(folder.resume(old))


def make_checkpoint(folder: RunFolder, cell_file: CellFile, model: Any, tokenizer: Any, step: int) -> None:
    """Write `global_step_N` from the weights of step N, unless it is there, or was and is in the store."""
    out = folder.checkpoint(step)
    if is_complete(out) or folder.receipt(step).is_file():
        return
    export_checkpoint(
        model,
        tokenizer,
        out,
        dtype=MODELS[cell_file.cell.model].published_dtype,
        stop_ids=cell_file.prompt.stop_ids,
        provenance=cell_file.identity.provenance(cell_file.cell.name, step),
    )
