"""Verdicts that outlive the process: one SQLite file beside the reference outputs.

A verdict is found again by problem, suites and limits, program and judge version, so later checkpoints, other runs and
a restart after a kill all profit. The file decides nothing that judging anew would not decide the same; when it cannot
be read or written, judging goes on without it.
"""

import contextlib
import logging
import sqlite3
import threading
import time
from collections.abc import Iterable, Sequence
from pathlib import Path

from evaluation.records import Outcome, Verdict

logger = logging.getLogger(__name__)

FILE = "verdicts.sqlite"
FLUSH_S = 1.0
_CHUNK = 500
"""SQLite's limit on parameters is 999 in old builds."""
_TABLE = (
    "CREATE TABLE IF NOT EXISTS verdicts (key BLOB PRIMARY KEY, base TEXT NOT NULL, plus TEXT, passed INTEGER NOT NULL,"
    " total INTEGER NOT NULL, seconds REAL NOT NULL, detail TEXT NOT NULL) WITHOUT ROWID"
)


class Remembered:
    """The verdicts of one cache folder; several processes may share it."""

    def __init__(self, folder: Path) -> None:
        self.path = folder / FILE
        self.lock = threading.Lock()
        self.waiting: list[tuple[bytes, Verdict]] = []
        self.written = time.monotonic()
        self.file: sqlite3.Connection | None = None
        try:
            folder.mkdir(parents=True, exist_ok=True)
            self.file = sqlite3.connect(self.path, timeout=30, check_same_thread=False)
            self.file.execute(_TABLE)
            self.file.commit()
        except (OSError, sqlite3.Error) as e:
            self._give_up(e)

    def _give_up(self, error: Exception) -> None:
        logger.warning("%s: verdicts are not remembered (%s)", self.path, error)
        if self.file is not None:
            with contextlib.suppress(sqlite3.Error):
                self.file.close()
        self.file = None

    def find(self, keys: Sequence[bytes], problem_ids: Sequence[str]) -> dict[bytes, Verdict]:
        """Return the verdicts that are there.

        Args:
            keys: of programs.
            problem_ids: of the same programs.
        """
        found: dict[bytes, Verdict] = {}
        names = dict(zip(keys, problem_ids, strict=True))
        with self.lock:
            for start in range(0, len(keys), _CHUNK):
                part = keys[start : start + _CHUNK]
                for row in self._rows(part):
                    with contextlib.suppress(ValueError, TypeError):  # a row that is no verdict is judged anew
                        found[row[0]] = _verdict(names[row[0]], *row[1:])
        return found

    def _rows(self, keys: Sequence[bytes]) -> Iterable[tuple]:
        if self.file is None:
            return []
        marks = ",".join("?" * len(keys))
        try:
            return self.file.execute(f"SELECT * FROM verdicts WHERE key IN ({marks})", keys).fetchall()
        except sqlite3.Error as e:
            self._give_up(e)
            return []

    def add(self, key: bytes, verdict: Verdict) -> None:
        """Keep a verdict; written with others, a second later at most."""
        with self.lock:
            self.waiting.append((key, verdict))
            if time.monotonic() - self.written > FLUSH_S:
                self._flush()

    def flush(self) -> None:
        """Write what waits."""
        with self.lock:
            self._flush()

    def _flush(self) -> None:
        rows = [
            (k, v.base.value, v.plus and v.plus.value, v.tests_passed, v.tests_total, v.seconds, v.detail)
            for k, v in self.waiting
        ]
        self.waiting, self.written = [], time.monotonic()
        if self.file is None or not rows:
            return
        try:
            with self.file:
                self.file.executemany("INSERT OR REPLACE INTO verdicts VALUES (?, ?, ?, ?, ?, ?, ?)", rows)
        except sqlite3.Error as e:
            self._give_up(e)

    def close(self) -> None:
        """Write what waits, and close the file."""
        with self.lock:
            self._flush()
            if self.file is not None:
                self.file.close()
                self.file = None


def _verdict(
    problem_id: str, base: str, plus: str | None, passed: int, total: int, seconds: float, detail: str
) -> Verdict:
    return Verdict(
        problem_id=problem_id,
        base=Outcome(base),
        plus=None if plus is None else Outcome(plus),
        tests_passed=passed,
        tests_total=total,
        seconds=seconds,
        detail=detail,
    )
