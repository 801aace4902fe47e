"""A run directory `<runs>/<cell>/`: every path is a function, every file whole or absent."""

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from pydantic import Field

from evaluation.errors import InputError
from evaluation.files import PARTIAL
from evaluation.manifests import MANIFEST, Revisions
from evaluation.prompts import PromptSpec
from evaluation.records import Record
from training.cell import Cell, Identity
from training.grpo import Grpo
from training.reporters import Reporter
from training.signs import Sign


class CellFile(Record):
    """`cell.json`: the identity of the cell in this folder, and what hashes to it."""

    schema_: Literal["cell/1"] = Field(default="cell/1", alias="schema")
    cell: Cell
    prompt: PromptSpec
    split_sha256: str
    revisions: Revisions

    @property
    def identity(self) -> Identity:
        """The hashed part."""
        return Identity(
            cell_config=self.cell,
            split_sha256=self.split_sha256,
            prompt_sha256=self.prompt.sha256,
            revisions=self.revisions,
        )


class Began(Record):
    """`began.json`: what was so when the first step was begun in this folder, for the starts that follow."""

    schema_: Literal["began/1"] = Field(default="began/1", alias="schema")
    identity: Identity
    problems_sha256: str
    """Of the file of training problems."""
    after_step: int
    """0, or the step of another folder's resume state: what it logged before is in that state, its rollouts are not."""


class Receipt(Record):
    """`global_step_N.published.json`: where a checkpoint is whose copy in the run directory was removed."""

    schema_: Literal["published/1"] = Field(default="published/1", alias="schema")
    store: str


class Runtime(Record):
    """`runtime.json`: where and how the cell runs. Nothing here can change a number in the report."""

    schema_: Literal["runtime/1"] = Field(default="runtime/1", alias="schema")
    model_path: str
    """Local folder or hub repository of the base model."""
    model_revision: str | None = None
    problems_path: str
    """JSONL of training problems (`evaluation.records.Problem`)."""
    device: str = Field(default="cpu", pattern=r"^(cpu|cuda(:[0-9]+)?)$")
    num_processes: int = Field(default=1, ge=1)
    """Processes that train the cell together, a GPU each; more than one are started by `training.launch`."""
    num_threads: int = Field(default=1, ge=1)
    micro_batch: int | None = Field(default=None, ge=1)
    """Completions a forward pass, None: by the device's memory; the gradient does not depend on it beyond rounding."""
    bucket: bool = True
    """Micro-batches of like length, each padded to its own longest; the loss is the same to float rounding."""
    drop_zero: bool = True
    """Leave rows without advantage out of the forward pass; the loss is the same to float rounding."""
    lean_head: bool = True
    """On a CPU, the head only where a completion's tokens are predicted; log-probs are the same to float rounding."""
    sampler: Literal["transformers", "vllm"] = "transformers"
    judge_workers: int = Field(default=1, ge=1)
    caged: bool = True
    """False: programs run under limits only (`ABLATION_UNCAGED`)."""
    resume_every: int | None = Field(default=None, ge=1)
    """Steps between resume states beside those at checkpoints; None saves at checkpoints only."""
    keep_resume: int = Field(default=2, ge=1)
    end_by: float | None = None
    """Unix time by which the cell has saved and ended, exit 75: the end of a batch system's allocation."""
    service_timeout_s: float = Field(default=1800, gt=0)
    """How long a call to a service (backend tinker) may take."""
    report_to: tuple[Reporter, ...] = ()
    """Who is told every step's figures, beside the logs."""
    experiment: str = ""
    """Groups the cells there."""

    def share(self, grpo: Grpo) -> int:
        """Return how many of a step's rollouts each process takes: whole groups, the same for all.

        Raises:
            InputError: the step's prompts cannot be dealt out evenly.
        """
        prompts, n = grpo.prompts_per_step, self.num_processes
        if prompts % n:
            fits = ", ".join(str(d) for d in range(1, min(prompts, n) + 1) if prompts % d == 0)
            raise InputError("num_processes", n, f"does not divide the {prompts} prompts of a step", f"use {fits}")
        return prompts // n * grpo.rollouts_per_prompt


@dataclass(frozen=True)
class RunFolder:
    """Paths of one cell's run directory (contracts: Files in a store)."""

    root: Path

    @property
    def cell_json(self) -> Path:
        """Identity."""
        return self.root / "cell.json"

    @property
    def runtime_json(self) -> Path:
        """Where and how it runs."""
        return self.root / "runtime.json"

    @property
    def began_json(self) -> Path:
        """Whose training began here, with which problems."""
        return self.root / "began.json"

    @property
    def accelerate_yaml(self) -> Path:
        """How several processes are started."""
        return self.root / "accelerate.yaml"

    @property
    def logs(self) -> Path:
        """`steps.jsonl`, `result.json`, the trainer's output."""
        return self.root / "logs"

    @property
    def steps_jsonl(self) -> Path:
        """One line an optimizer step."""
        return self.logs / "steps.jsonl"

    @property
    def result_json(self) -> Path:
        """Written when the cell has ended: finished or diverged."""
        return self.logs / "result.json"

    @property
    def tensorboard(self) -> Path:
        """TensorBoard's event files: for watching, never stored."""
        return self.root / "tensorboard"

    @property
    def rollouts(self) -> Path:
        """One parquet a step."""
        return self.root / "rollouts"

    def rollout(self, step: int) -> Path:
        """The rollouts of one step."""
        return self.rollouts / f"step_{step:06d}.parquet"

    def checkpoint(self, step: int) -> Path:
        """A complete HF model directory."""
        return self.root / f"global_step_{step}"

    def receipt(self, step: int) -> Path:
        """Left in a checkpoint's place when its copy here was removed, since the store has it."""
        return self.root / f"global_step_{step}.published.json"

    def resume(self, step: int) -> Path:
        """Everything needed to go on from `step`."""
        return self.root / "resume" / f"step_{step}"

    def checkpoints(self) -> list[int]:
        """Steps with a whole checkpoint (a manifest), ascending by number."""
        return numbered(self.root, "global_step_")

    def resumes(self, *, whole: bool = True) -> list[int]:
        """Steps with a whole resume state, ascending by number; or with any."""
        return numbered(self.root / "resume", "step_", whole=whole)


def numbered(folder: Path, prefix: str, *, whole: bool = True) -> list[int]:
    """Return the N of every `<prefix>N` folder that has a manifest, or of every one, in numeric order."""
    if not folder.is_dir():
        return []
    pattern = re.compile(re.escape(prefix) + "(0|[1-9][0-9]*)")
    found = (pattern.fullmatch(p.name) for p in folder.iterdir() if not p.name.endswith(PARTIAL))
    return sorted(int(m[1]) for m in found if m and (not whole or (folder / m[0] / MANIFEST).is_file()))


class Result(Record):
    """`logs/result.json`: how a cell ended."""

    schema_: Literal["result/1"] = Field(default="result/1", alias="schema")
    end: Literal["finished", "diverged"]
    last_step: int
    onset_step: int | None
    """First step with a non-finite number, when diverged."""
    signs: tuple[Sign, ...] = ()
    """What else went wrong, each with its step of onset; results written before there were signs have none."""


Json = dict[str, Any]
