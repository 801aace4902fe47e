"""The level-triggered loop: what the plan wants, minus what the store has, is submitted as tasks, each once.

Task states decide nothing, so a retry, a rerun and a second host all do the same: whatever is missing. While the store
or Prefect's server is out of reach cells train on; what could not begin or end for that is submitted again.
"""

import errno
import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import httpx
from prefect.concurrency.asyncio import ConcurrencySlotAcquisitionError

from tasks.launch import STOPPING
from tasks.work import Work
from training.cell import Cell

logger = logging.getLogger(__name__)

_AWAY = {
    errno.EIO,
    errno.ESTALE,
    errno.EHOSTDOWN,
    errno.EHOSTUNREACH,
    errno.ENETDOWN,
    errno.ENETUNREACH,
    errno.ENOTCONN,
}
LOOK_EVERY_S = 0.5
STORE_PATIENCE_S = 12 * 3600.0
"""How long a store may be out of reach before the flow gives up; a rerun goes on all the same."""
AGAIN_EVERY_S = 20.0
"""Between two looks at a store that does not answer, and two submissions of what failed for that."""


class Future(Protocol):
    """The part of Prefect's future that the loop uses."""

    @property
    def wrapped_future(self) -> Any:
        """The local one. Never ask `state` in a loop: until the end that asks the API; an outage would end the flow."""
        ...

    @property
    def state(self) -> Any:
        """How it ended, after `wait`."""
        ...

    def wait(self) -> Any:
        """Wait for the end."""
        ...


@dataclass(frozen=True)
class Units:
    """How each kind of unit is submitted; None where another host, or nobody, does it."""

    train: Callable[[Cell], Future] | None
    publish: Callable[[Cell, int], Future] | None
    seal: Callable[[Cell], Future] | None
    score: Callable[[Cell | None, int, Sequence[Future]], Future] | None


@dataclass
class Loop:
    """One pass of an experiment: what was submitted, and what was seen to be done."""

    work: Work
    units: Units
    max_training: int
    scores_first: bool = False
    """No cell starts while samples are drawn, or wait to be: they share the only GPU."""
    look_every_s: float = LOOK_EVERY_S
    max_scoring: int = 32
    """Scores being made or waited for at a time: each holds a thread."""
    again_every_s: float = AGAIN_EVERY_S
    patience_s: float = STORE_PATIENCE_S
    lost_at: float | None = None
    """When the store was first out of reach, since it last took something."""
    again_at: float = 0.0
    training: dict[str, Future] = field(default_factory=dict)
    publishing: dict[tuple[str, int], Future] = field(default_factory=dict)
    sealing: dict[str, Future] = field(default_factory=dict)
    scoring: dict[tuple[str, int], Future] = field(default_factory=dict)
    done: set[tuple[str, str, int]] = field(default_factory=set)
    """Store folders seen complete: never asked for again, since nothing published is taken back."""

    @property
    def futures(self) -> list[Future]:
        """Everything submitted, in the order of kinds."""
        return [*self.training.values(), *self.publishing.values(), *self.sealing.values(), *self.scoring.values()]

    def run(self) -> None:
        """Submit what is missing until nothing runs and a last look finds nothing to submit."""
        while True:
            over = not any(map(_running, self.futures))  # before the look: what ends after it is seen by the next one
            try:
                waits = self._forget_lost()
                if not self.look() and over and not waits:
                    return
                self.lost_at = self.lost_at if waits else None
            except OSError as e:
                self._bear(e)
                STOPPING.wait(self.again_every_s)
            time.sleep(self.look_every_s)

    def _bear(self, error: OSError) -> None:
        """Go on without a store, up to the end of patience.

        Raises:
            OSError: what a person must mend (a full disk, permissions), or patience is at its end.
        """
        now = time.monotonic()
        self.lost_at = self.lost_at if self.lost_at is not None else now
        if not _out_of_reach(error) or now - self.lost_at > self.patience_s or STOPPING.is_set():
            raise error
        left = "cells train on, and what waits is published when it answers"
        logger.warning("the store %s is out of reach (%s): %s", self.work.store.url, error, left)

    def _forget_lost(self) -> bool:
        """Forget what failed for want of store or server, so that it is submitted again; True while any waits."""
        lost: list[tuple[dict[Any, Future], Any]] = []
        for kind in (self.training, self.publishing, self.sealing, self.scoring):
            lost += [(kind, key) for key, future in kind.items() if _lost(future)]
        if not lost or STOPPING.is_set():
            return False
        now = time.monotonic()
        self.lost_at = self.lost_at if self.lost_at is not None else now
        if now - self.lost_at > self.patience_s:
            return False
        if now >= self.again_at:
            self.again_at = now + self.again_every_s
            logger.warning("%d units failed for want of the store or of Prefect's server: submitted again", len(lost))
            for kind, key in lost:
                kind.pop(key, None)
                if kind is self.publishing:
                    self.scoring.pop(key, None)  # it waited for this upload, and ended with it
        return True

    def look(self) -> int:
        """Submit a task for each difference between plan and store, once; return how many."""
        before, at_work = len(self.futures), {n for n, f in self.training.items() if _running(f)}
        self._score(None, 0, [])
        for cell in self.work.cells:
            ended = self._ended(cell)
            if not ended:
                self._train(cell, at_work)
            published = [step for step in cell.checkpoints if self._publish(cell, step)]
            if not ended and self.units.seal and cell.name not in self.sealing:
                self._seal(cell, published)
        return len(self.futures) - before

    def _train(self, cell: Cell, at_work: set[str]) -> None:
        """Start a cell if there is a slot; a cell that ends during this look keeps its own: its scores come first."""
        if self.scores_first and any(_running(f) and not self.work.drawn(*key) for key, f in self.scoring.items()):
            return
        here = self.units.publish is not None and self.work.ended_here(cell)
        if self.units.train and cell.name not in self.training and len(at_work) < self.max_training and not here:
            self.training[cell.name] = self.units.train(cell)
            at_work.add(cell.name)

    def _publish(self, cell: Cell, step: int) -> bool:
        """Publish and score one checkpoint as far as that is due; True once it is in the store."""
        key = (cell.name, step)
        published = self._seen("checkpoint", key, lambda: self.work.published(cell, step))
        if not published and self.units.publish and key not in self.publishing and self.work.ready(cell, step):
            # One at a time for each cell: they share the open logs, and resume states are dropped by age.
            if any(_running(f) for (name, _), f in self.publishing.items() if name == cell.name):
                return False
            self.publishing[key] = self.units.publish(cell, step)
        if published or key in self.publishing:
            self._score(cell, step, [self.publishing[key]] if key in self.publishing else [])
        return published

    def _seal(self, cell: Cell, published: Sequence[int]) -> None:
        """Publish the records of a cell that has ended here, after every checkpoint that it has."""
        ready = [step for step in cell.checkpoints if self.work.ready(cell, step)]
        if self.work.ended_here(cell) and set(ready) <= set(published) and self.units.seal:
            self.sealing[cell.name] = self.units.seal(cell)

    def _score(self, cell: Cell | None, step: int, after: Sequence[Future]) -> None:
        key = (cell.name if cell else self.work.model.name, step)
        if self.units.score is None or key in self.scoring:
            return
        busy = sum(map(_running, self.scoring.values()))
        if busy < self.max_scoring and not self._seen("score", key, lambda: self.work.scored(cell, step)):
            self.scoring[key] = self.units.score(cell, step, after)

    def _ended(self, cell: Cell) -> bool:
        return self._seen("end", (cell.name, 0), lambda: self.work.result(cell) is not None)

    def _seen(self, kind: str, key: tuple[str, int], ask: Callable[[], bool]) -> bool:
        fact = (kind, *key)
        if fact not in self.done and ask():
            self.done.add(fact)
        return fact in self.done


def _lost(future: Future) -> bool:
    """True for a unit that failed on what is out of reach; what a person must mend is not tried again."""
    return not _running(future) and _out_of_reach(error_of(future))


def _out_of_reach(error: BaseException | None) -> bool:
    """True for what passes by itself: a connection, a mounted disk or a server that is away; not a wrong path."""
    if isinstance(error, ConcurrencySlotAcquisitionError):  # asked for each task with a tag, whether limited or not
        error = error.__cause__
    if isinstance(error, httpx.HTTPStatusError):
        return error.response.status_code >= 500
    passing = isinstance(error, ConnectionError | TimeoutError | httpx.TransportError)
    return passing or (isinstance(error, OSError) and error.errno in _AWAY)


def error_of(future: Future) -> BaseException | None:
    """Wait for a unit's end and return why it failed; None if it did not."""
    broke = future.wrapped_future.exception()  # in Prefect's own code, round the unit's: `wait` would raise it here
    if broke is not None:
        return broke
    future.wait()  # it has ended: this asks nobody, and lets `state` know
    state = future.state
    if state is None or state.is_completed():
        return None
    error = state.result(raise_on_failure=False) if state.is_failed() else None
    return error if isinstance(error, BaseException) else RuntimeError(state.message or state.name)


def _running(future: Future) -> bool:
    return not future.wrapped_future.done()
