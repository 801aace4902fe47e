"""The level-triggered loop: what the plan wants, minus what the store has, is submitted as tasks, each once.

Task states decide nothing, so a retry, a rerun and a second host all do the same: whatever is missing.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from tasks.work import Work
from training.cell import Cell

LOOK_EVERY_S = 0.5


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

    train: Callable[[Cell], Future]
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
    """No cell starts while a score is being made: they share the only GPU."""
    look_every_s: float = LOOK_EVERY_S
    max_scoring: int = 32
    """Scores being made or waited for at a time: each holds a thread."""
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
            if not self.look() and over:
                return
            time.sleep(self.look_every_s)

    def look(self) -> int:
        """Submit a task for each difference between plan and store, once; return how many."""
        before = len(self.futures)
        self._score(None, 0, [])
        for cell in self.work.cells:
            ended = self._ended(cell)
            if not ended:
                self._train(cell)
            published = [step for step in cell.checkpoints if self._publish(cell, step)]
            if not ended and self.units.seal and cell.name not in self.sealing:
                self._seal(cell, published)
        return len(self.futures) - before

    def _train(self, cell: Cell) -> None:
        busy = sum(map(_running, self.training.values()))
        if self.scores_first and any(map(_running, self.scoring.values())):
            return
        here = self.units.publish is not None and self.work.ended_here(cell)
        if cell.name not in self.training and busy < self.max_training and not here:
            self.training[cell.name] = self.units.train(cell)

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


def _running(future: Future) -> bool:
    return not future.wrapped_future.done()
