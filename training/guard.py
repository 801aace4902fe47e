"""What ends a cell before its last step: a number that is not finite, a signal, the end of its time.

Weights, optimizer and replay buffer change at the end of a step only. So whenever a step is left in the middle, what is
in memory is the state after the last whole step: it is saved as it is, and the step is taken again.
"""

import math
import signal
import time
from typing import TYPE_CHECKING, Any

import torch
from transformers import TrainerCallback

from evaluation.errors import Stopped
from training.callbacks import Diverged
from training.processes import Processes

if TYPE_CHECKING:
    from training.trainer import CellTrainer

MARGIN = 2.0
"""A step is not begun unless so many of the longest one, with its saving, fit in the time that is left."""


def broken_off(reason: str, step: int, steps: int) -> Stopped:
    """Return what a trainer says that ends before its cell does; an allocation or a budget may be what ran out."""
    again = "with time left, the same command goes on" if reason.startswith("end_by=") else "run the same command again"
    return Stopped(f"{reason}: stopped after step {step} of {steps}; {again}")


class Guard(TrainerCallback):
    """Stops the cell at the first non-finite number; at SIGTERM, or when its time is up, after saving."""

    def __init__(self, checkpoints: tuple[int, ...], resume_every: int | None, end_by: float | None = None) -> None:
        self.checkpoints, self.resume_every, self.end_by = frozenset(checkpoints), resume_every, end_by
        self.trainer: CellTrainer | None = None
        self.processes = Processes()
        self.reason: str | None = None
        """Why to stop."""
        self.saved_step = 0
        self.began: float | None = None
        self.longest_s = 0.0

    def install(self) -> None:
        """Take SIGTERM and Ctrl-C."""
        signal.signal(signal.SIGTERM, self._on_signal)
        signal.signal(signal.SIGINT, self._on_signal)

    def _on_signal(self, *_: object) -> None:
        self.reason = "signal=TERM"

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Note from where the run goes on."""
        self.saved_step = state.global_step

    def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Note what is saved."""
        self.saved_step = state.global_step

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Do not begin a step that will not be finished.

        Raises:
            Stopped: asked to stop, or too little time is left for another step.
        """
        now = time.time()
        if self.began is not None:
            self.longest_s = max(self.longest_s, now - self.began)
        self.began = now
        if self.end_by is not None and now + MARGIN * self.longest_s > self.end_by:
            self.reason = self.reason or "end_by=reached"
        said = [r for r in self.processes.gather([self.reason]) if r]
        self.reason = said[0] if said else None
        self.break_off()

    def break_off(self) -> None:
        """Leave the step where nothing of it has changed anything yet.

        Raises:
            Stopped: there is a reason to.
        """
        if self.reason is not None:
            assert self.trainer is not None
            raise broken_off(self.reason, self.trainer.state.global_step, self.trainer.cell.steps)

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        """Look at loss and gradient before the weights change.

        Raises:
            Diverged: one of them is not finite.
        """
        assert self.trainer is not None
        step = state.global_step + 1
        if not math.isfinite(self.trainer.row["loss"]):
            raise Diverged(step, "loss")
        finite = all(bool(torch.isfinite(p.grad).all()) for p in model.parameters() if p.grad is not None)
        if self.processes.any(not finite):
            raise Diverged(step, "gradient")

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Ask for a save where one is due."""
        step = state.global_step
        control.should_save = step in self.checkpoints or (
            self.resume_every is not None and step % self.resume_every == 0
        )

    def on_log(
        self,
        args: Any,
        state: Any,
        control: Any,
        model: Any = None,
        logs: dict[str, Any] | None = None,
        **kwargs: Any,
    ) -> None:
        """Look at the weights when the step's line is written and nothing is saved yet.

        Raises:
            Diverged: one is not finite.
        """
        if logs and "grad_norm" in logs:
            finite = all(bool(torch.isfinite(p).all()) for p in model.parameters())
            if self.processes.any(not finite):
                raise Diverged(state.global_step, "weight")
