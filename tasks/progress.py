"""What a person sees while it runs: a bar a cell on a terminal, a line now and then elsewhere, a bar in the UI."""

import logging
import sys
import threading
import time
from pathlib import Path
from uuid import UUID

import httpx
from prefect.artifacts import create_progress_artifact, update_progress_artifact
from prefect.context import TaskRunContext
from prefect.exceptions import PrefectException
from tqdm import tqdm

from evaluation.records import Record

logger = logging.getLogger(__name__)

LINE_EVERY_S = 15.0
ARTIFACT_EVERY_S = 15.0
"""A call to the server takes some 50 ms."""


class Progress(Record):
    """`progress.json`: what a trainer last said."""

    step: int
    steps: int
    reward: float | str | None
    grad_norm: float | str | None = None
    seconds_left: float

    @property
    def text(self) -> str:
        """Reward, gradient norm and time left in words."""
        reward = f"{self.reward:.3f}" if isinstance(self.reward, float) else self.reward
        norm = f"{self.grad_norm:.3g}" if isinstance(self.grad_norm, float) else self.grad_norm
        return f"reward {reward}, grad norm {norm}, {self.seconds_left:.0f} s left"


class Board:
    """Progress of the cells that train; used by several threads."""

    def __init__(self, quiet: bool = False) -> None:
        self.quiet, self.terminal = quiet, sys.stderr.isatty()
        self.lock = threading.Lock()
        self.bars: dict[str, tqdm] = {}
        self.told: dict[str, float] = {}
        self.sent: dict[str, float] = {}
        self.artifacts: dict[str, UUID] = {}

    def show(self, name: str, path: Path) -> None:
        """Show what a trainer last said; called from the thread of the cell's task."""
        if not path.is_file():
            return
        said = Progress.model_validate_json(path.read_text(encoding="utf-8"))
        if not self.quiet:
            self._show_here(name, said)
        if time.monotonic() - self.sent.get(name, -ARTIFACT_EVERY_S) >= ARTIFACT_EVERY_S:
            self.sent[name] = time.monotonic()
            self._show_in_prefect(name, said.step / said.steps, said.text)

    def finish(self, name: str) -> None:
        """Close a cell's bar."""
        with self.lock:
            bar = self.bars.pop(name, None)
            if bar is not None:
                bar.close()
        self.say(f"{name}: ended")
        self._show_in_prefect(name, 1.0, "ended")

    def say(self, text: str) -> None:
        """Write one line above the bars."""
        if not self.quiet:
            tqdm.write(text, file=sys.stderr)

    def _show_here(self, name: str, said: Progress) -> None:
        with self.lock:
            if self.terminal:
                bar = self.bars.get(name)
                if bar is None:
                    bar = self.bars[name] = tqdm(total=said.steps, desc=name, unit="step", leave=False)
                bar.n = said.step
                bar.set_postfix_str(said.text)
            elif time.monotonic() - self.told.get(name, -LINE_EVERY_S) >= LINE_EVERY_S:
                self.told[name] = time.monotonic()
                self.say(f"{name}: step {said.step} of {said.steps}, {said.text}")

    def _show_in_prefect(self, name: str, fraction: float, text: str) -> None:
        """Draw the cell's bar in the UI; an unreachable server costs the picture only."""
        if TaskRunContext.get() is None:
            return  # the plain function was called, without Prefect
        try:
            if name not in self.artifacts:
                key = f"progress-{name.lower().replace('_', '-')}"
                made = create_progress_artifact(progress=0.0, key=key, description=name)
                assert isinstance(made, UUID)
                self.artifacts[name] = made
            update_progress_artifact(self.artifacts[name], progress=100 * fraction, description=f"{name}: {text}")
        except (httpx.HTTPError, PrefectException) as e:
            logger.warning("%s: progress could not be shown in the Prefect UI: %s", name, e)
