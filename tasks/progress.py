"""What a person sees while it runs: a bar a cell on a terminal, a line now and then elsewhere, a bar in the UI."""

import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path

from tqdm import tqdm

from evaluation.problems import num_samples
from evaluation.records import Record
from evaluation.request import Unit
from tasks.children import Tail
from tasks.shown import Bar, Counted

LINE_EVERY_S = 15.0


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
        self.drawn: dict[str, Bar] = {}

    def show(self, name: str, path: Path) -> None:
        """Show what a trainer last said; called from the thread of the cell's task."""
        if not path.is_file():
            return
        said = Progress.model_validate_json(path.read_text(encoding="utf-8"))
        if not self.quiet:
            self._show_here(name, said)
        self._drawn(name).move(said.step / said.steps, said.text)

    def finish(self, name: str) -> None:
        """Close a cell's bar."""
        with self.lock:
            bar = self.bars.pop(name, None)
            if bar is not None:
                bar.close()
        self.say(f"{name}: ended")
        self._drawn(name).move(1.0, "ended", at_once=True)

    def say(self, text: str) -> None:
        """Write one line above the bars."""
        if not self.quiet:
            tqdm.write(text, file=sys.stderr)

    def _drawn(self, name: str) -> Bar:
        """Return a cell's bar in the UI; only the thread of its task asks for it."""
        return self.drawn.setdefault(name, Bar("progress", name))

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


class Drawing:
    """One checkpoint's samples as they are drawn: a bar in the UI, and what its child says of it."""

    def __init__(self, name: str, units: Sequence[Unit], log: Path) -> None:
        self.bar, self.tail = Bar("scoring", name), Tail("evaluation", log, only=f"{units[0].label}:")
        self.parts = [(Counted(Path(u.out) / "samples.jsonl"), num_samples(u.protocol)) for u in units]

    def tick(self) -> None:
        """Show how far it is; called by the task that waits for it."""
        self.tail.tell()
        if self.bar.due:
            drawn, planned = sum(part.count() for part, _ in self.parts), sum(n for _, n in self.parts)
            self.bar.move(min(1.0, drawn / planned), f"{drawn:,} of {planned:,} samples drawn")

    def finish(self) -> None:
        """Say that it is scored."""
        self.tail.tell(at_once=True)
        self.bar.move(1.0, "scored", at_once=True)
