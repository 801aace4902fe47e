"""One cell in several processes: what they tell each other, and how they fail, stop and end as one.

Every method of `Processes` with more than one process is a meeting: all of the cell's processes come to it, in the same
order, or the cell hangs. Alone nothing is waited for and nothing changes, to the last bit.
"""

import signal
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import TypeVar

from evaluation.errors import InputError
from evaluation.judge.sandbox import PR_SET_PDEATHSIG, prctl
from evaluation.program import as_ablation_error, describe
from training.folder import Runtime

T = TypeVar("T")

PATIENCE = timedelta(hours=1)
"""How long a meeting waits: one process may draw much longer completions than another."""


class Told(Exception):
    """The one line of a failure, on its way to the launcher."""


@dataclass(frozen=True)
class Processes:
    """This process among those that train the cell."""

    count: int = 1
    index: int = 0

    @property
    def main(self) -> bool:
        """Whether this one writes the files."""
        return self.index == 0

    def gather(self, mine: Sequence[T]) -> list[T]:
        """Return the items of all processes, in the order of the processes."""
        if self.count == 1:
            return list(mine)
        import torch.distributed as dist

        parts: list[list[T]] = [[] for _ in range(self.count)]
        dist.all_gather_object(parts, list(mine))
        return [x for part in parts for x in part]

    def any(self, mine: bool) -> bool:
        """Return whether one of them says so."""
        return any(self.gather([mine]))

    def total(self, mine: float) -> float:
        """Return the sum, the same to the last bit everywhere."""
        return sum(self.gather([mine]))

    def mean(self, mine: float) -> float:
        """Return the mean, the same to the last bit everywhere."""
        return self.total(mine) / self.count

    def share(self, items: Sequence[T]) -> tuple[list[T], bool]:
        """Return this process's part of `items`, and False where it is only there to keep the others company.

        Passes through the model are meetings, so that whoever has nothing to do takes the first item, to no effect.
        """
        mine = list(items[self.index :: self.count])
        return (mine, True) if mine else (list(items[:1]), False)

    def together(self, action: Callable[[], T]) -> T:
        """Do something of each process's own; where one fails, all do.

        Raises:
            Exception: this process's own failure, else the first other's, of the same kind and with the same line.
        """
        if self.count == 1:
            return action()
        failure, done = None, []
        try:
            done.append(action())
        except Exception as e:  # noqa: BLE001  raised again below, once everybody knows
            failure = e
        known = failure and (as_ablation_error(failure) or failure)
        told = [t for t in self.gather([(type(known), str(known)) if known else None]) if t is not None]
        if failure is not None:
            raise failure
        if told:
            kind, line = told[0]
            error = kind.__new__(kind)
            error.args = (line,)
            raise error
        return done[0]

    def on_main(self, action: Callable[[], object]) -> None:
        """Let the main process do something, and wait until it is done."""
        self.together(action if self.main else lambda: None)

    @contextmanager
    def reporting(self) -> Iterator[None]:
        """Leave the line of a failure where the launcher finds it (torch's error file)."""
        try:
            yield
        except BaseException as e:
            if self.count > 1:
                from torch.distributed.elastic.multiprocessing.errors import ErrorHandler

                ErrorHandler().record_exception(Told(describe(e)[0]))
            raise

    def leave(self) -> None:
        """Part from the others, at an end that all have reached."""
        if self.count > 1:
            import torch.distributed as dist

            dist.destroy_process_group()


def join(runtime: Runtime) -> Processes:
    """Meet the processes that `training.launch` has started for this cell.

    Whoever outlives the launcher would train on without its locks: the kernel ends it with the launcher.

    Raises:
        InputError: this one was started alone, or among another number.
    """
    if runtime.num_processes == 1:
        return Processes()
    import torch.distributed as dist
    from accelerate import PartialState

    if not dist.is_torchelastic_launched():
        reason, action = "but this is a process of its own", "start it with `python -m training.launch FOLDER`"
        raise InputError("num_processes", runtime.num_processes, reason, action)
    prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    PartialState(cpu=not runtime.device.startswith("cuda"), timeout=PATIENCE)
    return agreed(runtime)


def agreed(runtime: Runtime) -> Processes:
    """Return this process among those that are there.

    Raises:
        InputError: their number is not what runtime.json says; each would take another share of the step.
    """
    import torch.distributed as dist

    there = dist.is_available() and dist.is_initialized()
    found = Processes(dist.get_world_size(), dist.get_rank()) if there else Processes()
    if found.count != runtime.num_processes:
        action = "start it with `python -m training.launch FOLDER`"
        raise InputError("num_processes", runtime.num_processes, f"{found.count} are running", action)
    return found
