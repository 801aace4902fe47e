"""What a child writes, told in the log of the run that started it: a few lines now and then, the rest in its file."""

import logging
import re
import time
from pathlib import Path

logger = logging.getLogger(__name__)

EVERY_S = 15.0
LINES = 4
"""At a time: a hundred cells make 27 lines a second, which the API takes in batches."""
MAX_BYTES = 64_000
"""Read at a time; what is older is in the file."""
LINE_LENGTH = 500
_ESCAPES = re.compile("\x1b\\[[0-9;?]*[A-Za-z]")


class Tail:
    """The end of a child's log, from where it is now; used by one thread at a time."""

    def __init__(self, name: str, path: Path, only: str = "") -> None:
        """Begin at the end of what is there.

        Args:
            name: what the lines begin with.
            path: the child's log.
            only: tell lines that contain it: of a child that serves several tasks.
        """
        self.name, self.path, self.only = name, path, only
        self.offset = path.stat().st_size if path.is_file() else 0
        self.told = -EVERY_S

    def tell(self, *, at_once: bool = False) -> None:
        """Tell the newest lines, unless that was done a moment ago."""
        now = time.monotonic()
        if (at_once or now - self.told >= EVERY_S) and (lines := self._new()):
            self.told = now
            for line in lines[-LINES:]:
                logger.info("%s: %s", self.name, line)
            if len(lines) > LINES:
                logger.info("%s: %d lines before these are in %s", self.name, len(lines) - LINES, self.path)

    def _new(self) -> list[str]:
        """Return the whole lines since the last look, as a terminal would show them."""
        if not self.path.is_file():
            return []
        with self.path.open("rb") as f:
            size = f.seek(0, 2)
            start = max(self.offset, size - MAX_BYTES)
            f.seek(start)
            whole, end, _ = f.read(size - start).rpartition(b"\n")
        self.offset = start + len(whole) + len(end)
        shown = (line.rpartition("\r")[2] for line in whole.decode("utf-8", errors="replace").split("\n"))
        lines = (_ESCAPES.sub("", raw).rstrip() for raw in shown)
        return [line[:LINE_LENGTH] for line in lines if line and self.only in line]
