"""python deployments/worker.py --pool gpu [--limit 8]: a Prefect worker whose runs save when it must end.

Told to stop, Prefect's own worker kills its runs: nothing is saved, and the server believes for minutes that they run.
Here SIGTERM (`systemctl stop`, `docker stop`, Slurm's warning, a machine that is taken back) stops the worker where it
is, so that it takes nothing new; then its runs are told: cells save, the server learns at once that the runs have
crashed, and whoever wants them starts them elsewhere, from there. The worker ends last.

Exit codes: 75 after a signal; else the worker's own, once the runs that it left have ended.
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
    # A session of its own: Ctrl-C, and a signal to the whole group, come to us alone.
    command = [sys.executable, "-m", "prefect", "worker", "start", "--pool", args.pool, *limit]
    worker = subprocess.Popen(command, start_new_session=True)
    try:
        while worker.poll() is None or runs(worker):
            time.sleep(0.5)
        return worker.returncode if worker.returncode >= 0 else 128 - worker.returncode
    except (Told, KeyboardInterrupt):
        for sign in (signal.SIGTERM, signal.SIGINT):
            signal.signal(sign, signal.SIG_IGN)
        end(worker)
        return STOPPED


def _tell(*_: object) -> None:
    raise Told


def end(worker: "subprocess.Popen[bytes]") -> None:
    """End the worker's runs, then the worker: SIGTERM once each, and SIGKILL to what is left after the grace."""
    over = time.monotonic() + GRACE_S
    _send(worker.pid, signal.SIGSTOP)  # on SIGTERM it would kill its runs
    told: set[int] = set()
    while (left := runs(worker)) and time.monotonic() < over:
        for pid in left - told:
            _send(pid, signal.SIGTERM)
        told |= left
        time.sleep(0.1)
    for pid in left:
        _send(pid, signal.SIGKILL)
    for sign in (signal.SIGTERM, signal.SIGCONT):  # in this order: it must not go on before it knows
        _send(worker.pid, sign)
    try:
        worker.wait(max(1.0, over - time.monotonic()))
    except subprocess.TimeoutExpired:
        worker.kill()


def runs(worker: "subprocess.Popen[bytes]") -> set[int]:
    """Return the worker's children and those of ours that it left; what of ours has ended is waited for."""
    me, found = os.getpid(), set()
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            state, parent = (entry / "stat").read_text().rpartition(")")[2].split()[:2]
        except OSError:
            continue  # it ended while we looked
        pid = int(entry.name)
        if int(parent) not in (me, worker.pid) or pid == worker.pid:
            continue
        if state != "Z":
            found.add(pid)
        elif int(parent) == me:
            os.waitpid(pid, os.WNOHANG)
    return found


def _send(pid: int, sign: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, sign)


if __name__ == "__main__":
    sys.exit(main())
