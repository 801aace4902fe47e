"""The wall time of all of an experiment's runs together: counted over restarts, and bounded where a budget is declared.

It is the time in which the flow trains or scores on this host, kept in `<runs>/wall.json`; a kill loses seconds of it.
"""

import contextlib
import json
import threading
import time
from pathlib import Path
from types import TracebackType
from typing import Self

from evaluation.errors import InputError
from evaluation.files import write_json

EVERY_S = 2.0
"""Between two notes of the time: what a kill may lose."""


class Clock:
    """A context manager: the time spent within it counts."""

    def __init__(self, path: Path, budget_minutes: float | None) -> None:
        """Read what earlier attempts have spent.

        Raises:
            InputError: the note cannot be read.
        """
        self.path, self.budget_minutes = path, budget_minutes
        self.before_s = _read(path)
        self.began = self.beat = time.time()
        self.over = threading.Event()
        self.thread: threading.Thread | None = None

    @property
    def end_by(self) -> float | None:
        """Unix time at which the budget is spent, if there is one."""
        return None if self.budget_minutes is None else self.began + 60 * self.budget_minutes - self.before_s

    @property
    def minutes(self) -> float:
        """Spent so far, earlier attempts included."""
        return (self.before_s + self.beat - self.began) / 60

    @property
    def spent(self) -> bool:
        """Whether nothing of the budget is left."""
        return self.end_by is not None and time.time() >= self.end_by

    def __enter__(self) -> Self:
        self._note()  # here, and not only in the thread: what cannot be written would not count
        self.thread = threading.Thread(target=self._run, name="clock", daemon=True)
        self.thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, e: BaseException | None, tb: TracebackType | None) -> None:
        assert self.thread is not None
        self.over.set()
        self.thread.join()

    def _run(self) -> None:
        while True:
            over = self.over.wait(EVERY_S)
            self.beat = time.time()
            with contextlib.suppress(OSError):  # a disk that is full by now ends the run elsewhere, in its own words
                self._note()
            if over:
                return

    def _note(self) -> None:
        write_json(self.path, {"schema": "wall/1", "seconds": round(60 * self.minutes, 3)})


def _read(path: Path) -> float:
    if not path.is_file():
        return 0.0
    try:
        return float(json.loads(path.read_text(encoding="utf-8"))["seconds"])
    except (ValueError, KeyError, TypeError) as e:
        raise InputError(
            "runs", path, f"is no note of the time spent ({e})", "restore it, or use another --runs"
        ) from e
