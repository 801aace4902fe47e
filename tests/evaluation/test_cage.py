"""The cage: what a program tries and must not get, with landlock and as on a kernel that has none."""

import marshal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from evaluation.judge import Judge
from evaluation.judge.jobs import Job, JudgeFailed, ZygoteDied
from evaluation.judge.zygote import Zygote
from evaluation.records import Outcome, Problem, Program

RIGHT = "def f(x):\n    return 2 * x\n"
PROBLEM = Problem(problem_id="Test/1", text="", entry_point="f", reference=RIGHT, asserts=("assert f(2) == 4",))


class Doubles:
    """Accepts 2, 4, 6, ... for 1, 2, 3, ..."""

    def matches(self, index, payload):
        return 0

    def accepts(self, index, raw):
        return raw == b"v" + marshal.dumps(2 * (index + 1), 2)

    def accepts_in_full(self, index, raw):
        return False


def job(source, num_tests=1, limits_s=None):
    inputs = marshal.dumps([(i + 1,) for i in range(num_tests)], 2)
    return Job(
        source=source, entry_point="f", inputs=inputs, limits_s=limits_s or [1.0] * num_tests, suite_limit_s=30.0
    )


@pytest.fixture(scope="module", params=["landlock", "no_landlock"])
def zygote(request):
    zygote = Zygote(numpy=False, cage=request.param)
    yield zygote
    zygote.close()


REFUSED = {
    "write": "open('/tmp/cage-leak', 'w')",
    "write_library": "os.open(os.__file__, os.O_RDWR)",
    "read_passwd": "open('/etc/passwd').read()",
    "read_environment": "open(f'/proc/{os.getppid()}/environ').read()",
    "read_memory": "open(f'/proc/{os.getppid()}/mem', 'rb').read(1)",
    "fork": "os.fork()",
    "posix_fork": "__import__('posix').fork()",
    "spawn": "os.posix_spawn('/bin/true', ['true'], {})",
    "exec": "os.execv('/bin/true', ['true'])",
    "socket": "__import__('socket').socket()",
    "datagram": "(lambda s: s[0].sendto(b'x', '/dev/log'))(__import__('socket').socketpair(1, 2))",
    "kill_zygote": "os.kill(os.getppid(), 0)",
    "kill_group": "os.kill(0, 9)",
    "signal_by_fcntl": "__import__('fcntl').fcntl(3, __import__('fcntl').F_SETOWN, os.getppid())",
    "raise_limit": "__import__('resource').setrlimit(__import__('resource').RLIMIT_CPU, (99, 99))",
    "remove": "os.unlink('/tmp/nothing-here')",
    "judge_modules": "__import__('wire')",
}


@pytest.mark.parametrize("attempt", REFUSED.values(), ids=REFUSED.keys())
def test_what_a_program_must_not_do_fails(zygote, attempt):
    found = zygote.run(job(f"import os\ndef f(x):\n    {attempt}\n    return 2 * x\n"), Doubles())
    assert not found.complete
    assert "Error" in found.detail


def test_what_an_honest_program_does_works(zygote):
    source = (
        "import asyncio, json, math\nfrom concurrent.futures import ThreadPoolExecutor\nfrom typing import List\n"
        "async def twice(x): return 2 * x\n"
        "def f(x):\n    with ThreadPoolExecutor(2) as pool:\n        assert pool.submit(math.sqrt, 4).result() == 2\n"
        "    print('output')\n    return json.loads(str(asyncio.run(twice(x))))\n"
    )
    found = zygote.run(job(source, 3), Doubles())
    assert found.complete, found.detail


FRAME = "def frame(kind, body=b''):\n    os.write(3, struct.pack('<I', len(body) + 1) + kind + body)\n"
FORGED = {
    "defined again": "frame(b'r')",
    "done": "frame(b'd')",
    "an empty batch": "frame(b't')",
    "a long frame": "os.write(3, struct.pack('<I', 1 << 31) + b't')",
    "an empty frame": "os.write(3, bytes(4))",
    "a cut value": "frame(b't', struct.pack('<I', 99) + b'v')",
    "another kind": "frame(b'?')",
    "the socket closed": "os.close(3)",
    "the process killed": "os.kill(os.getpid(), 9)",
}


@pytest.mark.parametrize("forgery", FORGED.values(), ids=FORGED.keys())
def test_forged_frames_fail_and_hurt_nobody(zygote, forgery):
    source = f"import os, struct\n{FRAME}def f(x):\n    {forgery}\n    return 0\n"
    assert not zygote.run(job(source, 2), Doubles()).complete
    assert zygote.run(job(RIGHT, 2), Doubles()).complete


def test_no_frame_sets_a_clock_back(zygote):
    source = (
        f"import os, struct, time\n{FRAME}def f(x):\n    end = time.monotonic() + 2\n"
        "    while time.monotonic() < end:\n        frame(b't')\n        time.sleep(0.2)\n    return 2 * x\n"
    )
    assert not zygote.run(job(source), Doubles()).complete


def test_a_slow_test_has_its_own_limit_wherever_it_stands(zygote):
    source = "import time\ndef f(x):\n    if x == 3: time.sleep(1.5)\n    return 2 * x\n"
    found = zygote.run(job(source, 4, limits_s=[1.0, 1.0, 4.0, 1.0]), Doubles())
    assert found.complete, found.detail
    late = zygote.run(job(source.replace("== 3", "== 4"), 4, limits_s=[1.0, 1.0, 4.0, 1.0]), Doubles())
    assert late.timed_out
    assert late.detail == "test 3: time limit"


def test_a_child_that_never_began_is_no_wrong_answer():
    zygote = Zygote(numpy=False)
    try:
        broken = job(RIGHT)
        object.__setattr__(broken, "inputs", b"\xff")  # as after a torn write: the child cannot read its job
        with pytest.raises(JudgeFailed):
            zygote.run(broken, Doubles())
        assert zygote.run(job(RIGHT), Doubles()).complete
    finally:
        zygote.close()
    with pytest.raises(ZygoteDied):
        zygote.run(job(RIGHT), Doubles())


def test_workers_outlive_the_thread_that_started_them():
    with Judge([PROBLEM], workers=3) as judge:
        sources = [f"{RIGHT}# {i}\n" for i in range(12)]
        first = [Program(problem_id="Test/1", source=s) for s in sources]
        thread = threading.Thread(target=judge.judge, args=(first,))
        thread.start()
        thread.join()
        started = [z.process.pid for w in judge.lanes.lanes for z in w.zygotes.values()]
        again = [Program(problem_id="Test/1", source=s + "#\n") for s in sources]
        assert all(v.passed for v in judge.judge(again))
        assert set(started) <= {z.process.pid for w in judge.lanes.lanes for z in w.zygotes.values()}


def test_nothing_is_left_when_the_judge_is_killed():
    loop = "def f(x):\n    while True: pass\n"
    script = (
        "from evaluation.judge import Judge\nfrom evaluation.records import Problem, Program\n"
        f"p = Problem.model_validate_json({PROBLEM.model_dump_json()!r})\n"
        "judge = Judge([p])\nprint(judge.lanes.first.zygote(numpy=False).process.pid, flush=True)\n"
        f"judge.judge([Program(problem_id='Test/1', source={loop!r})])\n"
    )
    process = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    pid = int(process.stdout.readline())
    time.sleep(0.3)
    process.kill()
    process.wait()
    until = time.monotonic() + 20
    while _alive(pid) and time.monotonic() < until:
        time.sleep(0.1)
    assert not _alive(pid)


def _alive(pid):
    """A zombie that nobody has reaped yet is not alive."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def test_a_broken_judge_gives_no_verdict(monkeypatch):
    with Judge([PROBLEM]) as judge:

        def broken(*_):
            raise JudgeFailed("no process could be forked")

        monkeypatch.setattr("evaluation.judge.zygote.Zygote.child", broken)
        found = judge.judge([Program(problem_id="Test/1", source=RIGHT)])[0]
    assert found.base is Outcome.HARNESS_ERROR
    assert found.errored


def test_without_the_cage_nothing_runs_unless_somebody_insists(monkeypatch):
    """A kernel that refuses seccomp, here by a filter of our own around the judge."""
    script = (
        "import sys\nfrom evaluation.judge.sandbox import Filter, _LOAD, _EQUAL, _RETURN, _ALLOW, _ERRNO, _argument\n"
        "from evaluation.errors import MachineError\nfrom evaluation.judge.audit import audit\nimport struct\n"
        "rules = [(_LOAD, 0, 0, 0), (_EQUAL, 0, 3, 157), _argument(0), (_EQUAL, 0, 1, 22)]\n"
        "rules += [(_RETURN, 0, 0, _ERRNO | 22), (_RETURN, 0, 0, _ALLOW)]\n"
        "Filter(b''.join(struct.pack('<HBBI', *r) for r in rules)).install()\n"
        "try:\n    audit()\nexcept MachineError as e: print(e, e.exit_code)\n"
        "print([c for c in audit(caged=False) if not c.ok])\n"
    )
    root = Path(__file__).resolve().parents[2]
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, cwd=root)
    refused, insisted = done.stdout.splitlines()
    assert refused.startswith("cage=seccomp: ") and "ABLATION_UNCAGED=1" in refused and refused.endswith(" 3")
    assert insisted == "[]"


def test_an_uncaged_verdict_says_so():
    with Judge([PROBLEM], caged=False) as judge:
        assert judge.version.endswith("uncaged")
        assert judge.cage["seccomp"] is False
        assert judge.judge([Program(problem_id="Test/1", source=RIGHT)])[0].passed
