"""The fence of a cell across hosts: a generation record in the store; whoever claimed last may write, others stop.

On one host the lock of the cell's folder does this. Between hosts that share only the store, the trainer that is
started later writes a new record, and the older one finds a foreign token where its own was, before each manifest that
it would write and every half minute beside its trainer. The record goes when the cell has ended.
"""

import os
import socket
import threading
import time
import uuid
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Literal

from pydantic import Field, ValidationError

from evaluation.errors import IncompleteError
from evaluation.files import write_json
from evaluation.records import Record
from training.store import Store

RECORD = "generation.json"
LOOK_EVERY_S = 30.0


class Fenced(IncompleteError):
    """Another trainer has taken the cell over; this one must write nothing more."""


class Generation(Record):
    """`<cell>/generation.json`: who may write the cell."""

    schema_: Literal["generation/1"] = Field(default="generation/1", alias="schema")
    number: int
    token: str
    host: str
    pid: int
    claimed_at: str


@dataclass
class Fence:
    """What one process has claimed in a store."""

    store: Store
    held: dict[str, Generation] = field(default_factory=dict)
    looked_at: dict[str, float] = field(default_factory=dict)
    lock: threading.Lock = field(default_factory=threading.Lock)

    def claim(self, cell: str, scratch: Path) -> None:
        """Take a cell over, once in this process; what this process has lost it never takes again.

        Args:
            cell: its name.
            scratch: local folder of the cell; keeps a copy of the record.

        Raises:
            Fenced: another process claimed it at the same moment, or since.
        """
        with self.lock:
            if cell not in self.held:
                before = self._read(cell)
                mine = Generation(
                    number=before.number + 1 if before else 1,
                    token=uuid.uuid4().hex,
                    host=socket.gethostname(),
                    pid=os.getpid(),
                    claimed_at=datetime.now(UTC).isoformat(timespec="seconds"),
                )
                write_json(scratch / RECORD, mine)
                self.store.publish_file(scratch / RECORD, f"{cell}/{RECORD}")
                self.held[cell] = mine
        self.check(cell)

    def check(self, cell: str) -> None:
        """Make sure that the cell is still this process's.

        Raises:
            Fenced: the store names another process, or none: the cell has been taken over, or ended.
        """
        found, mine = self._read(cell), self.held.get(cell)
        self.looked_at[cell] = time.monotonic()
        if mine is None or found is None or found.token != mine.token:
            by = f"process {found.pid} on {found.host} at {found.claimed_at}" if found else "one that has ended it"
            raise Fenced(f"cell={cell}: taken over by {by}; this trainer stops and writes nothing more")

    def look(self, cell: str) -> None:
        """Check now and then, beside a trainer; a store out of reach forbids nothing, since nothing is written then.

        Raises:
            Fenced: the cell has been taken over.
        """
        if time.monotonic() - self.looked_at.get(cell, 0.0) < LOOK_EVERY_S:
            return
        self.looked_at[cell] = time.monotonic()
        try:
            self.check(cell)
        except OSError:
            return

    def release(self, cell: str) -> None:
        """Remove the record of a cell that has ended: nobody trains it again.

        Raises:
            Fenced: it is another's.
        """
        self.check(cell)
        self.store.backend.remove(f"{cell}/{RECORD}")
        del self.held[cell]

    def _read(self, cell: str) -> Generation | None:
        raw = self.store.read(f"{cell}/{RECORD}")
        try:
            return Generation.model_validate_json(raw) if raw is not None else None
        except ValidationError:
            return None  # cut by a kill on a local disk: claimed anew, or lost to whoever does
