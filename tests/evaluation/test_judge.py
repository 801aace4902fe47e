"""The judge's verdicts: what counts as solved, what does not, and that nothing but values decides."""

import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from evaluation.judge import Judge
from evaluation.judge.audit import audit
from evaluation.judge.jobs import machine_memory
from evaluation.problems import load_benchmark
from evaluation.problems.mbpp import load_mbpp
from evaluation.records import Outcome, Problem, Program

SHARED = Path(__file__).resolve().parents[2].parent / "shared"
EXCEPTED = {"Mbpp/61", "Mbpp/160", "Mbpp/271", "Mbpp/389", "Mbpp/599", "Mbpp/566"}
HEAVY = {f"Mbpp/{i}" for i in (123, 255, 271, 389, 392, 437, 590, 592, 599, 603, 160, 61, 765, 164, 84, 162)}

needs_data = pytest.mark.skipif(not SHARED.is_dir(), reason="the data files are not beside the checkout")


def problem(entry_point="f", asserts=("assert f(2) == 4", "assert f(3) == 6"), **more):
    fields = {"problem_id": "Test/1", "text": "double", "reference": "def f(x):\n    return 2 * x\n"}
    return Problem(**{**fields, "entry_point": entry_point, "asserts": tuple(asserts), **more})


def verdict(source, p=None, suites="both"):
    p = p or problem()
    with Judge([p], suites=suites) as judge:
        return judge.judge([Program(problem_id=p.problem_id, source=source)])[0]


@pytest.fixture(scope="module")
def mbpp_plus():
    return {
        p.problem_id: p
        for p in load_benchmark(
            "mbpp_plus", str(SHARED / "data/mbpp.jsonl"), str(SHARED / "data/MbppPlus-v0.2.0.jsonl")
        )
    }


@pytest.fixture(scope="module")
def cache(tmp_path_factory):
    return tmp_path_factory.mktemp("references")


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("def f(x):\n    return 2 * x\n", Outcome.PASS),
        ("def f(x):\n    return x + 2\n", Outcome.FAIL),
        ("def f(x):\n    raise KeyError(x)\n", Outcome.FAIL),
        ("def f(x)\n    return 2 * x\n", Outcome.FAIL),
        ("", Outcome.FAIL),
        ("def g(x):\n    return 2 * x\n", Outcome.FAIL),
        ("def f(x):\n    return None\n", Outcome.FAIL),
        ("import os\nos._exit(0)\n", Outcome.FAIL),
        ("raise SystemExit(0)\n", Outcome.FAIL),
        ("import atexit, os\natexit.register(os._exit, 0)\ndef f(x): return None\n", Outcome.FAIL),
        ("def f(x):\n    while True: pass\n", Outcome.TIMEOUT),
        ("def f(x):\n    return float('nan')\n", Outcome.FAIL),
        ("def f(x):\n    return True if x == 2 else 6\n", Outcome.FAIL),
        ("def f(x):\n    return 2.0 * x\n", Outcome.PASS),  # an assert says 4.0 == 4
        ("print('x' * 10)\nprint(input)\ndef f(x):\n    print(x)\n    return 2 * x\n", Outcome.PASS),
        ("# \u00e9\u4e2d\ndef f(x):\n    return 2 * x\n", Outcome.PASS),
        ("def f(x):\n    return '\ud800'\n", Outcome.FAIL),
        ("x = 1\x00\ndef f(x):\n    return 2 * x\n", Outcome.FAIL),
    ],
)
def test_a_program_is_judged_by_its_values(source, expected):
    """REWARD-010, REWARD-012: neither an exit status nor an exception is an answer."""
    assert verdict(source).base is expected


def test_a_swallowed_time_out_is_a_time_out():
    """SANDBOX-022."""
    source = (
        "import time\ndef f(x):\n    end = time.monotonic() + 3.5\n    while time.monotonic() < end:\n"
        "        try: time.sleep(0.1)\n        except BaseException: pass\n    return 2 * x\n"
    )
    assert verdict(source).base is Outcome.TIMEOUT


def test_slow_by_count_is_over_the_limit_however_signals_are_set():
    source = (
        "import signal\ndef f(x):\n    signal.pthread_sigmask(signal.SIG_BLOCK, range(1, 65))\n"
        "    for _ in range(1_000_000_000): pass\n    return 2 * x\n"
    )
    assert verdict(source).base is Outcome.TIMEOUT


@pytest.mark.parametrize("call", ["setitimer(signal.ITIMER_REAL, 0)", "setitimer(signal.ITIMER_VIRTUAL, 9)"])
def test_timers_are_not_a_programs_business(call):
    """Whoever touches them means to outlast a limit: wrong on a fast machine as on a slow one."""
    assert verdict(f"import signal\ndef f(x):\n    signal.{call}\n    return 2 * x\n").base is Outcome.FAIL


def test_the_time_spent_waiting_for_a_core_does_not_count():
    """REWARD-015: nor does waiting for a lane."""
    source = "def f(x):\n    s = 0\n    for i in range(4_000_000): s += i\n    return 2 * x\n"
    p = problem()
    with Judge([p], workers=6) as judge:  # six lanes on fewer cores: each program waits for most of its time
        programs = [Program(problem_id=p.problem_id, source=f"{source}# {i}\n") for i in range(12)]
        assert {v.base for v in judge.judge(programs)} == {Outcome.PASS}


def test_recursion_has_the_same_room_for_rewards_and_for_scores():
    """SANDBOX-030."""
    source = (
        "def f(x):\n    def deep(n):\n        return 0 if n == 0 else deep(n - 1)\n    deep({})\n    return 2 * x\n"
    )
    p = problem(base_inputs=[[2]], plus_inputs=[[3]])
    for depth, passes in ((960, True), (980, False)):
        assert verdict(source.format(depth), p, "reward").passed is passes
        assert verdict(source.format(depth), p, "both").passed is passes


def test_an_entry_point_may_have_the_checkers_name():
    """EVAL-118."""
    p = problem("check", ["assert check(1) == 2"], reference="def check(n):\n    return n + 1\n")
    assert verdict(p.reference, p).passed
    assert not verdict("def check(n):\n    return n\n", p).passed


def test_python_optimisation_does_not_make_asserts_vanish(monkeypatch):
    """REWARD-011."""
    monkeypatch.setenv("PYTHONOPTIMIZE", "1")
    assert verdict("def f(x):\n    return None\n").base is Outcome.FAIL


def test_a_program_sees_no_environment(monkeypatch):
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "secret")
    source = "import os\ndef f(x):\n    return 2 * x if not [k for k in os.environ if k.startswith('AWS')] else 0\n"
    assert verdict(source).passed


def test_the_references_suite_is_judged_against_the_reference():
    p = problem(base_inputs=[[1], [2]], plus_inputs=[[10], [-3]])
    assert verdict("def f(x):\n    return 2 * x\n", p).passed
    wrong_on_plus = verdict("def f(x):\n    return abs(2 * x)\n", p)
    assert (wrong_on_plus.base, wrong_on_plus.plus) == (Outcome.PASS, Outcome.FAIL)
    both = verdict("def f(x):\n    return 0 if x == 1 else 2 * x\n", p)
    assert (both.base, both.plus) == (Outcome.FAIL, Outcome.PASS)  # both suites always run


def test_reference_times_of_another_processor_decide_nothing(tmp_path, monkeypatch):
    """EVAL-114: the file of reference answers belongs to the processor that took their times."""
    p = problem(base_inputs=[[1]], plus_inputs=[[2]])
    for name in ("fast", "slow", "fast"):
        monkeypatch.setattr("evaluation.judge.references.cpu_name", lambda name=name: name)
        with Judge([p], cache=tmp_path) as judge:
            assert judge.judge([Program(problem_id=p.problem_id, source=p.reference)])[0].passed
    assert len(list(tmp_path.glob("*.ref"))) == 4


def test_a_broken_reference_is_the_harness_fault():
    p = problem(reference="def f(x):\n    return 1 // 0\n", base_inputs=[[1]], plus_inputs=[[2]])
    found = verdict("def f(x):\n    return 2 * x\n", p)
    assert found.errored
    assert Outcome.FAIL not in {found.base, found.plus}


def test_inputs_are_not_copied_between_tests():
    p = problem(reference="def f(x):\n    return sum(x)\n", base_inputs=[[[1, 2]], [[1, 2]]], plus_inputs=[[[3]]])
    shared = "seen = []\ndef f(x):\n    seen.append(1)\n    return sum(x) if len(seen) < 2 else -1\n"
    assert verdict(shared, p).base is Outcome.FAIL  # a program's state lives as long as its suite


def test_results_do_not_depend_on_workers_or_order():
    p = problem()
    sources = [f"def f(x):\n    return {a} * x\n" for a in (2, 3)] * 4 + ["def f(x):\n    while 1: pass\n"]
    programs = [Program(problem_id=p.problem_id, source=s) for s in sources]
    with Judge([p], workers=1) as one, Judge([p], workers=3) as three:
        first = [v.base for v in one.judge(programs)]
        assert [v.base for v in three.judge(programs[::-1])][::-1] == first
    assert first[:2] == [Outcome.PASS, Outcome.FAIL]
    assert first[-1] is Outcome.TIMEOUT


def test_a_killed_zygote_is_replaced_and_no_verdict_is_lost():
    p = problem()
    with Judge([p]) as judge:
        zygote = judge.lanes.first.zygote(numpy=False)
        os.kill(zygote.process.pid, signal.SIGKILL)
        found = judge.judge([Program(problem_id=p.problem_id, source=p.reference)])
    assert found[0].passed


def test_workers_killed_again_and_again_change_no_verdict():
    p = problem()
    slow = "import time\ndef f(x):\n    time.sleep(0.03)\n    return {} * x\n_n = {}\n"
    programs = [Program(problem_id=p.problem_id, source=slow.format(2 + i % 2, i)) for i in range(60)]
    over = threading.Event()
    with Judge([p], workers=2) as judge:

        def kill():
            for i in range(100):
                if over.wait(0.2):
                    return
                for zygote in list(judge.lanes.lanes[i % 2].zygotes.values()):
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(zygote.process.pid, signal.SIGKILL)

        killer = threading.Thread(target=kill)
        killer.start()
        found = judge.judge(programs)
        over.set()
        killer.join()
    assert [v.base for v in found] == [Outcome.PASS, Outcome.FAIL] * 30


def test_no_process_is_left_behind():
    p = problem()
    busy_thread = (
        "import threading\ndef f(x):\n    loop = lambda: [0 for _ in iter(int, 1)]\n"
        "    threading.Thread(target=loop, daemon=True).start()\n    return 2 * x\n"
    )
    with Judge([p]) as judge:
        pid = judge.lanes.first.zygote(numpy=False).process.pid
        judge.judge([Program(problem_id=p.problem_id, source=busy_thread)])
        time.sleep(0.2)
        children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    assert not children
    assert not Path(f"/proc/{pid}").exists()


def test_numpy_values_are_compared_as_evalplus_compares_them():
    """EVAL-122."""
    p = problem(reference="def f(x):\n    return [1, 0.3] if x else 0.3\n", base_inputs=[[1]], plus_inputs=[[0]])
    assert verdict("def f(x):\n    return [1, 0.1 + 0.2] if x else 0.3\n", p).base is Outcome.FAIL
    assert (
        verdict("import numpy as np\ndef f(x):\n    return [1, 0.3] if x else np.float64(0.1 + 0.2)\n", p).plus
        is Outcome.FAIL
    )
    floats = problem(reference="def f(x):\n    return [1.0, 0.3]\n", base_inputs=[[1]], plus_inputs=[[0]])
    assert verdict("def f(x):\n    return [1.0, 0.1 + 0.2]\n", floats).passed


def test_the_audit_finds_nothing_wrong_here():
    checks = audit()
    assert len(checks) > 12
    assert [c for c in checks if not c.ok] == []


@needs_data
def test_every_mbpp_reference_passes_its_own_asserts():
    problems = load_mbpp(str(SHARED / "data/mbpp.jsonl")).problems
    assert len(problems) == 974
    with Judge(problems, suites="reward", workers=2) as judge:
        verdicts = judge.judge([Program(problem_id=p.problem_id, source=p.reference) for p in problems])
    assert [v.problem_id for v in verdicts if not v.passed] == []


@needs_data
def test_wrong_programs_of_the_four_odd_problems_fail():
    odd = [p for p in load_mbpp(str(SHARED / "data/mbpp.jsonl")).problems if p.number in {367, 596, 601, 927}]
    with Judge(odd, suites="reward") as judge:
        empty = [Program(problem_id=p.problem_id, source=f"def {p.entry_point}(*a):\n    return None\n") for p in odd]
        assert [v.base for v in judge.judge(empty)] == [Outcome.FAIL] * 4


@needs_data
@pytest.mark.parametrize("model", ["llama3_base_dpo", "meta-llama-3-8b-instruct", "mistral-7b-instruct-v0.2"])
def test_a_sample_of_evalplus_verdicts_is_reproduced(model, mbpp_plus, cache):
    path = SHARED / f"data/evalplus_verdicts/{model}.jsonl"
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    light = [r for r in rows if r["task_id"] not in HEAVY | EXCEPTED][::7]
    _compare(light, mbpp_plus, cache)


@needs_data
@pytest.mark.campaign
@pytest.mark.parametrize("model", ["llama3_base_dpo", "meta-llama-3-8b-instruct", "mistral-7b-instruct-v0.2"])
def test_every_evalplus_verdict_is_reproduced(model, mbpp_plus, cache):
    path = SHARED / f"data/evalplus_verdicts/{model}.jsonl"
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    assert len(rows) == 378
    _compare([r for r in rows if r["task_id"] not in EXCEPTED], mbpp_plus, cache)


def _compare(rows, problems, cache):
    with Judge([problems[r["task_id"]] for r in rows], workers=2, cache=cache) as judge:
        verdicts = judge.judge([Program(problem_id=r["task_id"], source=r["solution"]) for r in rows])
    different = [
        (r["task_id"], suite, r[f"{suite}_status"], v.detail)
        for r, v in zip(rows, verdicts, strict=True)
        for suite in ("base", "plus")
        if (r[f"{suite}_status"] == "pass") != (getattr(v, suite) is Outcome.PASS)
    ]
    assert different == []


@needs_data
@pytest.mark.campaign
def test_every_reference_passes_also_on_a_busy_machine(mbpp_plus, cache):
    """SANDBOX-024, SANDBOX-025: at load 0 and at load 8 (and the load of two lanes), 599 included."""
    programs = [Program(problem_id=p.problem_id, source=p.reference) for p in mbpp_plus.values()]
    for load in (0, 8):
        with busy(load), Judge(list(mbpp_plus.values()), workers=2, cache=cache) as judge:
            judge.remembered = None
            verdicts = judge.judge(programs)
        assert [(load, v.problem_id, v.detail) for v in verdicts if not v.passed] == []
    assert len(verdicts) == 378


@needs_data
@pytest.mark.campaign
def test_the_same_verdicts_at_any_load_and_with_any_number_of_workers(mbpp_plus, cache):
    path = SHARED / "data/evalplus_verdicts/mistral-7b-instruct-v0.2.jsonl"
    rows = [r for r in map(json.loads, path.read_text().splitlines()) if r["task_id"] not in EXCEPTED]
    programs = [Program(problem_id=r["task_id"], source=r["solution"]) for r in rows]
    found = {}
    for load, workers in ((0, 1), (0, 2), (0, 4), (8, 2)):
        with busy(load), Judge([mbpp_plus[r["task_id"]] for r in rows], workers=workers, cache=cache) as judge:
            judge.remembered = None
            found[load, workers] = [(v.problem_id, v.base, v.plus) for v in judge.judge(programs)]
    first = found[0, 1]
    for setting, verdicts in found.items():
        assert [(setting, a, b) for a, b in zip(first, verdicts, strict=True) if a != b] == []


@contextlib.contextmanager
def busy(load):
    """So many processes that never rest."""
    others = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(load)]
    try:
        yield
    finally:
        for other in others:
            other.kill()
            other.wait()


SLOW_CHEATS = {
    "sig_block_all", "catch_timeout_answer", "huge_list", "loop_regex", "loop_c_level", "mem_grow", "flood_stdout",
    "rec_c_stack_overflow", "loop_top_level",
}  # fmt: skip


def _hostile():
    path = SHARED / "cases/hostile.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.is_file() else []


@needs_data
def test_hostile_programs_get_the_right_verdict(mbpp_plus, cache, monkeypatch):
    _judge_hostile([r for r in _hostile() if r["id"] not in SLOW_CHEATS], mbpp_plus, cache, monkeypatch)


@needs_data
@pytest.mark.campaign
def test_hostile_programs_that_burn_time_get_the_right_verdict(mbpp_plus, cache, monkeypatch):
    _judge_hostile([r for r in _hostile() if r["id"] in SLOW_CHEATS], mbpp_plus, cache, monkeypatch)


def _judge_hostile(rows, problems, cache, monkeypatch):
    monkeypatch.setenv("SBX_CANARY_TOKEN", "leak")
    assert rows
    with Judge([problems[r["task_id"]] for r in rows], workers=2, cache=cache) as judge:
        verdicts = judge.judge([Program(problem_id=r["task_id"], source=r["code"]) for r in rows])
    wrong = [
        (r["id"], r["expected"], v.detail)
        for r, v in zip(rows, verdicts, strict=True)
        if v.passed != (r["expected"] == "pass") or v.errored
    ]
    assert wrong == []


HUNGRY = {
    "except": "try: bytes(2400 << 20); ok = True\n    except MemoryError: pass",
    "finally": "try: bytes(2400 << 20); ok = True\n    finally: return 2 * x if ok else -1",
    "an exit": "with E(): bytes(2400 << 20); ok = True",
    "a thread": "import threading\n    t = threading.Thread(target=g); t.start(); t.join(); ok = bool(DONE)",
    "a map of nothing": "import mmap\n    try: ok = len(mmap.mmap(-1, 2400 << 20)) > 0\n    except OSError: pass",
    "an interpreter": "import code\n    code.InteractiveInterpreter(globals()).runsource('g()')\n    ok = bool(DONE)",
    "nothing": "bytes(2400 << 20); ok = True",
    "want of it": "ok = True\n    try: bytes(2400 << 20)\n    except MemoryError: ok = False",
}


@pytest.mark.parametrize("way", HUNGRY)
def test_a_program_sees_the_same_memory_with_any_number_of_workers(way):
    helpers = "DONE = []\ndef g(): bytes(2400 << 20); DONE.append(1)\n"
    helpers += "class E:\n    def __enter__(self): pass\n    def __exit__(self, *_): return True\n"
    source = f"{helpers}def f(x):\n    ok = False\n    {HUNGRY[way]}\n    return 2 * x if ok else -1\n"
    for lanes in (1, 1 + machine_memory() // (4 << 30)):  # then each has a share of less than 2 GiB
        with Judge([problem()], workers=lanes) as judge:
            assert judge.judge([Program(problem_id="Test/1", source=source)])[0].passed


def test_two_programs_that_fill_memory_are_judged_one_after_the_other(caplog):
    caplog.set_level("INFO")
    # Different strings: equal programs run once.
    source = "import time\ndef f(x):\n    b = bytearray(b'{}') * (50 << 20)\n    time.sleep(.5)\n    return 2 * x\n"
    programs = [Program(problem_id="Test/1", source=source.format(c * 2)) for c in "ab"]
    with Judge([problem(asserts=("assert f(2) == 4",))], workers=2) as judge:
        judge.admission.share = 60 << 20  # as on a machine of 240 MB
        assert [v.passed for v in judge.judge(programs)] == [True, True]
    assert "may have failed for want of time or memory: again, alone" in caplog.text


def test_what_depends_on_the_hash_of_a_text_is_the_same_in_every_process():
    seen = {verdict("def f(x):\n    return 2 * x if hash('x') % 2 else -1\n").passed for _ in range(4)}
    assert len(seen) == 1


def test_a_forged_exception_name_is_cut():
    forged = (
        "import os, struct\nf = lambda x: [os.write(fd, struct.pack('<I', 900006) + b't' + struct.pack('<I', 900001) "
    )
    forged += "+ b'x' + b'A' * 900000) for fd in range(3, 20) if fd]\n"
    assert len(verdict(forged).detail) < 300


def test_a_global_of_the_first_suite_takes_no_memory_of_the_second(mbpp_plus):
    source = "BLOCK = bytes(2400 << 20)\ndef square_perimeter(a): return 4 * a\n"
    with Judge([mbpp_plus["Mbpp/17"]]) as judge:
        assert judge.judge([Program(problem_id="Mbpp/17", source=source)])[0].passed


@pytest.mark.parametrize("module", ["\uff4eumpy", "numpy"])
def test_numpy_is_there_however_it_is_written(module):
    assert verdict(f"import {module} as n\ndef f(x): return int(n.int64(2 * x))\n").passed
    assert verdict("import importlib\nn = importlib.import_module('num' + 'py')\ndef f(x): return 2 * x\n").passed


def test_a_fresh_judge_leaves_no_child_behind():
    with Judge([problem()]) as judge:
        pid = judge.lanes.first.zygote(numpy=False).process.pid
        children = Path(f"/proc/{pid}/task/{pid}/children")
        end = time.monotonic() + 10
        while children.read_text() and time.monotonic() < end:
            time.sleep(0.01)
        assert not children.read_text()
