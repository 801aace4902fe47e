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
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Protocol

from evaluation.errors import MachineError
from evaluation.judge.wire import Malformed, decode

CHILD = Path(__file__).with_name("child.py")
START_TIMEOUT_S, ANSWER_TIMEOUT_S = 120.0, 60.0
SLACK_S = 2.0
"""What EvalPlus allows a suite beyond its tests."""
SLOW_TEST_S = 1.0
"""Tests with a longer limit are told to the child, so that their clock starts with them."""
MAX_FRAME_BYTES, MAX_FULL_BYTES = 1 << 20, 1 << 30
EVALPLUS_MEMORY_BYTES = 4 << 30
_LOOK_S = 0.05
"""Below this the clock is not worth a look at the scheduler's statistics."""
_SIZE = struct.Struct("<I")
_PID = struct.Struct("<i")


class JudgeFailed(Exception):
    """The harness failed, not the program; the program must be tried again."""


class ZygoteDied(JudgeFailed):
    """The zygote is gone or does not answer."""


class OutOfMemory(JudgeFailed):
    """The kernel killed the child for want of memory on the machine; it should be tried again alone."""


class Checker(Protocol):
    """Decides whether values are right."""

    def matches(self, index: int, payload: bytes) -> int:
        """Return how many tests from `index` on the batch answers byte for byte, 0 if it must be looked at."""
        ...

    def accepts(self, index: int, raw: bytes) -> bool | None:
        """Return whether one value is right; None if a large one is needed in full."""
        ...

    def accepts_in_full(self, index: int, raw: bytes) -> bool:
        """Return whether a large value is right."""
        ...


@dataclass(frozen=True)
class Job:
    """One program on one suite, as the child gets it: no expected value, no reference."""

    source: str
    entry_point: str
    inputs: bytes
    """Marshalled list: argument tuples, or expressions."""
    limits_s: Sequence[float]
    """Own time of each test."""
    suite_limit_s: float
    setup: str = ""
    """Code that runs after the program, in its namespace."""
    expressions: bool = False
    as_set: bool = False
    timed: bool = False
    """Ask for the processor time and the flags of each value (reference runs only)."""
    whole: bool = False
    """Send large values in full (reference runs only)."""

    @property
    def num_tests(self) -> int:
        """How many values must come."""
        return len(self.limits_s)

    def payload(self) -> bytes:
        """Return the job in the wire format."""
        head = marshal.dumps(
            {
                "source": self.source,
                "setup": self.setup,
                "entry_point": self.entry_point,
                "expressions": self.expressions,
                "as_set": self.as_set,
                "slow": [i for i, limit in enumerate(self.limits_s) if limit > SLOW_TEST_S],
                "timed": self.timed,
                "whole": self.whole,
                "memory": memory_limit(),
                "cpu_s": int(self.suite_limit_s) + 2,
            },
            2,
        )
        return b"".join((_SIZE.pack(len(head)), head, _SIZE.pack(len(self.inputs)), self.inputs))


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
    flags: bytes = b""


class Zygote:
    """A caged process that forks a child for each job; used by one thread."""

    def __init__(self, numpy: bool, landlock: bool = True) -> None:
        """Start it.

        Args:
            numpy: have numpy loaded.
            landlock: False does without, as on a kernel that lacks it: programs then open no file at all.

        Raises:
            MachineError: a required part of the cage is missing here.
            ZygoteDied: it was killed meanwhile.
        """
        mine, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        site = _numpy_site() if numpy else ""
        argv = [sys.executable, "-I", "-S", "-B", str(CHILD), str(theirs.fileno()), "landlock" if landlock else "none"]
        self.process = subprocess.Popen(
            [*argv, site, sysconfig.get_paths()["stdlib"], *_readable(site)],
            env={"PYTHONHASHSEED": "0", "OPENBLAS_NUM_THREADS": "1"},
            cwd="/",
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            pass_fds=(theirs.fileno(),),
            start_new_session=True,
        )
        theirs.close()
        self.control, self.oom_kills = mine, _oom_kills()
        self.cage = self._wait_ready()

    def _wait_ready(self) -> dict[str, Any]:
        self.control.settimeout(START_TIMEOUT_S)
        try:
            raw = self.control.recv(4096)
        except OSError:
            raw = b""
        self.control.settimeout(ANSWER_TIMEOUT_S)
        if raw:
            cage = decode(raw)
            if "missing" not in cage:
                return cage
            why = str(cage["missing"])
        else:
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.process.wait(1)
            code = self.process.returncode
            if code in (-signal.SIGKILL, -signal.SIGTERM):  # somebody's doing, such as an out-of-memory killer's
                self.close()
                raise ZygoteDied(f"killed while it started (signal {-code})")
            why = f"the cage did not start (exit {code})"
        self.close()
        raise MachineError("cage", "seccomp", why, "run on Linux x86_64 with seccomp")

    def close(self) -> None:
        """End the zygote and whatever it still runs."""
        self.control.close()
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()

    def run(self, job: Job, checker: Checker) -> Execution:
        """Run one job to its end, its limit or its first wrong value.

        Raises:
            JudgeFailed: no fault of the program.
        """
        mine, theirs = socket.socketpair()
        with mine:
            with theirs:
                pid = self._ask(b"j", theirs.fileno())
            if pid < 0:
                raise JudgeFailed("no process could be forked")
            reaped = False
            try:
                watch = _Watch(pid, mine, job, checker, self.oom_kills)
                found = watch.watch()
                if found is None:
                    status = self._ask(b"s", pid=pid)
                    reaped = status >= 0
                    found = watch.ended(status)
                return found
            except OutOfMemory:
                self.oom_kills = _oom_kills()
                raise
            finally:
                if not reaped:
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(pid, signal.SIGKILL)
                    with contextlib.suppress(OSError):
                        self.control.send(b"w" + _PID.pack(pid))

    def _ask(self, message: bytes, fd: int | None = None, pid: int = 0) -> int:
        try:
            if fd is not None:
                socket.send_fds(self.control, [message], [fd])
            else:
                self.control.send(message + _PID.pack(pid))
            answer = self.control.recv(4)
        except OSError as e:
            raise ZygoteDied(f"zygote: {e or type(e).__name__}") from e
        if len(answer) != 4:
            raise ZygoteDied("zygote: ended")
        return _PID.unpack(answer)[0]


class _Watch:
    """Reads one child's frames against the clock."""

    def __init__(self, pid: int, sock: socket.socket, job: Job, checker: Checker, oom_kills: int) -> None:
        self.pid, self.sock, self.job, self.checker = pid, sock, job, checker
        self.started = self.mark = time.monotonic()
        self.delay_mark = 0.0
        """The scheduler's delay at `mark`, the start of the running test's clock."""
        self.caged = self.ready = self.test_limited = False
        self.right, self.oom_kills = 0, oom_kills
        self.buffer = bytearray()

    def watch(self) -> Execution | None:
        """Return what came of it; None if the child closed its socket before it was done."""
        self.sock.settimeout(ANSWER_TIMEOUT_S)
        try:
            self.sock.sendall(self.job.payload())
        except TimeoutError as e:
            raise JudgeFailed("the child does not take its job") from e
        except OSError:
            return None
        while True:
            left = self._left()
            if left <= 0:
                what = f"test {self.right}" if self.test_limited else "suite"
                return self._end(f"{what}: time limit", timed_out=True)
            if not select.select([self.sock], [], [], left)[0]:
                continue
            try:
                part = self.sock.recv(1 << 18)
            except OSError:
                part = b""
            if not part:
                return None
            self.buffer += part
            done = self._frames(MAX_FRAME_BYTES if not self.job.whole else MAX_FULL_BYTES)
            if done is not None:
                return done

    def ended(self, status: int) -> Execution:
        """Return what a child that went away before it was done makes of its job.

        Raises:
            JudgeFailed: it went before the program began, or for want of memory on the machine.
        """
        if not self.caged:
            raise JudgeFailed(f"the child ended before the program began (status {status})")
        ended_by = os.WTERMSIG(status) if status > 0 and os.WIFSIGNALED(status) else 0
        if ended_by == signal.SIGKILL and _oom_kills() > self.oom_kills:
            raise OutOfMemory("the machine ran out of memory")
        if ended_by == signal.SIGXCPU:
            return self._end("suite: time limit", timed_out=True)
        return self._end("ended without an answer")

    def _left(self) -> float:
        """Return the seconds to wait before the next look at the clock: 0 when a limit is reached."""
        now = time.monotonic()
        delay = _run_delay(self.pid) if now - self.mark > _LOOK_S else self.delay_mark
        suite = self.job.suite_limit_s - (now - self.started - delay)
        test, self.test_limited = suite, False
        if self.ready and self.right < self.job.num_tests:
            test = self.job.limits_s[self.right] - (now - self.mark - (delay - self.delay_mark))
            self.test_limited = test <= suite
        return max(0.0, min(suite, test, 1.0))

    def _frames(self, longest: int) -> Execution | None:
        """Take every whole frame off the buffer."""
        at = 0
        while len(self.buffer) - at >= 4:
            (size,) = _SIZE.unpack_from(self.buffer, at)
            if not 1 <= size <= longest:
                return self._end("malformed answer")
            if len(self.buffer) - at < 4 + size:
                break
            kind, content = self.buffer[at + 4 : at + 5], bytes(self.buffer[at + 5 : at + 4 + size])
            at += 4 + size
            done = self._frame(bytes(kind), content)
            if done is not None:
                return done
        del self.buffer[:at]
        return None

    def _frame(self, kind: bytes, content: bytes) -> Execution | None:
        """Take one frame. Each kind comes once and in order, so that no forged frame can set a clock back."""
        if kind == b"c" and not self.caged:
            self.caged = True
            return None
        if kind == b"e" and self.caged and not self.ready:
            return self._end(content[:80].decode("ascii", "replace"))
        if kind == b"r" and self.caged and not self.ready:
            self.ready = True
            self._start_clock()
            return None
        if kind == b"t" and self.ready:
            return self._batch(content)
        if kind == b"d" and self.ready and self.right == self.job.num_tests:
            return self._end("", end=content)
        return self._end("malformed answer")

    def _start_clock(self) -> None:
        now = time.monotonic()
        if now - self.mark > _LOOK_S:
            self.delay_mark = _run_delay(self.pid)
        self.mark = now

    def _batch(self, content: bytes) -> Execution | None:
        before = self.right
        self._start_clock()
        self.right += self.checker.matches(self.right, content)
        if self.right > before:
            return self._answer_hash(content)
        at = 0
        while at < len(content):
            size = _SIZE.unpack_from(content, at)[0] if len(content) - at >= 4 else 0
            raw = content[at + 4 : at + 4 + size]
            at += 4 + size
            if not raw or len(raw) < size or self.right >= self.job.num_tests:
                return self._end("malformed answer")
            right = self.checker.accepts(self.right, raw)
            if right is None:
                right = at == len(content) and self._in_full()
            if not right:
                what = raw[1:].decode("ascii", "replace") if raw[:1] == b"x" else "wrong answer"
                return self._end(f"test {self.right}: {what}")
            self.right += 1
        return self._answer_hash(content) if self.right > before else self._end("malformed answer")

    def _answer_hash(self, content: bytes) -> None:
        """Let a child go on that waits after a hash; others never read, and a byte in their socket changes nothing."""
        if content[-37:-32] == _SIZE.pack(33) + b"h":
            with contextlib.suppress(OSError):
                self.sock.sendall(b"g")

    def _in_full(self) -> bool:
        """Ask for the large value whose hash just came, and return whether it is right; the program's clock stands."""
        paused = time.monotonic()
        try:
            self.sock.sendall(b"n")
            size = _SIZE.unpack(self._read(4))[0]
            if not 1 <= size <= MAX_FULL_BYTES:
                return False
            frame = self._read(size)
        except (OSError, EOFError):
            return False
        right = frame[:1] == b"f" and self.checker.accepts_in_full(self.right, frame[1:])
        self.started += time.monotonic() - paused
        self._start_clock()
        return right

    def _read(self, size: int) -> bytes:
        parts = []
        while size:
            part = self.sock.recv(min(size, 1 << 20))
            if not part:
                raise EOFError
            parts.append(part)
            size -= len(part)
        return b"".join(parts)

    def _end(self, detail: str, timed_out: bool = False, end: bytes = b"") -> Execution:
        wall = time.monotonic() - self.started
        delay = _run_delay(self.pid) if wall > _LOOK_S else 0.0
        times, flags = _measured(end, self.job.num_tests) if self.job.timed and end else ((), b"")
        return Execution(
            num_right=self.right,
            complete=not detail,
            timed_out=timed_out,
            contended=delay > 0.2 * wall,
            seconds=max(0.0, wall - delay),
            detail=detail,
            times_s=times,
            flags=flags,
        )


def _measured(content: bytes, count: int) -> tuple[tuple[float, ...], bytes]:
    times, flags = decode(content)
    if len(times) != count or len(flags) != count:
        raise Malformed("times")
    return tuple(float(t) for t in times), bytes(flags)


def _run_delay(pid: int) -> float:
    """Return the seconds a process was ready but waited for a core; 0 where the kernel does not say."""
    try:
        return int(Path(f"/proc/{pid}/schedstat").read_text().split()[1]) / 1e9
    except (OSError, IndexError, ValueError):
        return 0.0


def _oom_kills() -> int:
    """Return how many processes the kernel has killed for want of memory."""
    try:
        return int(Path("/proc/vmstat").read_text().partition("oom_kill ")[2].split()[0])
    except (OSError, IndexError, ValueError):
        return 0


@cache
def memory_limit() -> int:
    """Return the bytes of address space of a program: EvalPlus's 4 GiB, on small machines half of what there is."""
    found = [os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")]
    for name in ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes"):
        with contextlib.suppress(OSError, ValueError):
            found.append(int(Path(name).read_text()))
    return min(EVALPLUS_MEMORY_BYTES, min(found) // 2)


def _numpy_site() -> str:
    import numpy

    return str(Path(numpy.__file__).parent.parent)


def _readable(site: str) -> list[str]:
    """List what a program may read beside the standard library: shared libraries, time zones, numpy if asked for.

    Not the folders beside them: `site-packages` may hold this project, whose generated problems have their references.
    """
    found = ["/lib", "/lib64", "/usr/lib", "/usr/lib64", "/etc/ld.so.cache", "/etc/localtime", "/usr/share/zoneinfo"]
    found += ["/dev/urandom", "/dev/null"]
    found += [str(p) for p in Path(sysconfig.get_config_var("LIBDIR") or "/lib").glob("lib*.so*")][:2000]
    return [*found, f"{site}/numpy", f"{site}/numpy.libs"] if site else found
