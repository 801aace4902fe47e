"""Programs that speak for the harness: forged frames, frames that never end, jobs not taken, time hidden in threads."""

import contextlib
import marshal
import socket
import struct
import threading
import time
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from evaluation.judge import Judge
from evaluation.judge.jobs import Execution, Job
from evaluation.judge.oracles import Comparison
from evaluation.judge.watch import Watch
from evaluation.judge.wire import MAX_COLLISIONS, Malformed, decode
from evaluation.records import Outcome, Problem, Program

PROBLEM = Problem(
    problem_id="Forged/1",
    text="",
    entry_point="f",
    reference="def f(x):\n    return 4 * x\n",
    asserts=("assert f(2) == 8", "assert f(1) == 4", "assert f(5) == 20"),
    base_inputs=[[2], [1], [5]],
    plus_inputs=[[0], [10], [-3], [1000], [7]],
)
SUITES = ("reward", "both", "score")
WRITE = "import os, struct, time\ndef say(b):\n    for fd in range(3, 64):\n        try: return os.write(fd, b) and fd\n        except OSError: pass\n"


def judged(source, suites="both", problem=PROBLEM):
    with Judge([problem], suites=suites, workers=1) as judge:
        (verdict,) = judge.judge([Program(problem_id=problem.problem_id, source=source)])
    return verdict


class OnlyTrue:
    """Takes `True` for right, and nothing else."""

    def matches(self, index, payload):
        return 0

    def accepts(self, index, raw):
        return raw == b"vT"

    def accepts_in_full(self, index, raw):
        return raw == b"vT"


def value(raw):
    return struct.pack("<I", len(raw)) + raw


FRAMES = st.one_of(
    st.sampled_from(
        [b"c", b"r", b"d", b"e", b"eValueError", b"t", b"t" + value(b"vT"), b"t" + value(b"vF"), b"f", b"x"]
    ),
    st.binary(min_size=1, max_size=12),
    st.binary(max_size=8).map(lambda b: b"t" + b),
)


def heard(frames):
    """Return what is made of a child that says these frames, all of them at once, and goes."""
    mine, theirs = socket.socketpair()
    with mine, theirs:
        theirs.sendall(b"".join(struct.pack("<I", len(f)) + f for f in frames))
        theirs.shutdown(socket.SHUT_WR)
        job = Job(source="", entry_point="f", inputs=b"", limits_s=(1.0, 1.0), suite_limit_s=2.0)
        return Watch(0, mine, job, OnlyTrue(), caged=False).watch(None)


@given(st.lists(FRAMES, max_size=8))
@settings(max_examples=500, deadline=None)
def test_no_frames_but_the_right_values_in_order_pass(frames):
    found = heard(frames)
    right = [b"c", b"r", b"t" + value(b"vT"), b"t" + value(b"vT"), b"d"]
    said = [f for f in frames if not f.startswith(b"d")] if frames and frames[-1][:1] == b"d" else []
    if found is not None and found.complete:
        assert said == right[:-1] or said == [b"c", b"r", b"t" + 2 * value(b"vT")]
    assert found is None or found.complete == (found.detail == "")


def test_the_right_frames_pass():
    found = heard([b"c", b"r", b"t" + value(b"vT"), b"t" + value(b"vT"), b"d"])
    assert isinstance(found, Execution)
    assert found.complete


@pytest.mark.parametrize("suites", SUITES)
def test_an_empty_name_of_an_error_is_no_success(suites):
    """It was, for a time: what has no detail counted as complete."""
    source = WRITE + "say(b'\\x01\\0\\0\\0e')\nwhile True: time.sleep(9)\n"
    assert not judged(source, suites).passed


@given(kind=st.sampled_from([b"v", b"s", b"h", b"x", b""]), rest=st.binary(max_size=24))
@settings(max_examples=500, deadline=None)
def test_no_value_breaks_the_comparison(kind, rest):
    for entry_point in ("f", "similar_elements"):
        expected = b"s" + value(marshal.dumps({1}, 2)) + marshal.dumps((1,), 2) if entry_point != "f" else b"vT"
        comparison = Comparison(entry_point, "Mbpp", 0, [((1,), (1,))], [expected], bytes(1))
        assert comparison.accepts(0, kind + rest) in {True, False, None}


@pytest.mark.parametrize("drip", ["size", "bytes", "nothing"])
def test_a_large_value_comes_under_the_clock(drip):
    """Announced by its hash, then dripped, or worked on in the meantime."""
    says = {
        "size": "    for b in struct.pack('<I', 9): time.sleep(0.7); os.write(fd, bytes([b]))\n",
        "bytes": "    os.write(fd, struct.pack('<I', 1 << 25))\n    while True: os.write(fd, b'f'); time.sleep(0.3)\n",
        "nothing": "    time.sleep(99)\n",
    }[drip]
    hashed = (
        "    fd = say(struct.pack('<I', 38) + b't' + struct.pack('<I', 33) + b'h' + bytes(32))\n    os.read(fd, 1)\n"
    )
    began = time.monotonic()
    # A problem whose expected value is large as well, so that the parent asks for it in full.
    large = PROBLEM.replace(
        reference="def f(x):\n    return list(range(10**5, 2 * 10**5))\n", base_inputs=[[1]], plus_inputs=[[2]]
    )
    verdict = judged(f"{WRITE}def f(x):\n{hashed}{says}", problem=large)
    assert verdict.base is Outcome.TIMEOUT
    assert time.monotonic() - began < 20


def test_who_takes_no_second_job_fails_by_itself(caplog):
    """The values of base, then no reading of plus, whose inputs fill the socket."""
    problem = PROBLEM.replace(
        reference="def f(x):\n    return len(x)\n", base_inputs=[[[1]]], plus_inputs=[[list(range(200_000))]]
    )
    said = "struct.pack('<I', 11) + b't' + struct.pack('<I', 6) + b'vi' + struct.pack('<i', 1) + b'\\x01\\0\\0\\0d'"
    verdict = judged(f"{WRITE}def f(x):\n    say({said})\n    time.sleep(999)\n", problem=problem)
    assert verdict.plus in {Outcome.FAIL, Outcome.TIMEOUT}
    assert not verdict.errored


def test_time_is_that_of_all_threads():
    """The main thread waits in a call that the scheduler counts as waiting for a core; another thread works."""
    source = (
        "import ctypes, threading, time\n"
        "def f(x):\n"
        "    def work():\n"
        "        end = time.monotonic() + 6\n"
        "        while time.monotonic() < end: pass\n"
        "    t = [threading.Thread(target=work) for _ in range(4)]\n"
        "    for u in t: u.start()\n"
        "    while any(u.is_alive() for u in t): time.sleep(0)\n"
        "    return 4 * x\n"
    )
    assert judged(source).base is Outcome.TIMEOUT


@pytest.mark.parametrize("kind", [b"<", b">", b"{"])
def test_chosen_collisions_cost_nothing(kind):
    numbers = [marshal.dumps(k * (2**61 - 1), 2) for k in range(1, 40_000)]
    raw = kind + (
        b"".join(n + b"N" for n in numbers) + b"0"
        if kind == b"{"
        else struct.pack("<i", len(numbers)) + b"".join(numbers)
    )
    began = time.process_time()
    with pytest.raises(Malformed, match="collisions"):
        decode(raw)
    assert time.process_time() - began < 5
    few = {k * (2**61 - 1) for k in range(MAX_COLLISIONS)}
    assert decode(marshal.dumps(few, 2)) == few


def test_children_are_reaped_though_the_reference_runs_between_them():
    """A wrong large value has the reference answer once more, in a child beside the program's."""
    problem = PROBLEM.replace(
        reference="def f(x):\n    return list(range(x))\n", base_inputs=[[100_000]], plus_inputs=[[3]]
    )
    sources = [f"def f(x):\n    return list(range(x - 1)) + [{k}]\n" for k in range(6)]
    with Judge([problem], workers=1) as judge:
        verdicts = judge.judge([Program(problem_id=problem.problem_id, source=s) for s in sources])
        assert {v.base for v in verdicts} == {Outcome.FAIL}
        (zygote,) = judge.lanes.first.zygotes.values()
        listed = Path(f"/proc/{zygote.process.pid}/task/{zygote.process.pid}/children")
        end = time.monotonic() + 5
        while listed.read_text().split() and time.monotonic() < end:
            time.sleep(0.05)
        assert listed.read_text().split() == []


@pytest.mark.parametrize(
    ("source", "plus"),
    [
        ("import math\nseen = hasattr(math, 'been')\ndef f(x):\n    if x == 5: math.been = 1\n    return 4 * x if seen or x in (2, 1, 5) else -1\n", Outcome.FAIL),
        ("import math\nif hasattr(math, 'been'):\n    while True: pass\ndef f(x):\n    if x == 5: math.been = 1\n    return 4 * x\n", Outcome.PASS),
        ("import collections\ndef f(x):\n    if x in (0, 10) and isinstance(set(), collections.abc.Sequence): return -1\n    if x == 5: collections.abc.Sequence.register(set)\n    return 4 * x\n", Outcome.PASS),
        ("import typing\ndef f(x):\n    if x in (0, 10) and isinstance('', typing.SupportsInt): return -1\n    if x == 5: typing.SupportsInt.register(str)\n    return 4 * x\n", Outcome.PASS),
    ],
)  # fmt: skip
def test_what_base_leaves_behind_neither_helps_nor_harms_plus(source, plus):
    verdict = judged(source)
    assert (verdict.base, verdict.plus) == (Outcome.PASS, plus)


def test_waiting_to_settle_has_an_end():
    """A child that floods values after a wrong one is not listened to for ever."""
    mine, theirs = socket.socketpair()
    stop = threading.Event()

    def flood():
        theirs.settimeout(0.1)
        while not stop.is_set():
            with contextlib.suppress(OSError):
                theirs.sendall(b"\x02\0\0\0tA" * 1000)

    thread = threading.Thread(target=flood)
    thread.start()
    try:
        job = Job(source="", entry_point="f", inputs=b"", limits_s=(1.0,), suite_limit_s=2.0)
        began = time.monotonic()
        assert Watch(0, mine, job, OnlyTrue(), caged=False).settles() is False
        assert time.monotonic() - began < 5
    finally:
        stop.set()
        thread.join()
        mine.close()
        theirs.close()
