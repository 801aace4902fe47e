"""Memory: every program has EvalPlus's 4 GiB of address space, and one at a time may really take more than its share.

What a program sees does not depend on how many run beside it. One that grows beyond its lane's share while another has
done so is stopped, and judged again alone; should both grow faster than anyone looks, the kernel ends a program, never
the judge (`oom_score_adj`), and that one is judged again alone as well.
"""

import threading
from pathlib import Path

from evaluation.judge.jobs import OutOfMemory, machine_memory, memory_limit

PAGE_BYTES = 4096
LOOK_EVERY_S = 0.1


class Admission:
    """Shared by the lanes of a judge."""

    def __init__(self, lanes: int) -> None:
        """Half of the machine is for all programs together."""
        self.share = machine_memory() // 2 // lanes
        self.lock = threading.Lock()
        self.holder: int | None = None

    @property
    def unbounded(self) -> bool:
        """No program can grow beyond its share."""
        return self.share >= memory_limit()

    def check(self, pid: int) -> None:
        """Let a program be large if no other is.

        Raises:
            OutOfMemory: it is, and another one is.
        """
        if self.unbounded or _resident(pid) <= self.share:
            return
        with self.lock:
            self.holder = self.holder or pid
            if self.holder != pid:
                raise OutOfMemory("two programs need more than their share of memory")

    def leave(self, pid: int) -> None:
        """A program has ended."""
        with self.lock:
            if self.holder == pid:
                self.holder = None


def _resident(pid: int) -> int:
    try:
        return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * PAGE_BYTES
    except (OSError, IndexError, ValueError):
        return 0
