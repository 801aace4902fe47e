"""The parent's side of the cage: one zygote, which forks a child for each program."""

import contextlib
import os
import signal
import socket
import struct
import subprocess
import sys
import sysconfig
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

from evaluation.errors import MachineError
from evaluation.judge.admission import Admission
from evaluation.judge.jobs import Checker, Execution, Job, JudgeFailed, OutOfMemory, ZygoteDied
from evaluation.judge.watch import ANSWER_TIMEOUT_S, Watch, count_oom_kills
from evaluation.judge.wire import decode

Cage = Literal["landlock", "no_landlock", "none"]
CHILD = Path(__file__).with_name("child.py")
START_TIMEOUT_S = 120.0
_PID = struct.Struct("<i")


class Zygote:
    """A caged process that forks a child for each job; used by one thread."""

    def __init__(self, numpy: bool, cage: Cage = "landlock") -> None:
        """Start it.

        Args:
            numpy: have numpy loaded.
            cage: `no_landlock` is as on a kernel that lacks it: programs then open no file; `none` has limits only.

        Raises:
            MachineError: a required part of the cage is missing here.
            ZygoteDied: it was killed meanwhile.
        """
        mine, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        site = _numpy_site() if numpy else ""
        argv = [sys.executable, "-s", "-P", "-S", "-B", str(CHILD), str(theirs.fileno()), cage]
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
        self.control, self.oom_kills, self.killed = mine, count_oom_kills(), 0
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
        insist = "run on Linux x86_64 with seccomp; or, where every program is trusted, set ABLATION_UNCAGED=1"
        raise MachineError("cage", "seccomp", why, insist)

    def close(self) -> None:
        """End the zygote and whatever it still runs."""
        self.control.close()
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()

    def run(self, job: Job, checker: Checker) -> Execution:
        """Run one job, in a child of its own, to its end, its limit or its first wrong value.

        Raises:
            JudgeFailed: no fault of the program.
        """
        with self.child() as child:
            return child.run(job, checker)

    @contextlib.contextmanager
    def child(self, admission: Admission | None = None) -> "Iterator[Child]":
        """Fork a child, and end it on the way out.

        Args:
            admission: bounds the memory of those that run at a time; None where nothing runs beside it.

        Raises:
            JudgeFailed: it could not be forked.
        """
        mine, theirs = socket.socketpair()
        with mine:
            with theirs:
                pid = self._ask(b"j", self.killed, theirs.fileno())
            self.killed = 0
            if pid < 0:
                raise JudgeFailed("no process could be forked")
            child = Child(self, pid, mine, admission)
            try:
                yield child
            finally:
                if admission is not None:
                    admission.leave(pid)
                if not child.reaped:
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(pid, signal.SIGKILL)
                    self.rest()  # of another child that ran meanwhile
                    self.killed = pid

    def rest(self) -> None:
        """Have the last child reaped: no other is coming soon."""
        if self.killed:
            with contextlib.suppress(OSError):
                self.control.send(b"w" + _PID.pack(self.killed))
            self.killed = 0

    def status_of(self, pid: int) -> int:
        """Reap a child that has ended; return its status, -1 if it has not ended after all."""
        return self._ask(b"s", pid)

    def _ask(self, kind: bytes, pid: int, fd: int | None = None) -> int:
        message = kind + _PID.pack(pid)
        try:
            if fd is not None:
                socket.send_fds(self.control, [message], [fd])
            else:
                self.control.send(message)
            answer = self.control.recv(4)
        except OSError as e:
            raise ZygoteDied(f"zygote: {e or type(e).__name__}") from e
        if len(answer) != 4:
            raise ZygoteDied("zygote: ended")
        return _PID.unpack(answer)[0]


class Child:
    """One forked process: it runs one program's suites, one after the other."""

    def __init__(self, zygote: Zygote, pid: int, sock: socket.socket, admission: Admission | None) -> None:
        self.zygote, self.pid, self.sock, self.admission = zygote, pid, sock, admission
        self.used = self.reaped = False
        self.watch: Watch | None = None

    def run(self, job: Job, checker: Checker) -> Execution:
        """Run one job; another may follow if this one is complete, or `settles`.

        Raises:
            JudgeFailed: no fault of the program.
        """
        self.watch = watch = Watch(self.pid, self.sock, job, checker, caged=self.used)
        self.used = True
        found = watch.watch(self.admission)
        if found is not None:
            return found
        status = self.zygote.status_of(self.pid)
        self.reaped = status >= 0
        try:
            return watch.ended(status, self.zygote.oom_kills)
        except OutOfMemory:
            self.zygote.oom_kills = count_oom_kills()
            raise

    def settles(self) -> bool:
        """After a job that was not right: say whether the child waits for another already."""
        return not self.reaped and self.watch is not None and self.watch.settles()


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
