"""Lanes: threads that each own a zygote, and take work off one queue until it is empty."""

import collections
import contextlib
import os
import signal
import threading
from collections.abc import Callable, Iterable
from typing import TypeVar

from evaluation.judge.zygote import Cage, Zygote

T = TypeVar("T")


class Lane:
    """A zygote, and one with numpy once a program needs it."""

    def __init__(self, caged: bool = True) -> None:
        self.cage: Cage = "landlock" if caged else "none"
        self.zygotes: dict[bool, Zygote] = {}

    def zygote(self, numpy: bool) -> Zygote:
        """Return the zygote of that kind, started if need be."""
        if numpy not in self.zygotes:
            self.zygotes[numpy] = Zygote(numpy, self.cage)
        return self.zygotes[numpy]

    def rest(self) -> None:
        """Leave no child behind: the queue is empty."""
        for zygote in self.zygotes.values():
            zygote.rest()

    def abort(self) -> None:
        """Kill them under the thread that uses them; it sees a failure of the harness."""
        for zygote in list(self.zygotes.values()):
            with contextlib.suppress(ProcessLookupError):
                os.killpg(zygote.process.pid, signal.SIGKILL)

    def close(self) -> None:
        """End them."""
        for zygote in self.zygotes.values():
            zygote.close()
        self.zygotes.clear()


class Lanes:
    """All lanes of a judge; the first works in the caller's thread."""

    def __init__(self, count: int, caged: bool = True) -> None:
        self.lanes = [Lane(caged) for _ in range(count)]
        self.first = self.lanes[0]

    def close(self) -> None:
        """End every caged process."""
        for lane in self.lanes:
            lane.close()

    def each(self, items: Iterable[T], action: Callable[[Lane, T], None]) -> None:
        """Call `action` on every item, in order of taking, as many at a time as there are lanes.

        Raises:
            Exception: what an action raised; no further item is taken then.
        """
        queue = collections.deque(items)
        errors: list[Exception] = []

        def work(lane: Lane) -> None:
            try:
                while True:
                    try:
                        item = queue.popleft()
                    except IndexError:
                        return lane.rest()
                    action(lane, item)
            except Exception as e:  # noqa: BLE001  carried to the caller's thread
                queue.clear()
                errors.append(e)

        others = self.lanes[1 : len(queue)]
        threads = [threading.Thread(target=work, args=(lane,)) for lane in others]
        try:
            for thread in threads:
                thread.start()
            work(self.first)
        except BaseException:  # Ctrl-C: the others would go on
            queue.clear()
            for lane in self.lanes:
                lane.abort()
            raise
        finally:
            for thread in threads:
                thread.join()
        if errors:
            raise errors[0]
