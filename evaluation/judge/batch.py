"""What one call of the judge has in hand: the programs that are like no other, and their verdicts as they come."""

import threading
from collections.abc import Callable
from dataclasses import dataclass

from evaluation.judge.jobs import Execution
from evaluation.records import Outcome, Verdict

Key = tuple[str, bytes]
"""Problem and program."""


class TryAlone(Exception):
    """Load decided, not the program: it is judged again when nothing else of ours runs."""


@dataclass(frozen=True)
class Case:
    """A program that is like no other."""

    key: Key
    problem_id: str
    source: str
    clean: bool
    """Its suites may follow each other in one process."""


@dataclass(frozen=True)
class Result:
    """What one suite came to."""

    outcome: Outcome
    run: Execution | None
    detail: str

    @property
    def by_value(self) -> bool:
        """A wrong value or an exception decided, which another process would have seen as well."""
        return self.outcome is Outcome.FAIL and ": test " in self.detail and "Memory" not in self.detail


class Batch:
    """The verdicts of one call, as they come."""

    def __init__(self, verdicts: dict[Key, Verdict], total: int, progress: Callable[[int, int], None] | None) -> None:
        self.verdicts, self.total, self.progress = verdicts, total, progress
        self.lock = threading.Lock()
        if progress and verdicts:
            progress(len(verdicts), total)

    def done(self, key: Key, verdict: Verdict) -> None:
        """Keep a verdict."""
        with self.lock:
            self.verdicts[key] = verdict
            if self.progress:
                self.progress(len(self.verdicts), self.total)
