"""What the Prefect UI shows of a run beside its states: bars that move, links to folders. They decide nothing."""

import logging
import re
import time
from collections.abc import Callable
from pathlib import Path
from uuid import UUID

import httpx
from prefect.artifacts import create_link_artifact, create_progress_artifact, update_progress_artifact
from prefect.context import FlowRunContext, TaskRunContext
from prefect.exceptions import PrefectException

logger = logging.getLogger(__name__)

EVERY_S = 15.0
"""A call to the server takes some 50 ms."""


def key_of(*words: str) -> str:
    """Return an artifact's key: lower-case letters, digits and dashes."""
    return re.sub("[^a-z0-9]+", "-", " ".join(words).lower()).strip("-")


def try_to_show(what: str, action: Callable[[], object]) -> None:
    """Call the server, where there is a run to show something of; an unreachable one costs the picture only."""
    if TaskRunContext.get() is None and FlowRunContext.get() is None:
        return  # the plain function was called, without Prefect
    try:
        action()
    except (httpx.HTTPError, PrefectException) as e:
        logger.warning("%s could not be shown in the Prefect UI: %s", what, e)


class Bar:
    """How far one unit is, as a progress artifact of the run that it is made in; used by one thread."""

    def __init__(self, kind: str, name: str) -> None:
        self.key, self.name = key_of(kind, name), name
        self.artifact: UUID | None = None
        self.sent = -EVERY_S

    @property
    def due(self) -> bool:
        """Whether it was not moved a moment ago."""
        return time.monotonic() - self.sent >= EVERY_S

    def move(self, fraction: float, text: str, *, at_once: bool = False) -> None:
        """Move the bar, unless it was moved a moment ago."""
        if at_once or self.due:
            self.sent = time.monotonic()
            try_to_show(f"{self.name}: progress", lambda: self._move(100 * fraction, f"{self.name}: {text}"))

    def _move(self, percent: float, text: str) -> None:
        if self.artifact is None:
            made = create_progress_artifact(progress=percent, key=self.key, description=text)
            assert isinstance(made, UUID)
            self.artifact = made
        else:
            update_progress_artifact(self.artifact, progress=percent, description=text)


def link(kind: str, name: str, url: str, description: str) -> None:
    """Show a link to a folder of the store; of a local one the browser opens nothing, but its place can be read."""
    key = key_of(kind, name)
    try_to_show(name, lambda: create_link_artifact(link=url, link_text=url, key=key, description=description))


class Counted:
    """The lines of a file that grows: only what is new is read."""

    def __init__(self, path: Path) -> None:
        self.path, self.offset, self.lines = path, 0, 0

    def count(self) -> int:
        """Return how many whole lines there are; a file that has shrunk is counted again."""
        if not self.path.is_file():
            return 0
        if self.path.stat().st_size < self.offset:
            self.offset = self.lines = 0
        with self.path.open("rb") as f:
            f.seek(self.offset)
            while piece := f.read(1 << 20):
                self.offset += len(piece)
                self.lines += piece.count(b"\n")
        return self.lines
