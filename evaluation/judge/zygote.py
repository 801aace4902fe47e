"""The parent's side of the cage: one zygote, one program at a time, and the clock that ends it.

Limits count the program's own time: wall time less what it spent ready but waiting for a core, read from outside
(/proc/PID/schedstat). Nothing the program does to signals, timers or clocks moves them.
"""

import contextlib
import marshal
import os
import select
import signal
import socket
import struct
import subprocess
import sys
import sysconfig
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from evaluation.errors import MachineError
from evaluation.judge.sandbox import MEMORY_BYTES
from evaluation.judge.wire import Malformed, decode

CHILD = Path(__file__).with_name("child.py")
START_TIMEOUT_S = 60.0
SLACK_S = 2.0
"""What EvalPlus allows a suite beyond its tests."""
MAX_ANSWER_BYTES = 512 << 20
_HEADER = struct.Struct("<I")


class ZygoteDied(OSError):
    """The zygote is gone: the harness failed, not the program."""


@dataclass(frozen=True)
class Job:
    """One program on one suite, as the child gets it: no expected value, no reference."""

    source: str
    mode: str
    """`calls` or `expressions`."""
    entry_point: str
    inputs: Sequence[Any]
    """Argument tuples, or expressions."""
    limits_s: Sequence[float]
    """Own time of each test."""
    suite_limit_s: float
    as_set: bool = False
    memory_bytes: int = MEMORY_BYTES
    timed: bool = False
    """Ask for the CPU time of each test (reference runs only)."""

    @property
    def numpy(self) -> bool:
        """Whether the program mentions numpy."""
        return "numpy" in self.source

    def payload(self) -> bytes:
        """Return the job in the wire format."""
        fields = {
            "source": self.source,
            "mode": self.mode,
            "entry_point": self.entry_point,
            "inputs": list(self.inputs),
            "as_set": self.as_set,
            "timed": self.timed,
            "memory": self.memory_bytes,
            "cpu_s": int(self.suite_limit_s) + 10,
            "numpy": self.numpy,
        }
        return marshal.dumps(fields, 2)


@dataclass(frozen=True)
class Execution:
    """What came out of one job."""

    num_right: int
    """Tests accepted before the first that was not."""
    complete: bool
    """Every test answered and accepted."""
    timed_out: bool
    contended: bool
    """The program waited for a core for a good part of its time."""
    seconds: float
    detail: str
    times_s: tuple[float, ...] = ()
    values: tuple[bytes, ...] = ()


class Zygote:
    """A caged process that forks a child for each job; used by one thread."""

    def __init__(self, numpy: bool) -> None:
        mine, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        site = _numpy_site() if numpy else ""
        argv = [sys.executable, "-I", "-S", "-B", str(CHILD), str(theirs.fileno()), "numpy" if numpy else "plain", site]
        self.process = subprocess.Popen(
            [*argv, *_readable(site)],
            env={"PYTHONHASHSEED": "0", "OPENBLAS_NUM_THREADS": "1"},
            cwd="/",
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            pass_fds=(theirs.fileno(),),
            start_new_session=True,
        )
        theirs.close()
        self.control = mine
        self.cage = self._wait_ready()

    def _wait_ready(self) -> dict[str, Any]:
        self.control.settimeout(START_TIMEOUT_S)
        try:
            raw = self.control.recv(4096)
        except TimeoutError:
            raw = b""
        self.control.settimeout(None)
        cage = decode(raw) if raw else {"missing": f"the cage did not start (exit {self.process.poll()})"}
        if "missing" in cage:
            self.close()
            raise MachineError("cage", "seccomp", str(cage["missing"]), "run on Linux x86_64 with seccomp")
        return cage

    def close(self) -> None:
        """End the zygote and whatever it still runs."""
        self.control.close()
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()

    def run(self, job: Job, accepts: Callable[[int, bytes], bool], keep_values: bool = False) -> Execution:
        """Run one job to its end, its limit or its first wrong value.

        Raises:
            ZygoteDied: there is no zygote any more.
        """
        mine, theirs = socket.socketpair()
        try:
            socket.send_fds(self.control, [b"j"], [theirs.fileno()])
            theirs.close()
            answer = self.control.recv(4)
            if len(answer) != 4:
                raise ZygoteDied("the zygote ended")
        except OSError as e:
            mine.close()
            raise ZygoteDied(str(e)) from e
        (pid,) = struct.unpack("<i", answer)
        try:
            return _Watch(pid, mine, job, accepts, keep_values).watch()
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
            mine.close()
            with contextlib.suppress(OSError):
                self.control.send(b"w" + struct.pack("<i", pid))


class _Watch:
    """Reads one child's frames against the clock."""

    def __init__(
        self, pid: int, sock: socket.socket, job: Job, accepts: Callable[[int, bytes], bool], keep: bool
    ) -> None:
        self.pid, self.sock, self.job, self.accepts, self.keep = pid, sock, job, accepts, keep
        self.started = self.mark = time.monotonic()
        self.delay_mark = 0.0
        self.ready = self.test_limited = False
        self.right = 0
        self.values: list[bytes] = []
        self.buffer = bytearray()
        self.received = 0

    def watch(self) -> Execution:
        try:
            payload = self.job.payload()
            self.sock.sendall(_HEADER.pack(len(payload)) + payload)
        except OSError:
            return self._end("ended before it read its job")
        while True:
            left = self._left()
            if left <= 0:
                what = f"test {self.right}" if self.test_limited else "suite"
                return self._end(f"{what}: time limit", timed_out=True)
            if not select.select([self.sock], [], [], left)[0]:
                continue
            try:
                part = self.sock.recv(1 << 20)
            except OSError:
                part = b""
            if not part:
                return self._end("ended without an answer")
            self.received += len(part)
            if self.received > MAX_ANSWER_BYTES:
                return self._end("answers too much")
            self.buffer += part
            done = self._frames()
            if done is not None:
                return done

    def _left(self) -> float:
        """Seconds to wait before the next look at the clock: 0 when a limit is reached."""
        now = time.monotonic()
        delay = _run_delay(self.pid) if now - self.mark > 0.05 else self.delay_mark
        suite = self.job.suite_limit_s - (now - self.started - delay)
        test, self.test_limited = suite, False
        if self.ready and self.right < len(self.job.limits_s):
            test = self.job.limits_s[self.right] - (now - self.mark - (delay - self.delay_mark))
            self.test_limited = test <= suite
        return max(0.0, min(suite, test, 1.0)) if min(suite, test) > 0 else 0.0

    def _frames(self) -> Execution | None:
        """Take every whole frame off the buffer."""
        while len(self.buffer) >= 4:
            (size,) = _HEADER.unpack_from(self.buffer)
            if len(self.buffer) < 4 + size:
                return None
            frame = bytes(self.buffer[4 : 4 + size])
            del self.buffer[: 4 + size]
            done = self._frame(frame[:1], frame[1:])
            if done is not None:
                return done
        return None

    def _frame(self, kind: bytes, content: bytes) -> Execution | None:
        now = time.monotonic()
        if now - self.mark > 0.05:
            self.delay_mark = _run_delay(self.pid)
        self.mark = now
        if kind == b"e":
            return self._end(content.decode("utf-8", "replace"))
        if kind == b"r":
            self.ready = True
            return None
        if kind == b"t":
            return self._batch(content)
        if kind == b"d" and self.right == len(self.job.inputs):
            return self._end("", times=_times(content, len(self.job.inputs)) if self.job.timed else ())
        return self._end("ended without an answer")

    def _batch(self, content: bytes) -> Execution | None:
        try:
            batch = decode(content)
        except Malformed:
            return self._end("malformed answer")
        for raw in batch if isinstance(batch, list) else ():
            if not isinstance(raw, bytes) or self.right >= len(self.job.inputs):
                return self._end("malformed answer")
            if self.keep:
                self.values.append(raw)
            if not self.accepts(self.right, raw):
                what = raw[1:].decode("utf-8", "replace") if raw[:1] == b"x" else "wrong answer"
                return self._end(f"test {self.right}: {what}")
            self.right += 1
        return None

    def _end(self, detail: str, timed_out: bool = False, times: tuple[float, ...] = ()) -> Execution:
        wall = time.monotonic() - self.started
        delay = _run_delay(self.pid) if wall > 0.05 else 0.0
        return Execution(
            num_right=self.right,
            complete=not detail,
            timed_out=timed_out,
            contended=delay > 0.2 * wall,
            seconds=max(0.0, wall - delay),
            detail=detail,
            times_s=times,
            values=tuple(self.values),
        )


def _times(content: bytes, count: int) -> tuple[float, ...]:
    times = decode(content)
    if not isinstance(times, list) or len(times) != count:
        raise Malformed("times")
    return tuple(float(t) for t in times)


def _run_delay(pid: int) -> float:
    """Return the seconds a process was ready but waited for a core; 0 where the kernel does not say."""
    try:
        return int(Path(f"/proc/{pid}/schedstat").read_text().split()[1]) / 1e9
    except (OSError, IndexError, ValueError):
        return 0.0


def _numpy_site() -> str:
    import numpy

    return str(Path(numpy.__file__).parent.parent)


def _readable(site: str) -> list[str]:
    """Folders that a program may read: the standard library, shared libraries, and numpy where it is asked for."""
    library = sysconfig.get_paths()["stdlib"]
    folders = [library, sysconfig.get_config_var("LIBDIR") or "", str(CHILD.parent), "/lib", "/lib64", "/usr/lib"]
    folders += ["/dev/urandom", "/dev/null", "/etc/localtime", "/usr/share/zoneinfo"]
    if site:
        folders += [f"{site}/numpy", f"{site}/numpy.libs"]
    return [f for f in folders if f]
