"""TRL's own reporters (`report_to`), told our figures: TensorBoard, W&B, trackio.

Trainer calls its reporters before our callbacks, with TRL's figures alone, and never for a step that broke off. So they
are taken out of its list and held here: each step's line of steps.jsonl, replay included, goes out as it was written,
beside TRL's figures, and ours win where the names are the same. The last line of a diverged run is among them.

A reporter that fails, at its start or later, costs its own curve only. Steps taken again after a kill are told
again, with the same numbers, at the same `train/global_step`.
"""

import copy
import importlib
import logging
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Self

from transformers import TrainerCallback
from transformers.integrations.integration_utils import (
    TensorBoardCallback,
    TrackioCallback,
    WandbCallback,
    get_reporting_integration_callbacks,
)

from training.reporters import PROJECT, run_id, wandb_run

if TYPE_CHECKING:
    from training.trainer import CellTrainer

logger = logging.getLogger(__name__)


class Watchers(TrainerCallback):
    """The reporters of one attempt at a cell, from its first step to its end, however it ends."""

    def __init__(self, trainer: "CellTrainer") -> None:
        self.trainer = trainer
        popped = [trainer.pop_callback(c) for c in get_reporting_integration_callbacks(trainer.args.report_to)]
        self.reporters: list[TrainerCallback] = [r for r in popped if r is not None]
        # TRL's profiler would also log to W&B and trackio, from inside a step, which would then break with them.
        trainer.args.report_to = []
        trainer.add_callback(self)

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Open every reporter."""

        def begin(reporter: TrainerCallback) -> None:
            self._open(reporter, state.global_step)
            reporter.on_train_begin(args, state, control, **kwargs)

        for reporter in [*self.reporters]:
            self._dare(reporter, begin)

    def _open(self, reporter: TrainerCallback, step: int) -> None:
        """Say which run it is: the same one for every attempt at the cell."""
        folder, cell_file = self.trainer.folder, self.trainer.cell_file
        args, experiment = self.trainer.args, self.trainer.runtime.experiment
        if isinstance(reporter, WandbCallback):
            importlib.import_module("wandb").init(**wandb_run(cell_file.identity, experiment), dir=str(folder.root))
        elif isinstance(reporter, TrackioCallback):
            args.project = f"{PROJECT}-{experiment}" if experiment else PROJECT
            args.run_name = f"{cell_file.cell.name}-{run_id(cell_file.identity)}"
        elif isinstance(reporter, TensorBoardCallback):
            writer = importlib.import_module("torch.utils.tensorboard").SummaryWriter
            # What an attempt told of later steps is hidden: they are taken again.
            reporter.tb_writer = writer(log_dir=str(folder.tensorboard), purge_step=step + 1)

    def tell(self, line: dict[str, Any], logs: dict[str, Any]) -> None:
        """Send one step: TRL's figures, and ours over them."""
        state = copy.copy(self.trainer.state)
        state.global_step = line["global_step"]  # of a step that broke off Trainer has not counted it
        figures = {k: v for k, v in (logs | flat(line)).items() if v is not None}
        for reporter in [*self.reporters]:
            self._dare(reporter, lambda r: r.on_log(self.trainer.args, state, self.trainer.control, logs=dict(figures)))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        """End every reporter's run; at W&B a cell that was stopped or failed is so called until it goes on."""

        def end(reporter: TrainerCallback) -> None:
            reporter.on_train_end(self.trainer.args, self.trainer.state, self.trainer.control)
            if isinstance(reporter, WandbCallback):
                importlib.import_module("wandb").finish(exit_code=0 if kind is None else 1)

        for reporter in [*self.reporters]:
            self._dare(reporter, end)
        self.reporters = []

    def _dare(self, reporter: TrainerCallback, action: Callable[[TrainerCallback], object]) -> None:
        if not self.trainer.state.is_world_process_zero:
            return
        try:
            action(reporter)
        except Exception as e:  # noqa: BLE001  watching must not end what is watched
            name, reason = type(reporter).__name__.removesuffix("Callback").lower(), " ".join(str(e).split())[:300]
            logger.warning("%s tells nothing more of this attempt: %s", name, reason or type(e).__name__)
            self.reporters.remove(reporter)


def flat(line: dict[str, Any]) -> dict[str, float]:
    """Return the figures of a line of steps.jsonl as numbers, nested ones as `replay/drawn`; null ones left out."""
    figures: dict[str, float] = {}
    for key, value in line.items():
        if isinstance(value, dict):
            figures |= {f"{key}/{k}": v for k, v in flat(value).items()}
        elif value is not None and key != "global_step":
            figures[key] = float(value)
    return figures
