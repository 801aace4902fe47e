"""What a person sees while it runs: a bar a cell on a terminal, a line now and then elsewhere."""

import json
import logging
import sys
import threading
import time
from pathlib import Path

from tqdm import tqdm

logger = logging.getLogger(__name__)

LINE_EVERY_S = 15.0


class Board:
    """Progress of the cells that train and of the scores that are made; used by several threads."""

    def __init__(self, quiet: bool = False) -> None:
        self.quiet, self.terminal = quiet, sys.stderr.isatty()
        self.lock = threading.Lock()
        self.bars: dict[str, tqdm] = {}
        self.last_line: dict[str, float] = {}

    def show(self, name: str, progress: Path) -> None:
        """Show what a trainer last said (`progress.json`)."""
        if self.quiet or not progress.is_file():
            return
        try:
            said = json.loads(progress.read_text(encoding="utf-8"))
        except ValueError:
            return  # read between two writes on a file system without atomic rename
        text = f"reward {said['reward']}, {said['seconds_left']:.0f} s left"
        with self.lock:
            if self.terminal:
                bar = self.bars.get(name)
                if bar is None:
                    bar = self.bars[name] = tqdm(total=said["steps"], desc=name, unit="step", leave=False)
                bar.n = said["step"]
                bar.set_postfix_str(text)
            elif time.monotonic() - self.last_line.get(name, 0.0) > LINE_EVERY_S:
                self.last_line[name] = time.monotonic()
                self.say(f"{name}: step {said['step']} of {said['steps']}, {text}")

    def finish(self, name: str) -> None:
        """Close a cell's bar."""
        with self.lock:
            bar = self.bars.pop(name, None)
            if bar is not None:
                bar.close()
        self.say(f"{name}: ended")

    def say(self, text: str) -> None:
        """Write one line above the bars."""
        if not self.quiet:
            tqdm.write(text, file=sys.stderr)
