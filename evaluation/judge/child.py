"""The inside of the cage: a lean process that forks a child for each program. Standard library only.

    python -s -P -S -B child.py CONTROL_FD CAGE NUMPY_SITE READABLE...

CAGE is `landlock`, `no_landlock` (as on a kernel that lacks it), or `none`: limits only, where somebody insists.

The zygote holds no program, no input, no answer: each child reads its jobs from its own socket, which the parent made
and handed over, and writes back values only. Everything a program changes, it changes in its own child. A second suite
of the same program may follow in the same child: the program is defined anew for it.

Frames to the parent: `c` caged, the program starts; `r` it is defined, the tests start; `t` values of the next tests,
each with its length; `f` a large value in full, when asked; `d` all tests done; `e` the program could not be defined.
A value is one kind byte and its bytes: `v` marshal, `s` a set and the value it was made of, `h` hash of a large one,
`x` an exception's name.
"""

import builtins
import os
import sys

HERE = os.path.dirname(os.path.abspath(__file__))
sys.path.insert(0, HERE)

import sandbox  # pyright: ignore[reportMissingImports]

sys.path.remove(HERE)  # programs import from the standard library alone

# What programs import most; already there when they do. `random` would draw a new seed in every child.
at_fork, os.register_at_fork = os.register_at_fork, lambda **_: None
import random

os.register_at_fork = at_fork
import bisect, collections, copy, datetime, functools, gc, heapq, io, itertools, marshal, math, operator, re
import select, string, struct, time, typing
import signal, _blake2, _socket

DESCRIBED = "\0described"
SIZE = struct.Struct("<I")
FLUSH_S = 0.001
"""Values are sent together until they took this long, so that the parent knows which test is running."""
FULL_BYTES = 1 << 18
BATCH_BYTES = 1 << 16
CPU_S = 900
"""Only for a parent that has lost its clock: every limit of ours is shorter."""
RECURSION = 976
"""Leaves a program 969 levels of its own, as EvalPlus does when it runs from its command line (measured)."""
SCALARS = {int, float, str, bool, complex, type(None)}
ATOMS = SCALARS | {bytes}
VIEWS = {type(d.keys()): "dict_keys" for d in ({}, collections.OrderedDict())}
VIEWS |= {type(d.items()): "dict_items" for d in ({}, collections.OrderedDict())}
MAPPING = type(type.__dict__)
_dumps, _now, _write, _read, _exit = marshal.dumps, time.perf_counter, os.write, os.read, os._exit
_pack, _cpu, _blake2b, _modules = SIZE.pack, time.process_time, _blake2.blake2b, sys.modules


class Sink(io.StringIO):
    """Standard streams as EvalPlus has them, new for each call: what is written stays inside, reading fails."""

    def read(self, *_, **__):
        """Fail."""
        raise OSError

    readline = readlines = __next__ = read

    def readable(self):
        """Say no."""
        return False


def plain(value, depth=0):
    """Return `value` as builtins that marshal writes; anything else as a description of it."""
    kind = type(value)
    if kind in ATOMS:
        return value
    if depth > 300:
        return (DESCRIBED, "opaque", "deep")
    if kind in (list, tuple, set, frozenset):
        if SCALARS.issuperset(map(type, value)):
            return value
        items = [plain(x, depth + 1) for x in value]
        return items if kind is list else kind(items)
    if kind is dict:
        return {plain(k, depth + 1): plain(v, depth + 1) for k, v in value.items()}
    return describe(value, kind, depth)


def describe(value, kind, depth):
    """Describe the values that a comparison knows besides plain builtins."""
    name = kind.__name__
    if kind is bytearray:
        return (DESCRIBED, name, bytes(value))
    if kind is range:
        return (DESCRIBED, name, (value.start, value.stop, value.step))
    if kind in VIEWS:
        return (DESCRIBED, VIEWS[kind], [plain(x, depth + 1) for x in value])
    if kind is MAPPING:
        return (DESCRIBED, "subclass", plain(value.copy(), depth + 1))
    numpy = _modules.get("numpy")
    if numpy is not None and kind is numpy.ndarray and value.size < 1_000_000:
        return (DESCRIBED, "numpy", (value.dtype.str, value.shape, plain(value.ravel().tolist(), depth + 1)))
    if numpy is not None and kind.__module__ == "numpy" and isinstance(value, numpy.generic):
        return (DESCRIBED, "numpy", (value.dtype.str, None, value.item()))
    fractions, decimal = _modules.get("fractions"), _modules.get("decimal")
    for base in kind.__mro__:
        if kind.__eq__ is not base.__eq__ or kind.__hash__ is not base.__hash__:
            continue
        if base in CONTENT:
            return (DESCRIBED, "subclass", CONTENT[base](value, depth + 1))
        if base in COLLECTED:
            return (DESCRIBED, base.__name__, COLLECTED[base](value, depth + 1))
        if fractions is not None and base is fractions.Fraction:
            return (DESCRIBED, "Fraction", (base.numerator.fget(value), base.denominator.fget(value)))
        if decimal is not None and base is decimal.Decimal:
            return (DESCRIBED, "Decimal", base.__str__(value))
    return (DESCRIBED, "opaque", name)


def items_of(value, depth):
    """Return a dictionary's items, whatever a subclass makes of iterating."""
    return {plain(k, depth): plain(v, depth) for k, v in dict.items(value)}


# What is inside an instance of a subclass, as comparison sees it: none of the subclass's own methods has a say.
CONTENT = {
    int: lambda value, _: int.__index__(value),
    float: lambda value, _: float.__float__(value),
    complex: lambda value, _: complex.__pos__(value),
    str: lambda value, _: str.__str__(value),
    tuple: lambda value, depth: tuple([plain(x, depth) for x in tuple.__iter__(value)]),
    list: lambda value, depth: [plain(x, depth) for x in list.__iter__(value)],
    set: lambda value, depth: {plain(x, depth) for x in set.__iter__(value)},
    frozenset: lambda value, depth: frozenset([plain(x, depth) for x in frozenset.__iter__(value)]),
    dict: items_of,
}
COLLECTED = {
    collections.Counter: items_of,
    collections.OrderedDict: lambda value, depth: {
        plain(k, depth): plain(dict.__getitem__(value, k), depth) for k in collections.OrderedDict.__iter__(value)
    },
    collections.defaultdict: items_of,
    collections.deque: lambda value, depth: [plain(x, depth) for x in collections.deque.__iter__(value)],
}


def encode(value, as_set):
    """Return the bytes of one test's value; where the oracle compares sets, the set's and the value's."""
    if not as_set:
        return b"v" + dumped(value)
    # An iterator is empty then, and of another type than any expected value, as under EvalPlus.
    unique = dumped(set(value))
    return b"s" + _pack(len(unique)) + unique + dumped(value)


def dumped(value):
    """Return a value's bytes; something opaque where it has none."""
    try:
        return _dumps(plain(value), 2)
    except (TypeError, ValueError, RecursionError):
        return _dumps((DESCRIBED, "opaque", ""), 2)


def raised(error):
    """Return an exception's name as a value: it equals nothing."""
    name = type(error).__name__
    return b"x" + (name.encode()[:80] if type(name) is str and name.isidentifier() else b"exception")


def is_floats(value):
    """Say whether EvalPlus compares with a tolerance from this expected value on."""
    if isinstance(value, float):
        return True
    if isinstance(value, list | tuple) and value:
        return all(isinstance(x, float) for x in value)
    return getattr(getattr(value, "dtype", None), "name", "") in ("float64", "float32")


def equals_itself(value):
    """Say whether equal bytes mean equal values: not where a NaN or something opaque is inside."""
    kind = type(value)
    if kind in (float, complex):
        return value == value
    if kind in (list, tuple, set, frozenset):
        return not (kind is tuple and value[:2] == (DESCRIBED, "opaque")) and all(map(equals_itself, value))
    return all(map(equals_itself, value.values())) if kind is dict else True


def read_exactly(fd, size):
    """Read `size` bytes or end."""
    parts = []
    while size:
        part = _read(fd, min(size, 1 << 20))
        if not part:
            _exit(0)
        parts.append(part)
        size -= len(part)
    return b"".join(parts)


def send(fd, kind, payload, last=b""):
    """Write one frame; with `last`, which is one already, behind it."""
    data = memoryview(_pack(len(payload) + 1) + kind + payload + last)
    while data:
        data = data[_write(fd, data) :]


def read_job(fd):
    """Read the next job: what to do, and the marshalled inputs; end when there is none."""
    job = marshal.loads(read_exactly(fd, SIZE.unpack(read_exactly(fd, 4))[0]))
    return job, marshal.loads(read_exactly(fd, SIZE.unpack(read_exactly(fd, 4))[0]))


def run_program(fd, own_filter):
    """Put on what a program wears, then run its suites, one job each, until no other comes."""
    job, inputs = read_job(fd)
    sys.__stdin__ = sys.__stdout__ = sys.__stderr__ = None
    sandbox.limit_child(job["memory"], CPU_S)
    if own_filter is not None:
        own_filter.install(os.getpid())
    send(fd, b"c", b"")
    scope = {}
    while run_suite(fd, job, inputs, scope):
        job, inputs = read_job(fd)
        scope.clear()  # a large global would take the next suite's memory


def compiled(source, name):
    """Return the code of a program, compiled once for both of its suites."""
    if source not in CODE:
        CODE[source] = compile(source, name, "exec", dont_inherit=True)
    return CODE[source]


def run_suite(fd, job, inputs, scope):
    """Define the program in an empty scope, run one suite, send its values; return whether it got to the end."""
    source, setup = job["source"], job["setup"]
    sys.stdin = sys.stdout = sys.stderr = Sink()
    random.seed(0)  # one program, one verdict
    if "numpy" in _modules:
        _modules["numpy"].random.seed(0)
    sys.setrecursionlimit(RECURSION)
    try:
        exec(compiled(source, "<string>"), scope)
        if setup:
            exec(compiled(setup, "<setup>"), scope)
        function = None if job["expressions"] else scope[job["entry_point"]]
    except BaseException as e:
        send(fd, b"e", raised(e)[1:])
        return False
    send(fd, b"r", b"")
    if job["expressions"]:
        inputs = [(expression, scope) for expression in inputs]
        function = evaluate
    run_tests(fd, job, function, inputs)
    return True


def evaluate(expression, scope):
    """Return the value of one expression in the program's namespace."""
    return eval(compile(expression, "<assert>", "eval", dont_inherit=True), scope)


def run_tests(fd, job, function, inputs):
    """Call the function on each input, in order, and send the values; the inputs are not copied (as EvalPlus)."""
    as_set, slow, timed, whole = job["as_set"], job["slow"], job["timed"], job["whole"]
    batch, size, started, times, flags = [], 0, _now(), [], bytearray()
    for index, arguments in enumerate(inputs):
        alone = slow and index in slow
        if batch and alone:
            send(fd, b"t", b"".join(batch))
            batch, size, started = [], 0, _now()
        sys.stdin = sys.stdout = sys.stderr = Sink()
        before, value = _cpu() if timed else 0.0, None
        try:
            value = function(*arguments)
            raw = b"v" + _dumps(value, 2) if type(value) in ATOMS and not as_set else encode(value, as_set)
        except BaseException as e:
            raw = raised(e)
        if timed:
            times.append(_cpu() - before)
            flags.append(is_floats(value) + 2 * equals_itself(plain(value)))
        if len(raw) > FULL_BYTES and not whole:
            entry = b"h" + _blake2b(raw, digest_size=32).digest()
            send(fd, b"t", b"".join([*batch, _pack(len(entry)), entry]))
            if read_exactly(fd, 1) == b"n":
                send(fd, b"f", raw)
                read_exactly(fd, 1)
            batch, size, started = [], 0, _now()
            continue
        batch.append(_pack(len(raw)))
        batch.append(raw)
        size += len(raw)
        if alone or size > BATCH_BYTES or _now() - started > FLUSH_S:
            send(fd, b"t", b"".join(batch))
            batch, size, started = [], 0, _now()
    end = _dumps([times, bytes(flags)], 2) if timed else b""
    if batch:
        send(fd, b"t", b"".join(batch), _pack(len(end) + 1) + b"d" + end)
    else:
        send(fd, b"d", end)


def receive(control):
    """Return the parent's next message and the descriptor that came with it; end when the parent is gone."""
    while True:
        try:
            message, ancillary, _, _ = control.recvmsg(16, _socket.CMSG_SPACE(4))
            break
        except TimeoutError:
            if os.getppid() != PARENT:
                _exit(0)
    fds = [struct.unpack_from("i", data)[0] for _, kind, data in ancillary if kind == _socket.SCM_RIGHTS]
    if not message:
        _exit(0)
    return message, fds[0] if fds else -1


def status_of(pid):
    """Return how a child ended; -1 if it has not within a moment."""
    for _ in range(100):
        ended, status = os.waitpid(pid, os.WNOHANG)
        if ended:
            return status
        time.sleep(0.002)
    return -1


def serve(control, child_filter):
    """Fork a child for each socket that the parent hands over, after reaping the one it has killed; tell its pid."""
    control.settimeout(5.0)
    while True:
        message, fd = receive(control)
        kind, pid = message[:1], struct.unpack("<i", message[1:5])[0]
        if kind == b"s":
            control.send(struct.pack("<i", status_of(pid)))
            continue
        if pid:
            os.waitpid(pid, 0)
        if kind == b"w":
            continue
        try:
            pid = os.fork()
        except OSError:
            pid = -1
        if pid == 0:
            try:
                sandbox.prctl(sandbox.PR_SET_PDEATHSIG, signal.SIGKILL)
                control.close()
                gc.enable()
                run_program(fd, child_filter)
            except BaseException:
                pass
            finally:
                _exit(0)
        os.close(fd)
        control.send(struct.pack("<i", pid))


def main():
    """Put on the cage, then serve."""
    cage, site, stdlib, readable = *sys.argv[2:5], sys.argv[5:]
    sys.argv[:] = [""]
    if cage != "none":
        sandbox.require_x86_64()
    if site:
        sys.path.append(site)
        import numpy

        numpy.random.seed(0)
    sandbox.be_ended_first()
    namespaces = cage != "none" and sandbox.leave_namespaces()
    landlock = 0
    if cage == "landlock":
        within = [os.path.join(stdlib, name) for name in os.listdir(stdlib) if not name.endswith("-packages")]
        landlock = sandbox.restrict_files([stdlib], [*within, *readable])
    if not landlock:
        preload(bool(site))
    user = sandbox.drop_user(stdlib)
    sandbox.limit_zygote(threads=user or namespaces)
    child_filter = None
    if cage != "none":
        sandbox.drop_capabilities()
        sandbox.prctl(sandbox.PR_SET_DUMPABLE, 0)
        sandbox.zygote_filter().install()
        child_filter = sandbox.child_filter(files=landlock > 0)
    builtins.exit = builtins.quit = builtins.help = None  # as under EvalPlus
    compile("", "", "exec")  # makes the types of ast, which each child would make again: two fifths of its cost
    gc.collect()
    gc.freeze()
    gc.disable()
    CONTROL.send(
        _dumps({"seccomp": child_filter is not None, "landlock": landlock, "user": user, "namespaces": namespaces}, 2)
    )
    serve(CONTROL, child_filter)


def preload(numpy):
    """Import what programs may want, where no file can be opened later."""
    import abc, array, ast, asyncio, base64, calendar, cmath, concurrent.futures.thread, contextlib, csv, ctypes
    import dataclasses, decimal, difflib, enum, fractions, hashlib, inspect, json, locale, numbers, pprint
    import queue, statistics, textwrap, threading, traceback, types, unicodedata, unittest, uuid, warnings, weakref

    if numpy:
        import numpy.fft, numpy.linalg, numpy.ma, numpy.polynomial, numpy.random


CODE = {}
PARENT = os.getppid()

if __name__ == "__main__":
    CONTROL = _socket.socket(fileno=int(sys.argv[1]))
    try:
        main()
    except sandbox.CageMissing as e:
        CONTROL.send(_dumps({"missing": str(e)}, 2))
        _exit(3)
