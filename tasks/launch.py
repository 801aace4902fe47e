"""Child processes: own session, on a leash, ended with their group on every way out; one GPU and one folder each."""

import contextlib
import fcntl
import logging
import math
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from evaluation.errors import AblationError, IncompleteError, InputError, MachineError, Stopped
from tasks.settings import child_environment, settings

logger = logging.getLogger(__name__)

STOPPING = threading.Event()
"""Set when the flow is being torn down: every child gets SIGTERM and time to save."""
GRACE_S = 20.0
"""Below the 30 s after which a Prefect worker kills the flow's own process."""
INTERNAL, STOPPED = 70, 75
ATTEMPTS = 3


class ChildFailed(IncompleteError):
    """A child ended without having done its work, and starting it again will not help."""


class ChildDied(AblationError):
    """A child was killed, or broke inside: starting it again goes on from where it was."""

    exit_code = INTERNAL


def run_child(
    argv: Sequence[str],
    *,
    log: Path,
    env: dict[str, str] | None = None,
    keep_fds: Sequence[int] = (),
    on_tick: Callable[[], None] | None = None,
    tick_s: float = 0.5,
    grace_s: float = GRACE_S,
) -> int:
    """Run a command to its end and return its exit code (128 + n for signal n); its output goes to `log`.

    Whatever exception unwinds this frame, the child's group is gone afterwards.

    Raises:
        Stopped: STOPPING was set.
    """
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("ab") as out:
        child = subprocess.Popen(
            [sys.executable, "-m", "tasks.leash", *argv],
            stdout=out,
            stderr=out,
            stdin=subprocess.DEVNULL,
            env=child_environment() | (env or {}),
            start_new_session=True,
            pass_fds=tuple(keep_fds),
        )
        try:
            while True:
                try:
                    code = child.wait(tick_s)
                    return code if code >= 0 else 128 - code
                except subprocess.TimeoutExpired:
                    pass
                if on_tick:
                    on_tick()
                if STOPPING.is_set():
                    raise Stopped("signal=TERM: the flow is stopping; the same command goes on")
        finally:
            _end_group(child, grace_s)


def _end_group(child: subprocess.Popen[bytes], grace_s: float) -> None:
    """Send SIGTERM to what is left of the group, then SIGKILL."""
    for what, wait_s in ((signal.SIGTERM, grace_s), (signal.SIGKILL, 10.0)):
        try:
            os.killpg(child.pid, what)
        except (ProcessLookupError, PermissionError):
            return
        with contextlib.suppress(subprocess.TimeoutExpired):
            child.wait(wait_s)


def run_to_end(
    argv: Sequence[str],
    *,
    log: Path,
    env: dict[str, str] | None = None,
    keep_fds: Sequence[int] = (),
    on_tick: Callable[[], None] | None = None,
) -> None:
    """Run a child until it has done its work; deaths by signal, 70 and 75 are tried again, 1, 2 and 3 never.

    Raises:
        InputError, MachineError, ChildFailed: the child's own line.
        ChildDied: it died every time.
        Stopped: the flow is being torn down.
    """
    for attempt in range(1, ATTEMPTS + 1):
        start = log.stat().st_size if log.is_file() else 0
        code = run_child(argv, log=log, env=env, keep_fds=keep_fds, on_tick=on_tick)
        if code == 0:
            return
        line = error_line(log, start)
        if code == STOPPED and line and line.startswith("end_by="):
            raise Stopped(line)
        if code in (1, 2, 3):
            raise _as_error(code, line or f"child={code}: failed; read {log}")
        logger.warning("%s ended with %d (attempt %d of %d); read %s", argv[-1], code, attempt, ATTEMPTS, log)
    raise ChildDied(f"child={code}: {line or 'died'}; read {log}")


def error_line(log: Path, start: int = 0) -> str | None:
    """Return the text after the last `error: ` that a child wrote to its log, from byte `start` on."""
    if not log.is_file():
        return None
    lines = log.read_bytes()[start:].decode("utf-8", errors="replace").splitlines()
    return next((x.removeprefix("error: ") for x in reversed(lines[-200:]) if x.startswith("error: ")), None)


def _as_error(code: int, line: str) -> AblationError:
    field, _, rest = line.partition("=")
    value, _, rest = rest.partition(": ")
    reason, _, action = rest.partition("; ")
    if code == InputError.exit_code:
        return InputError(field, value, reason, action)
    if code == MachineError.exit_code:
        return MachineError(field, value, reason, action)
    return ChildFailed(line)


@contextlib.contextmanager
def locked(path: Path, patience_s: float = math.inf) -> Iterator[int]:
    """Hold a lock file; whoever holds it is waited for. Yields the descriptor, which a child may inherit.

    The kernel frees it when the last holder ends, so a killed flow's trainer, still saving, is waited for too.

    Raises:
        InputError: it was held all the time.
        Stopped: STOPPING was set while waiting.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    end = time.monotonic() + patience_s
    with path.open("a") as f:  # what its holder has written stays
        while True:
            try:
                fcntl.flock(f, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > end:
                    what = "another run is at work in this folder"
                    raise InputError("runs", path.parent, what, "wait for it, or give another --runs") from None
                if STOPPING.wait(0.2):
                    raise Stopped(f"signal=TERM: stopped while {path} was held") from None
        yield f.fileno()


@contextlib.contextmanager
def on_device(needs_gpu: bool, count: int = 1) -> Iterator[tuple[dict[str, str], tuple[int, ...]]]:
    """Hold what a child runs on; yields its environment and the descriptors to hand down.

    Args:
        needs_gpu: False where a core will do, and nothing is held.
        count: GPUs of the child.

    Raises:
        MachineError: GPUs are needed and this host has not as many.
        Stopped: STOPPING was set while waiting.
    """
    if not needs_gpu:
        yield {}, ()
        return
    here = settings()
    if not here.gpus:
        raise MachineError("gpu", "none", "this host has no GPU", "run it on one that has")
    if len(here.gpus) < count:
        raise MachineError("gpu", len(here.gpus), f"a cell takes {count} here", "lower ABLATION_GPUS_PER_CELL")
    with some_gpus(here.gpus, here.locks, count) as held:
        yield held


@contextlib.contextmanager
def some_gpus(gpus: Sequence[str], folder: Path, count: int = 1) -> Iterator[tuple[dict[str, str], tuple[int, ...]]]:
    """Hold `count` free GPUs of this host by lock files; yields their environment and the descriptors to hand down.

    All or none, so that nobody waits with a GPU in hand; one tries at a time, or two could each take half for ever.

    Raises:
        Stopped: STOPPING was set while waiting.
    """
    folder.mkdir(parents=True, exist_ok=True)
    while not STOPPING.is_set():
        with contextlib.ExitStack() as held:
            with (folder / "gpus.lock").open("w") as turn:
                fcntl.flock(turn, fcntl.LOCK_EX)  # for as long as it takes to look at every GPU
                taken = _free(gpus, folder, count, held)
            if len(taken) == count:
                yield {"CUDA_VISIBLE_DEVICES": ",".join(taken)}, tuple(taken.values())
                return
        time.sleep(0.5)
    raise Stopped("signal=TERM: stopped while waiting for a GPU")


def _free(gpus: Sequence[str], folder: Path, count: int, held: contextlib.ExitStack) -> dict[str, int]:
    """Lock the first `count` free GPUs, or as many as there are; return the descriptor of each."""
    taken: dict[str, int] = {}
    for gpu in gpus:
        if len(taken) == count:
            break
        f = (folder / f"gpu{gpu}.lock").open("w")
        try:
            fcntl.flock(f, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            f.close()
            continue
        taken[gpu] = held.enter_context(f).fileno()
    return taken
