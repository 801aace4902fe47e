"""The clock and the ear of the judge: one child's frames, read against its limits.

Limits count the program's own time, read from outside: wall time less what its main thread spent ready but waiting for
a core (/proc/PID/schedstat), or the processor time of all its threads (/proc/PID/stat) where that is more. Nothing the
program does to signals, clocks or threads moves them.
"""

import contextlib
import os
import signal
import socket
import time
from pathlib import Path

from evaluation.judge.admission import LOOK_EVERY_S, Admission
from evaluation.judge.jobs import SIZE, Checker, Execution, Job, JudgeFailed, OutOfMemory, memory_limit
from evaluation.judge.wire import HASHED_BYTES, MAX_FULL_BYTES, Malformed, decode

ANSWER_TIMEOUT_S = 60.0
MAX_FRAME_BYTES, MAX_WHOLE_BYTES = 1 << 20, 1 << 30
"""Of a program's frame, and of a reference's."""
ENDED = "ended without an answer"
_SETTLE_S = 0.005
_SETTLE_ALL_S = 0.1
_NEXT_JOB_S = 10.0
"""A child that is through with a suite reads its next job at once."""
_TICKS = os.sysconf("SC_CLK_TCK")
_LOOK_S = 0.05
"""Below this the clock is not worth a look at the scheduler's statistics."""


class Watch:
    """Reads the frames of one job against the clock."""

    def __init__(self, pid: int, sock: socket.socket, job: Job, checker: Checker, *, caged: bool) -> None:
        """Start the clock.

        Args:
            pid: of the child.
            sock: what it reads its job from and writes its values to.
            job: what it is to do.
            checker: says which values are right.
            caged: it has done a job before, and is in its cage.
        """
        self.pid, self.sock, self.job, self.checker = pid, sock, job, checker
        self.started = self.mark = time.monotonic()
        self.delay_before = self.delay_mark = run_delay(pid) if caged else 0.0
        """The scheduler's delay before this job, and at `mark`, the start of the running test's clock."""
        self.cpu_before = self.cpu_mark = self.cpu_seen = cpu_seconds(pid) if caged else 0.0
        self.cpu_seen_at = self.started
        self.caged, self.ready, self.test_limited = caged, False, False
        self.right = 0
        self.buffer = bytearray()

    def watch(self, admission: Admission | None) -> Execution | None:
        """Send the job; return what came of it, None if the child closed its socket before it was done.

        Raises:
            JudgeFailed: no fault of the program, such as too little memory beside another.
        """
        self.sock.settimeout(_NEXT_JOB_S if self.caged else ANSWER_TIMEOUT_S)
        try:
            self.sock.sendall(self.job.payload(memory_limit()))
        except TimeoutError as e:
            if self.caged:
                return self._end("takes no other job")
            raise JudgeFailed("the child does not take its job") from e
        except OSError:
            return None
        bounded = admission is not None and not admission.unbounded
        look_at = self.started + LOOK_EVERY_S
        while True:
            left = self._left()
            if bounded and admission is not None and time.monotonic() >= look_at:
                admission.check(self.pid)
                look_at = time.monotonic() + LOOK_EVERY_S
            if left <= 0:
                what = f"test {self.right}" if self.test_limited else "suite"
                return self._end(f"{what}: time limit", timed_out=True)
            self.sock.settimeout(min(left, LOOK_EVERY_S) if bounded else left)
            try:
                part = self.sock.recv(1 << 18)
            except TimeoutError:
                continue
            except OSError:
                part = b""
            if not part:
                return None
            self.buffer += part
            done = self._frames(MAX_FRAME_BYTES if not self.job.whole else MAX_WHOLE_BYTES)
            if done is not None:
                return done

    def ended(self, status: int, oom_kills: int) -> Execution:
        """Return what a child that went away before it was done makes of its job.

        Args:
            status: of its end, as from wait.
            oom_kills: of the machine, before it began.

        Raises:
            JudgeFailed: it went before the program began, or for want of memory on the machine.
        """
        if not self.caged:
            raise JudgeFailed(f"the child ended before the program began (status {status})")
        ended_by = os.WTERMSIG(status) if status > 0 and os.WIFSIGNALED(status) else 0
        if ended_by == signal.SIGKILL and count_oom_kills() > oom_kills:
            raise OutOfMemory("the machine ran out of memory")
        if ended_by == signal.SIGXCPU:
            return self._end("suite: time limit", timed_out=True)
        return self._end(ENDED)

    def _left(self) -> float:
        """Return the seconds to wait before the next look at the clock: 0 when a limit is reached."""
        now, delay, cpu = time.monotonic(), self.delay_mark, self.cpu_mark
        if now - self.mark > _LOOK_S:
            delay, cpu = run_delay(self.pid), self._cpu(now)
        suite = self.job.suite_limit_s
        suite -= max(now - self.started - (delay - self.delay_before), cpu - self.cpu_before)
        test, self.test_limited = suite, False
        if self.ready and self.right < self.job.num_tests:
            own = max(now - self.mark - (delay - self.delay_mark), cpu - self.cpu_mark)
            test = self.job.limits_s[self.right] - own
            self.test_limited = test <= suite
        return max(0.0, min(suite, test, 1.0))

    def _cpu(self, now: float) -> float:
        self.cpu_seen, self.cpu_seen_at = cpu_seconds(self.pid), now
        return self.cpu_seen

    def _frames(self, longest: int) -> Execution | None:
        """Take every whole frame off the buffer."""
        at = 0
        while len(self.buffer) - at >= 4:
            (size,) = SIZE.unpack_from(self.buffer, at)
            if not 1 <= size <= longest:
                return self._end("malformed answer")
            if len(self.buffer) - at < 4 + size:
                break
            kind, content = self.buffer[at + 4 : at + 5], bytes(self.buffer[at + 5 : at + 4 + size])
            at += 4 + size
            done = self._frame(bytes(kind), content)
            if done is not None:
                del self.buffer[:at]
                return done if not self.buffer or not done.complete else self._end("malformed answer")
        del self.buffer[:at]
        return None

    def settles(self) -> bool:
        """After a wrong value: say whether the child is through with its other tests already, and waits for a job."""
        end = time.monotonic() + _SETTLE_ALL_S
        while time.monotonic() < end:
            at = 0
            while len(self.buffer) - at >= 4:
                (size,) = SIZE.unpack_from(self.buffer, at)
                if not 1 <= size <= MAX_FRAME_BYTES:
                    return False
                if len(self.buffer) - at < 4 + size:
                    break
                kind, at = self.buffer[at + 4 : at + 5], at + 4 + size
                if kind != b"t":
                    return kind == b"d" and at == len(self.buffer)
            del self.buffer[:at]
            self.sock.settimeout(_SETTLE_S)
            try:
                part = self.sock.recv(1 << 18)
            except OSError:
                return False
            if not part:
                return False
            self.buffer += part
        return False

    def _frame(self, kind: bytes, content: bytes) -> Execution | None:
        """Take one frame. Each kind comes once and in order, so that no forged frame can set a clock back."""
        if kind == b"c" and not self.caged:
            self.caged = True
            return None
        if kind == b"e" and self.caged and not self.ready:
            return self._end(content[:80].decode("ascii", "replace") or "exception")
        if kind == b"r" and self.caged and not self.ready:
            self.ready = True
            self._start_clock()
            return None
        if kind == b"t" and self.ready:
            return self._batch(content)
        if kind == b"d" and self.ready and self.right == self.job.num_tests:
            return self._end("", complete=True, end=content)
        return self._end("malformed answer")

    def _start_clock(self) -> None:
        now = time.monotonic()
        if now - self.mark > _LOOK_S:
            self.delay_mark, self.cpu_mark = run_delay(self.pid), self._cpu(now)
        else:  # not worth a look: one thread has used at most the time since the last
            self.cpu_mark = self.cpu_seen + now - self.cpu_seen_at
        self.mark = now

    def _batch(self, content: bytes) -> Execution | None:
        before = self.right
        self._start_clock()
        self.right += self.checker.matches(self.right, content)
        if self.right > before:
            return self._answer_hash(content)
        at = 0
        while at < len(content):
            size = SIZE.unpack_from(content, at)[0] if len(content) - at >= 4 else 0
            raw = content[at + 4 : at + 4 + size]
            at += 4 + size
            if not raw or len(raw) < size or self.right >= self.job.num_tests:
                return self._end("malformed answer")
            right = self.checker.accepts(self.right, raw)
            if right is None:
                right = at == len(content) and self._in_full()
            if not right:
                if raw[:1] == b"h" and self._left() <= 0:  # while it was to come in full
                    return self._end(f"test {self.right}: time limit", timed_out=True)
                what = raw[1:81].decode("ascii", "replace") if raw[:1] == b"x" else "wrong answer"
                return self._end(f"test {self.right}: {what}")
            self.right += 1
        return self._answer_hash(content) if self.right > before else self._end("malformed answer")

    def _answer_hash(self, content: bytes) -> None:
        """Let a child go on that waits after a hash; others never read, and a byte in their socket changes nothing."""
        if content[-37:-32] == SIZE.pack(33) + b"h":
            with contextlib.suppress(OSError):
                self.sock.sendall(b"g")

    def _in_full(self) -> bool:
        """Ask for the large value whose hash just came, and return whether it is right.

        Its bytes come under the test's clock, for the program may do anything until they are there; the clock stands
        only while they are compared.
        """
        try:
            self.sock.sendall(b"n")
            size = SIZE.unpack(self._read(4))[0]
            if not HASHED_BYTES < size <= MAX_FULL_BYTES:
                return False
            frame = self._read(size)
        except (OSError, EOFError):
            return False
        paused = time.monotonic()
        right = frame[:1] == b"f" and self.checker.accepts_in_full(self.right, frame[1:])
        self.started += time.monotonic() - paused
        self._start_clock()
        return right

    def _read(self, size: int) -> bytes:
        parts = []
        while size:
            left = self._left()
            if left <= 0:
                raise TimeoutError
            self.sock.settimeout(left)
            try:
                part = self.sock.recv(min(size, 1 << 20))
            except TimeoutError:
                continue
            if not part:
                raise EOFError
            parts.append(part)
            size -= len(part)
        return b"".join(parts)

    def _end(self, detail: str, *, complete: bool = False, timed_out: bool = False, end: bytes = b"") -> Execution:
        wall = time.monotonic() - self.started
        delay = max(0.0, run_delay(self.pid) - self.delay_before) if wall > _LOOK_S else 0.0
        times, flags = _measured(end, self.job.num_tests) if self.job.timed and end else ((), b"")
        return Execution(
            num_right=self.right,
            complete=complete,
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


def run_delay(pid: int) -> float:
    """Return the seconds a process was ready but waited for a core; 0 where the kernel does not say."""
    try:
        return int(Path(f"/proc/{pid}/schedstat").read_text().split()[1]) / 1e9
    except (OSError, IndexError, ValueError):
        return 0.0


def cpu_seconds(pid: int) -> float:
    """Return the processor time that all threads of a process have used; 0 where the kernel does not say."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / _TICKS
    except (OSError, IndexError, ValueError):
        return 0.0


def count_oom_kills() -> int:
    """Return how many processes the kernel has killed for want of memory."""
    try:
        return int(Path("/proc/vmstat").read_text().partition("oom_kill ")[2].split()[0])
    except (OSError, IndexError, ValueError):
        return 0
