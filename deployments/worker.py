"""python deployments/worker.py --pool gpu [--limit 8]: a Prefect worker that takes its runs along when it must end.

Prefect's own worker leaves its runs behind when it is told to stop. That is right where they can go on without it, and
wrong where everything ends with it: a container, a Slurm job, a machine that is taken back. Here SIGTERM stops the
worker, so that it takes nothing new, then its runs: cells save, the server learns at once that the runs have crashed,
and whoever wants them starts them elsewhere, from there.

Exit codes: 75 after a signal; else the worker's own, once its runs have ended.
"""

import argparse
import contextlib
import ctypes
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

PR_SET_CHILD_SUBREAPER = 36
GRACE_S = 60.0
"""For worker and runs together; a trainer has 20 s to save. Whoever stops us must wait a little longer."""
STOPPED = 75


class Told(BaseException):
    """SIGTERM or SIGINT has come."""


def main(argv: list[str] | None = None) -> int:
    """Run the worker to its end, or to ours; return the exit code."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--pool", required=True)
    parser.add_argument("--limit", type=int, help="runs at a time; default: as many as come")
    args = parser.parse_args(argv)
    limit = [] if args.limit is None else ["--limit", str(args.limit)]
    # What the worker leaves behind becomes our child, and none of anybody else.
    ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1)
    # Prefect's worker stops itself by SIGINT, which a shell's `&` lets its children ignore.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGTERM, _tell)
    worker = subprocess.Popen([sys.executable, "-m", "prefect", "worker", "start", "--pool", args.pool, *limit])
    try:
        while worker.poll() is None or children(worker):
            time.sleep(0.2)
        return worker.returncode if worker.returncode >= 0 else 128 - worker.returncode
    except (Told, KeyboardInterrupt):
        for sign in (signal.SIGTERM, signal.SIGINT):
            signal.signal(sign, signal.SIG_IGN)
        end(worker)
        return STOPPED


def _tell(*_: object) -> None:
    raise Told


def end(worker: "subprocess.Popen[bytes]") -> None:
    """End the worker, then everything that it has left, with SIGTERM once and SIGKILL when the grace is over."""
    over = time.monotonic() + GRACE_S
    told: set[int] = set()
    while time.monotonic() < over:
        left = {worker.pid} if worker.poll() is None else children(worker)
        if not left:
            return
        for pid in left - told:
            _send(pid, signal.SIGTERM)
        told |= left
        time.sleep(0.1)
    for pid in children(worker):
        _send(pid, signal.SIGKILL)


def children(worker: "subprocess.Popen[bytes]") -> set[int]:
    """Return our children that live; those that the worker left, and that have ended, are waited for."""
    me, found = os.getpid(), set()
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            state, parent = (entry / "stat").read_text().rpartition(")")[2].split()[:2]
        except OSError:
            continue  # it ended while we looked
        pid = int(entry.name)
        if int(parent) != me:
            continue
        if state != "Z":
            found.add(pid)
        elif pid != worker.pid:
            os.waitpid(pid, os.WNOHANG)
    return found


def _send(pid: int, sign: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, sign)


if __name__ == "__main__":
    sys.exit(main())
