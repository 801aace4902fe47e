"""The inside of the cage: a lean process that forks a child for each program. Standard library only.

    python -I -S -B child.py CONTROL_FD READABLE...

The zygote holds no program, no input, no answer: each child reads its job from its own socket, which the parent made
and handed over, and writes back values only. Everything a program changes, it changes in its own child.
"""

import gc
import marshal
import os
import signal
import socket
import struct
import sys
import time

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))


# What programs import most; already there when they do.
import bisect
import collections
import fractions
import io
import random

import sandbox  # pyright: ignore[reportMissingImports]

DESCRIBED = "\0described"
HEADER = struct.Struct("<I")
FLUSH_S = 0.001
"""Answers are sent together until a test takes this long, so that the parent knows which test is running."""
SCALARS = {int, float, str, bool, complex, type(None)}
_dumps, _now, _exit = marshal.dumps, time.perf_counter, os._exit


def plain(value, depth=0):
    """Return `value` as builtins that marshal writes; anything else as a description of it."""
    kind = type(value)
    if kind in SCALARS or kind is bytes:
        return value
    if depth > 200:
        return (DESCRIBED, "opaque", "deep")
    if kind in (list, tuple, set, frozenset):
        if all(type(x) in SCALARS for x in value):
            return value
        items = [plain(x, depth + 1) for x in value]
        return items if kind is list else kind(items)
    if kind is dict:
        return {plain(k, depth + 1): plain(v, depth + 1) for k, v in value.items()}
    return describe(value, kind, depth)


def describe(value, kind, depth):
    """Describe the values that a comparison knows besides plain builtins."""
    name = kind.__name__
    if kind in (bytearray,):
        return (DESCRIBED, name, bytes(value))
    if kind in (collections.Counter, collections.OrderedDict, collections.defaultdict):
        return (DESCRIBED, name, {plain(k, depth + 1): plain(v, depth + 1) for k, v in dict.items(value)})
    if kind is collections.deque:
        return (DESCRIBED, name, [plain(x, depth + 1) for x in value])
    if kind is range:
        return (DESCRIBED, name, (value.start, value.stop, value.step))
    if kind in (type({}.keys()), type({}.items())):
        return (DESCRIBED, name, [plain(x, depth + 1) for x in value])
    if kind is fractions.Fraction:
        return (DESCRIBED, name, (value.numerator, value.denominator))
    numpy = sys.modules.get("numpy")
    if numpy is not None and kind is numpy.ndarray and value.size < 1_000_000:
        return (DESCRIBED, "numpy", (value.dtype.str, value.shape, value.tolist()))
    if numpy is not None and isinstance(value, numpy.generic) and kind.__module__ == "numpy":
        return (DESCRIBED, "numpy", (value.dtype.str, None, value.item()))
    for base in (bool, int, float, str, tuple, list, dict, set, frozenset):
        if base in kind.__mro__ and kind.__eq__ is base.__eq__:
            return (DESCRIBED, "subclass", plain(base(value), depth + 1))
    return (DESCRIBED, "opaque", name)


def answer(value, as_set):
    """Return the bytes of one test's value; where the oracle compares sets, of the pair (value, set of it)."""
    try:
        if as_set:
            if not isinstance(value, (list, tuple, set, frozenset, dict, str)):
                value = list(value)
            return b"v" + _dumps((plain(value), plain(set(value))), 2)
        return b"v" + _dumps(plain(value), 2)
    except (ValueError, TypeError, RecursionError) as e:
        return b"x" + type(e).__name__.encode()


def read_exactly(fd, size):
    """Read `size` bytes or end."""
    parts = []
    while size:
        part = os.read(fd, min(size, 1 << 20))
        if not part:
            _exit(0)
        parts.append(part)
        size -= len(part)
    return b"".join(parts)


def send(fd, payload, write=os.write, pack=HEADER.pack):
    """Write one frame."""
    data = pack(len(payload)) + payload
    while data:
        data = data[write(fd, data) :]


def run_program(fd):
    """Read one job, run it, send its values; never returns."""
    (size,) = HEADER.unpack(read_exactly(fd, 4))
    job = marshal.loads(read_exactly(fd, size))
    null = io.StringIO("")
    sys.stdin, sys.stdout, sys.stderr = null, io.StringIO(), io.StringIO()
    sys.setrecursionlimit(RECURSION)
    limit_bytes, cpu_s = job["memory"], job["cpu_s"]
    if job["numpy"]:
        import numpy
    sandbox.limit(limit_bytes, cpu_s)
    sandbox.install(sandbox.child_filter(os.getpid()))
    signal.signal(signal.SIGINT, signal.default_int_handler)
    scope = {}
    try:
        exec(compile(job["source"], "<program>", "exec"), scope)
        if job["mode"] == "expressions":
            return run_expressions(fd, job, scope)
        function = scope[job["entry_point"]]
    except BaseException as e:
        send(fd, b"e" + type(e).__name__.encode("utf-8", "replace")[:80])
        return
    send(fd, b"r")
    run_tests(fd, function, job["inputs"], job["as_set"], job["timed"])


RECURSION = 1000


def run_tests(fd, function, inputs, as_set, timed):
    """Call the function on each input and send the values, in order."""
    batch, size, started, times = [], 0, _now(), []
    for arguments in inputs:
        before = time.process_time() if timed else 0.0
        try:
            value = answer(function(*arguments), as_set)
        except BaseException as e:
            value = b"x" + type(e).__name__.encode("utf-8", "replace")[:80]
        if timed:
            times.append(time.process_time() - before)
        if len(value) > FULL_BYTES:
            value = digest(value)
        batch.append(value)
        size += len(value)
        if _now() - started > FLUSH_S or size > 1 << 16:
            send(fd, b"t" + _dumps(batch, 2))
            batch, size, started = [], 0, _now()
    if batch:
        send(fd, b"t" + _dumps(batch, 2))
    send(fd, b"d" + (_dumps(times, 2) if timed else b""))


FULL_BYTES = 1 << 18


def digest(value):
    """Return a large value's hash in its place."""
    import hashlib

    return b"h" + hashlib.blake2b(value, digest_size=32).digest()


def run_expressions(fd, job, scope):
    """Evaluate expressions of asserts in the program's namespace and send their values."""
    send(fd, b"r")
    batch = []
    for code in job["inputs"]:
        try:
            value = answer(eval(compile(code, "<assert>", "eval"), scope), False)
        except BaseException as e:
            value = b"x" + type(e).__name__.encode("utf-8", "replace")[:80]
        batch.append(value)
        send(fd, b"t" + _dumps(batch, 2))
        batch = []
    send(fd, b"d")


def serve(control):
    """Fork a child for each socket that the parent hands over; tell its pid, and reap it when the parent says so."""
    while True:
        message, fds, _, _ = socket.recv_fds(control, 16, 1)
        if not message:
            return
        if message[:1] == b"w":
            os.waitpid(struct.unpack("<i", message[1:5])[0], 0)
            continue
        fd = fds[0]
        pid = os.fork()
        if pid == 0:
            try:
                sandbox.prctl(sandbox.PR_SET_PDEATHSIG, signal.SIGKILL)
                control.close()
                run_program(fd)
            except BaseException:
                pass
            finally:
                _exit(0)
        os.close(fd)
        control.send(struct.pack("<i", pid))


def main():
    """Put on the cage, then serve."""
    control = socket.socket(fileno=int(sys.argv[1]))
    numpy = sys.argv[2] == "numpy"
    sandbox.prctl(sandbox.PR_SET_PDEATHSIG, signal.SIGKILL)
    if numpy:
        sys.path.append(sys.argv[3])
        import numpy as _numpy
    landlock = sandbox.restrict_files(sys.argv[4:])
    dropped = sandbox.drop_user(os.path.dirname(os.__file__))
    sandbox.prctl(sandbox.PR_SET_PDEATHSIG, signal.SIGKILL)  # changing user clears it
    sandbox.prctl(sandbox.PR_SET_DUMPABLE, 0)
    sandbox.install(sandbox.zygote_filter())
    gc.collect()
    gc.freeze()
    control.send(marshal.dumps({"landlock": landlock, "user": dropped, "seccomp": True}, 2))
    serve(control)


if __name__ == "__main__":
    try:
        main()
    except sandbox.CageMissing as e:
        socket.socket(fileno=int(sys.argv[1])).send(marshal.dumps({"missing": str(e)}, 2))
        sys.exit(3)
