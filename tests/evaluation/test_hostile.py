"""Programs that mean harm, by category, each with its right verdict; none may pass that computes nothing, hang or escape.

A canary answers rightly only if its attack is refused. Run as whoever runs the tests, as an ordinary user, and where
user namespaces are forbidden.
"""

import json
import os
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
NOBODY = 65534
REFUSED = "EPERM, EACCES, ENOSYS"

HEAD = "import os, ctypes, errno\nfrom errno import EPERM, EACCES, ENOSYS\n"


def canary(attack: str) -> str:
    return f"import os, sys\ndef f(x):\n    try:\n{textwrap.indent(attack, ' ' * 8)}\n    except Exception: return 4 * x\n    return 'leak'\n"


def syscall(number: int, arguments: str = "0, 0, 0, 0, 0, 0") -> str:
    return (
        f"{HEAD}libc = ctypes.CDLL(None, use_errno=True)\n"
        f"def f(x):\n    result = libc.syscall({number}, {arguments})\n"
        f"    return 4 * x if result == -1 and ctypes.get_errno() in ({REFUSED}) else 'leak'\n"
    )


def returns(expression: str, before: str = "") -> str:
    return f"{before}\ndef f(x):\n    return {expression}\n"


SYSCALLS = {
    "socket": 41, "connect": 42, "accept": 43, "sendmsg": 46, "recvmsg": 47, "shutdown": 48, "bind": 49, "listen": 50,
    "sendmmsg": 307, "fork": 57, "vfork": 58, "execve": 59, "execveat": 322, "ptrace": 101, "process_vm_readv": 310,
    "process_vm_writev": 311, "kcmp": 312, "pidfd_open": 434, "pidfd_getfd": 438, "pidfd_send_signal": 424,
    "tkill": 200, "rt_sigqueueinfo": 129, "rt_tgsigqueueinfo": 297, "setpgid": 109, "setsid": 112, "setpriority": 141,
    "sched_setscheduler": 144, "sched_setaffinity": 203, "setrlimit": 160, "prctl": 157, "seccomp": 317, "personality": 135,
    "setuid": 105, "setgid": 106, "setgroups": 116, "capset": 126, "unshare": 272, "setns": 308, "mount": 165,
    "umount2": 166, "pivot_root": 155, "chroot": 161, "chdir": 80, "mkdir": 83, "rmdir": 84, "creat": 85, "link": 86,
    "unlink": 87, "symlink": 88, "chmod": 90, "chown": 92, "rename": 82, "mknod": 133, "truncate": 76, "ftruncate": 77,
    "fallocate": 285, "setxattr": 188, "utimensat": 280, "open": 2, "openat2": 437, "open_by_handle_at": 304,
    "memfd_create": 319, "sendfile": 40, "splice": 275, "copy_file_range": 326, "io_uring_setup": 425, "io_setup": 206,
    "bpf": 321, "perf_event_open": 298, "userfaultfd": 323, "keyctl": 250, "add_key": 248, "shmget": 29, "semget": 64,
    "msgget": 68, "mq_open": 240, "inotify_init": 253, "fanotify_init": 300, "signalfd": 282, "timerfd_create": 283,
    "timer_create": 222, "setitimer": 38, "alarm": 37, "settimeofday": 164, "clock_settime": 227, "adjtimex": 159,
    "sethostname": 170, "reboot": 169, "init_module": 175, "kexec_load": 246, "swapon": 167, "acct": 163, "syslog": 103,
    "iopl": 172, "ioperm": 173, "quotactl": 179, "landlock_create_ruleset": 444, "memfd_secret": 447,
}  # fmt: skip
"""By x86_64 number; each must be refused, not merely fail for its arguments."""

CANARIES = {
    "file: write": "open('/tmp/cage-leak', 'w').write('x')",
    "file: append to the library": "open(os.__file__, 'a')",
    "file: through /proc/self/fd": "open('/proc/self/fd/0', 'w')",
    "file: io.FileIO": "__import__('io').FileIO('/tmp/cage-leak', 'x')",
    "file: sqlite": "__import__('sqlite3').connect('/tmp/cage-leak.db').execute('create table t (x)')",
    "file: a lock": "__import__('tempfile').NamedTemporaryFile()",
    "file: home": "open(os.path.expanduser('~/.bashrc')).read()",
    "file: aws credentials": "open('/root/.aws/credentials').read()",
    "file: hub token": "open('/root/.cache/huggingface/token').read()",
    "file: the judge": f"open({str(ROOT / 'evaluation/judge/judge.py')!r}).read()",
    "file: shadow": "open('/etc/shadow').read()",
    "file: maps of the parent": "open(f'/proc/{os.getppid()}/maps').read()",
    "file: own environ": "open('/proc/self/environ').read()",
    "file: command line of 1": "open('/proc/1/cmdline').read()",
    "file: benchmark by download": "__import__('urllib.request').request.urlopen('http://127.0.0.1:1').read()",
    "process: subprocess": "__import__('subprocess').run(['true'])",
    "process: system": "assert os.system('true') == 0",
    "process: popen": "os.popen('true').read()",
    "process: multiprocessing": "p = __import__('multiprocessing').Process(target=print); p.start(); p.join()",
    "process: forkpty": "os.forkpty()",
    "process: executor": "__import__('concurrent.futures').futures.ProcessPoolExecutor(1).submit(int).result(1)",
    "signal: parent": "os.kill(os.getppid(), 9)",
    "signal: everyone": "os.kill(-1, 9)",
    "signal: own group": "os.killpg(0, 9)",
    "signal: init": "os.kill(1, 0)",
    "signal: pidfd": "os.pidfd_open(os.getppid())",
    "signal: timer": "__import__('signal').setitimer(__import__('signal').ITIMER_REAL, 0)",
    "signal: alarm": "assert __import__('signal').alarm(0) == 0  # refused: 2**32 - 1",
    "network: tcp": "__import__('socket').create_connection(('127.0.0.1', 22), 1)",
    "network: udp": "__import__('socket').socket(2, 2).sendto(b'x', ('127.0.0.1', 53))",
    "network: name": "__import__('socket').getaddrinfo('localhost', 80)[0]; __import__('socket').socket()",
    "network: abstract": "__import__('socket').socket(1, 1).connect('\\0x')",
    "network: raw": "__import__('socket').socket(17, 3)",
    "network: asyncio": "a = __import__('asyncio'); a.run(a.open_connection('127.0.0.1', 22))",
    "limit: memory": "r = __import__('resource'); r.setrlimit(r.RLIMIT_AS, (-1, -1))",
    "limit: processor": "r = __import__('resource'); r.prlimit(0, r.RLIMIT_CPU, (9999, 9999))",
    "limit: parent's": "r = __import__('resource'); r.prlimit(os.getppid(), r.RLIMIT_CPU, (1, 1))",
    "limit: nice": "os.nice(-5)",
    "identity: root": "os.setuid(0); open('/etc/shadow')",
    "secrets: environment": "assert [k for k in os.environ if 'TOKEN' in k or 'KEY' in k or 'HOME' in k]",
    "secrets: arguments": "assert len(sys.argv) > 1",
    "secrets: original arguments": "assert 'references' in ' '.join(sys.orig_argv)",
}
"""What a program tries; each has to raise."""

FAKES = {
    "equality: everything": returns("A()", "class A:\n    def __eq__(self, o): return True\n    __ne__ = __hash__ = None"),
    "equality: list": returns("L()", "class L(list):\n    def __eq__(self, o): return True\n    def __len__(self): return 1"),
    "equality: float": returns("F(0)", "class F(float):\n    def __eq__(self, o): return True\n    __hash__ = float.__hash__"),
    "equality: str": returns("S()", "class S(str):\n    def __eq__(self, o): return True\n    __hash__ = str.__hash__"),
    "equality: tuple": returns("T()", "class T(tuple):\n    def __eq__(self, o): return True\n    __hash__ = tuple.__hash__"),
    "equality: bool": returns("B()", "class B:\n    def __bool__(self): return True\n    def __eq__(self, o): return self"),
    "equality: reflected": returns("R()", "class R(int):\n    def __rsub__(self, o): return 0\n    def __eq__(self, o): return True\n    __hash__ = int.__hash__"),
    "equality: class of int": returns("C()", "class C:\n    __class__ = int\n    def __eq__(self, o): return True\n    def __index__(self): return 8"),
    "equality: type with a name": returns("type('int', (), {'__eq__': lambda s, o: True})()"),
    "equality: getattr": returns("G()", "class G:\n    def __getattr__(self, n): return lambda *a: True\n    def __eq__(self, o): return True"),
    "equality: mock": returns("ANY", "from unittest.mock import ANY"),
    "equality: partial order": returns("P()", "import functools\n@functools.total_ordering\nclass P:\n    def __lt__(self, o): return False\n    def __eq__(self, o): return True"),
    "equality: numpy": returns("np.ones(1) == 1", "import numpy as np"),
    "equality: dict": returns("D()", "class D(dict):\n    def __eq__(self, o): return True"),
    "marshal: dumps replaced": returns("0", "import marshal\nmarshal.dumps = lambda v, n=2: b'i\\x08\\0\\0\\0'"),
    "marshal: the harness' encode": returns("0", "import __main__ as m\nm.encode = lambda v, s: b'vi\\x08\\0\\0\\0'"),
    "marshal: the harness' plain": returns("0", "import __main__ as m\nm.plain = lambda *a: True"),
    "marshal: through sys.modules": returns("0", "import sys\nfor m in list(sys.modules.values()):\n    for k in ('plain', 'encode', 'describe'):\n        if hasattr(m, k): setattr(m, k, lambda *a: b'vT')"),
    "frames: expected of the caller": returns("next((v for v in sys._getframe(1).f_locals.values() if v == [4 * x]), 0)", "import sys"),
    "frames: the checker": returns("sys._getframe(1).f_locals['job']['expected'][0]", "import sys"),
    "frames: trace": returns("0", "import sys\nsys.settrace(lambda f, e, a: f.f_locals.update(value=8, raw=b'vT') or None)"),
    "frames: profile": returns("0", "import sys\nsys.setprofile(lambda f, e, a: None)"),
    "frames: the loop's inputs emptied": "import sys\ndef f(x):\n    sys._getframe(1).f_locals['inputs'].clear()\n    return 0\n",
    "frames: index": "import sys\ndef f(x):\n    sys._getframe(1).f_locals['index'] = 99\n    return 0\n",
    "gc: any list of answers": "import gc\ndef f(x):\n    for o in gc.get_objects():\n        if type(o) is list and len(o) == 3 and o[0] == 4: return o.pop(0)\n    return 0\n",
    "gc: the reference": "import gc, types\ndef f(x):\n    for o in gc.get_objects():\n        if type(o) is types.FunctionType and o.__name__ == 'f' and o is not f: return o(x)\n    return 0\n",
    "gc: other programs": "import gc\ndef f(x):\n    for o in gc.get_objects():\n        if type(o) is dict and 'source' in o and 'quad' + 'ruple' in str(o['source']): return 4 * x\n    return 0\n",
    "exit: status": "import os\nos._exit(0)\n",
    "exit: in the call": "import sys\ndef f(x): sys.exit(0)\n",
    "exit: at exit": "import atexit, os\natexit.register(os._exit, 0)\ndef f(x): raise SystemExit(0)\n",
    "exit: quit": "def f(x): quit()\n",
    "exit: abort": "import os\ndef f(x): os.abort()\n",
    "exit: own signal": "import os, signal\ndef f(x): os.kill(os.getpid(), signal.SIGKILL)\n",
    "exit: stop": "import os, signal\ndef f(x): os.kill(os.getpid(), signal.SIGSTOP)\n",
    "exit: segfault": "import ctypes\ndef f(x): return ctypes.string_at(0)\n",
    "exit: a thread": "import threading, os, time\ndef f(x):\n    threading.Thread(target=lambda: os._exit(0)).start()\n    time.sleep(0.5)\n    return 4 * x\n",
    "exit: destructor": "import os\nclass A:\n    def __del__(self): os._exit(0)\ndef f(x):\n    A()\n    return 4 * x\n",
    "exit: generator close": "import sys\ndef f(x):\n    def g():\n        try: yield\n        finally: sys.exit(0)\n    i = g(); next(i); i.close()\n    return 4 * x\n",
    "exit: keyboard interrupt": "def f(x): raise KeyboardInterrupt\n",
    "exit: bare base exception": "class E(BaseException): pass\ndef f(x): raise E\n",
    "exit: an exception that cannot be named": "class M(type):\n    __name__ = property(lambda c: 1 / 0)\nclass E(Exception, metaclass=M): pass\ndef f(x): raise E\n",
    "wire: done": "import os\ndef f(x):\n    for fd in range(3, 64):\n        try: os.write(fd, b'\\x01\\0\\0\\0d')\n        except OSError: pass\n    return 0\n",
    "wire: done twice": "import os\ndef f(x):\n    for fd in range(3, 64):\n        try: os.write(fd, b'\\x01\\0\\0\\0d' * 2)\n        except OSError: pass\n    return 0\n",
    "wire: true for every test": "import os\ndef f(x):\n    t = b'\\x02\\0\\0\\0vT'\n    for fd in range(3, 64):\n        try: os.write(fd, (1 + 3 * len(t)).to_bytes(4, 'little') + b't' + 3 * t + b'\\x01\\0\\0\\0d')\n        except OSError: pass\n    return 0\n",
    "wire: defined again": "import os\ndef f(x):\n    for fd in range(3, 64):\n        try: os.write(fd, b'\\x01\\0\\0\\0r' * 9)\n        except OSError: pass\n    return 0\n",
    "wire: caged again": "import os\nfor fd in range(3, 64):\n    try: os.write(fd, b'\\x01\\0\\0\\0c')\n    except OSError: pass\ndef f(x): return 0\n",
    "wire: a gigabyte announced": "import os\ndef f(x):\n    for fd in range(3, 64):\n        try: os.write(fd, b'\\xff\\xff\\xff\\x3ft')\n        except OSError: pass\n    return 0\n",
    "wire: negative length": "import os\ndef f(x):\n    for fd in range(3, 64):\n        try: os.write(fd, b'\\xff' * 64)\n        except OSError: pass\n    return 0\n",
    "wire: a pickle": "import os, pickle\ndef f(x):\n    for fd in range(3, 64):\n        try: os.write(fd, b'\\x40\\0\\0\\0t' + pickle.dumps(os.getcwd))\n        except OSError: pass\n    return 0\n",
    "wire: a hash": "import os\ndef f(x):\n    for fd in range(3, 64):\n        try: os.write(fd, b'\\x26\\0\\0\\0t\\x21\\0\\0\\0h' + bytes(32))\n        except OSError: pass\n    return 0\n",
    "wire: closed": "import os\ndef f(x):\n    os.closerange(3, 64)\n    return 4 * x\n",
    "wire: half a frame": "import os\ndef f(x):\n    for fd in range(3, 64):\n        try: os.write(fd, b'\\x08\\0\\0\\0tab'); os._exit(0)\n        except OSError: pass\n    return 0\n",
    "wire: junk without end": "import os\ndef f(x):\n    while True:\n        for fd in range(3, 16):\n            try: os.write(fd, b'j' * 65536)\n            except OSError: pass\n",
    "wire: the next job read": "import os\ndef f(x):\n    for fd in range(3, 16):\n        try: os.set_blocking(fd, False); os.read(fd, 1 << 20)\n        except OSError: pass\n    return 0\n",
    "code: bytes of a deep nest": "import os\ndef f(x):\n    body = b't' + (6 + 5 * 60000).to_bytes(4, 'little') + b'v' + b'[\\1\\0\\0\\0' * 60000 + b'N' * 5\n    for fd in range(3, 16):\n        try: os.write(fd, len(body).to_bytes(4, 'little') + body)\n        except OSError: pass\n    return 0\n",
    "builtins: equality of the world": returns("0", "import builtins\nbuiltins.isinstance = lambda *a: True\nbuiltins.type = lambda *a: int\nbuiltins.len = lambda x: 3"),
    "builtins: exec": returns("0", "import builtins\nbuiltins.exec = builtins.compile = lambda *a, **k: None"),
    "builtins: int": returns("int(0)", "import builtins\nbuiltins.int = lambda x: 8"),
    "time: clock set back": "import time\ntime.monotonic = time.perf_counter = time.time = lambda: 0.0\ndef f(x):\n    while True: pass\n",
    "time: an eternal definition": "while True: pass\ndef f(x): return 4 * x\n",
    "time: sleep": "import time\ndef f(x):\n    time.sleep(9)\n    return 4 * x\n",
    "time: signals ignored": "import signal\nfor s in range(1, 65):\n    try: signal.signal(s, signal.SIG_IGN)\n    except (OSError, ValueError): pass\ndef f(x):\n    while True: pass\n",
    "time: a lock": "import threading\ndef f(x):\n    l = threading.Lock(); l.acquire(); l.acquire()\n",
    "time: waits for its own socket": "import os\ndef f(x):\n    for fd in range(3, 16):\n        try: os.set_blocking(fd, True); os.read(fd, 1)\n        except OSError: pass\n    return 4 * x\n",
    "memory: a list": "def f(x): return [0] * 10**10\n",
    "memory: text": "def f(x): return 'x' * 10**11\n",
    "memory: a range": "def f(x): return list(range(10**10))\n",
    "memory: threads": "import threading, time\ndef f(x):\n    for _ in range(5000): threading.Thread(target=time.sleep, args=(9,), daemon=True).start()\n    return 4 * x\n",
    "memory: integer": "def f(x): return 1 << 10**12\n",
    "recursion: endless": "def f(x): return f(x)\n",
    "recursion: C stack": "import sys\nsys.setrecursionlimit(10**9)\ndef f(x):\n    l = []\n    for _ in range(10**6): l = [l]\n    return l == l and repr(l)\n",
    "recursion: itself": "def f(x):\n    l = []\n    l.append(l)\n    return l\n",
    "values: nan": returns("float('nan')"),
    "values: lazily": returns("(4 * x for _ in [0])"),
    "values: a coroutine": "async def f(x): return 4 * x\n",
    "values: its own class": returns("type('int', (int,), {})"),
    "values: a text of it": returns("str(4 * x)"),
    "values: in a list": returns("[4 * x]"),
    "values: bytes": returns("bytes([8])"),
    "values: huge text": returns("str(10 ** 4299) * 100"),
    "values: a module": returns("__import__('math')"),
    "values: nothing": returns("None"),
    "text: null byte": "def f(x):\n    return 4 * x\n\0\n",
    "text: lone surrogate": "def f(x):\n    return '\ud800'\n",
    "text: tabs and blanks": "def f(x):\n\ty = 4\n        return y * x\n",
    "text: nothing": "",
    "text: an encoding of its own": "# coding: rot13\nqrs s(k): erghea 4 * k\n",
    "text: 20,000 brackets": "def f(x): return " + "(" * 20000 + "4 * x" + ")" * 20000 + "\n",
    "text: 15,000 minus signs": "def f(x): return " + "-" * 15000 + "x\n",
    "import: a module that is not there": "import numpyy\ndef f(x): return 4 * x\n",
    "import: the project": "from evaluation.judge import Judge\ndef f(x): return 4 * x\n",
    "import: the harness' sandbox": "import wire\ndef f(x): return 4 * x\n",
    "state: right three times": "k = [0]\ndef f(x):\n    k[0] += 1\n    return 4 * x if k[0] <= 3 else 0\n",
    "state: guesses": "import random\ndef f(x): return random.randrange(10**9)\n",
}  # fmt: skip
"""None of these computes the answer."""

HONEST = {
    "prints": "def f(x):\n    print('x' * 100000)\n    return 4 * x\n",
    "main block": "def f(x):\n    return 4 * x\nif __name__ == '__main__':\n    print(f(int(input())))\n",
    "warns": "import warnings\ndef f(x):\n    warnings.warn('old')\n    return 4 * x\n",
    "its own class": "class A:\n    def __init__(self, x): self.x = x\n    def four(self): return 4 * self.x\ndef f(x): return A(x).four()\n",
    "dataclass": "from dataclasses import dataclass\n@dataclass\nclass A:\n    x: int\ndef f(x): return A(4 * x).x\n",
    "numpy": "import numpy as np\ndef f(x): return int(np.int64(4) * x)\n",
    "threads": "import threading\ndef f(x):\n    r = []\n    t = threading.Thread(target=lambda: r.append(4 * x)); t.start(); t.join()\n    return r[0]\n",
    "executor": "from concurrent.futures import ThreadPoolExecutor\ndef f(x):\n    with ThreadPoolExecutor(2) as e: return e.submit(lambda: 4 * x).result()\n",
    "asyncio": "import asyncio\nasync def g(x):\n    await asyncio.sleep(0)\n    return 4 * x\ndef f(x): return asyncio.run(g(x))\n",
    "recursion": "def f(x, n=900): return 4 * x if n == 0 else f(x, n - 1)\n",
    "limit raised": "import sys\nsys.setrecursionlimit(10**6)\ndef g(n): return 0 if n == 0 else g(n - 1)\ndef f(x): return 4 * x + g(20000)\n",
    "memory": "def f(x):\n    b = bytearray(1 << 28)\n    return 4 * x\n",
    "a fifth of a second": "import time\ndef f(x):\n    time.sleep(0.2)\n    return 4 * x\n",
    "random": "import random\nrandom.seed(1)\ndef f(x):\n    random.random()\n    return 4 * x\n",
    "big numbers": "def f(x): return 4 * x + 10**4000 - 10**4000\n",
    "a file-like": "import io\ndef f(x):\n    s = io.StringIO(str(4 * x))\n    return int(s.read())\n",
    "stdlib": "import decimal, fractions, statistics, datetime, json, csv, hashlib, textwrap, calendar\ndef f(x): return int(decimal.Decimal(4) * x)\n",
    "full-width letters": "def \uff46(x):\n    return 4 * x\n",
    "signals handled": "import signal\nsignal.signal(signal.SIGTERM, signal.SIG_IGN)\ndef f(x): return 4 * x\n",
    "bool for int": "def f(x): return 4 * x if x != 0 else False\n",
}  # fmt: skip


def corpus() -> list[tuple[str, str, bool]]:
    """Return (name, program, must pass)."""
    found = [(f"refused {name}", syscall(number), True) for name, number in SYSCALLS.items()]
    found += [(name, canary(attack), True) for name, attack in CANARIES.items()]
    found += [(name, source, False) for name, source in FAKES.items()]
    return found + [(f"honest {name}", source, True) for name, source in HONEST.items()]


def judge_corpus(rewards_too: bool) -> dict[str, object]:
    """Judge all of it; return the wrong verdicts, and what was left behind (run in whatever setting is to be tested)."""
    from evaluation.judge import Judge
    from evaluation.records import Problem, Program

    problem = Problem(
        problem_id="Hostile/1",
        text="quadruple",
        entry_point="f",
        reference="def f(x):\n    return 4 * x  # quadruple\n",
        asserts=("assert f(2) == 8", "assert f(1) == 4", "assert f(5) == 20"),
        base_inputs=[[2], [1], [5]],
        plus_inputs=[[0], [10], [-3], [1000], [7]],
    )
    cases = corpus()
    with Judge([problem], workers=2) as judge:
        zygotes = [z.process.pid for lane in judge.lanes.lanes for z in lane.zygotes.values()]
        verdicts = judge.judge([Program(problem_id=problem.problem_id, source=source) for _, source, _ in cases])
        time.sleep(0.3)
        left = [p for z in zygotes for p in Path(f"/proc/{z}/task/{z}/children").read_text().split()]
        cage = judge.cage
    rewards = verdicts
    if rewards_too:
        with Judge([problem], suites="reward", workers=2) as judge:
            rewards = judge.judge([Program(problem_id=problem.problem_id, source=source) for _, source, _ in cases])
    wrong = [
        (name, must, v.base.value, v.plus and v.plus.value, v.detail)
        for (name, _, must), v, r in zip(cases, verdicts, rewards, strict=True)
        if v.errored or r.errored or v.passed != must or (r.passed != must and not name.startswith("state: right"))
    ]
    return {"programs": len(cases), "wrong": wrong, "left": left, "cage": cage}


CONTAINER = """
import ctypes, struct
# As a container's default profile has it: no namespaces, no mounts, no tracing, no capabilities.
rules = [(0x20, 0, 0, 0)]
for number in (272, 308, 165, 166, 155, 101, 321, 298):
    rules += [(0x15, 0, 1, number), (0x06, 0, 0, 0x00050001)]
rules += [(0x06, 0, 0, 0x7FFF0000)]
code = b"".join(struct.pack("<HBBI", *r) for r in rules)
class Program(ctypes.Structure):
    _fields_ = (("length", ctypes.c_ushort), ("filter", ctypes.c_char_p))
libc = ctypes.CDLL(None, use_errno=True)
assert libc.prctl(38, 1, 0, 0, 0) == 0
assert libc.prctl(22, 2, ctypes.byref(Program(len(rules), code)), 0, 0) == 0
assert libc.unshare(0x10000000) == -1
"""


def in_setting(setting: str) -> dict[str, object]:
    """Judge the corpus in a process of its own."""
    script = f"import json, sys\nsys.path[:0] = {[str(ROOT), str(Path(__file__).parent), *sys.path]!r}\n"
    script += CONTAINER if setting == "container" else ""
    script += f"from test_hostile import judge_corpus\nprint(json.dumps(judge_corpus({setting == 'own user'})))\n"
    user = {"user": NOBODY, "group": NOBODY, "extra_groups": []} if setting == "nobody" else {}
    python = interpreter_of_all() if setting == "nobody" else sys.executable
    env = {"PATH": os.environ["PATH"], "AWS_SECRET_ACCESS_KEY": "secret", "HF_TOKEN": "secret"}
    done = subprocess.run([python, "-c", script], capture_output=True, text=True, env=env, cwd="/", **user)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def interpreter_of_all() -> str | None:
    """Return a Python of this version that any user may run, None if there is none."""
    system = f"/usr/bin/python{sys.version_info.major}.{sys.version_info.minor}"
    for python in (sys.executable, system):
        home = Path(python).resolve().parents
        if Path(python).exists() and all(p.stat().st_mode & 0o001 for p in home):
            return python
    return None


@pytest.mark.parametrize(
    "setting", ["nobody", *(pytest.param(s, marks=pytest.mark.campaign) for s in ("own user", "container"))]
)
def test_no_hostile_program_gets_a_verdict_it_did_not_earn(setting):
    if setting == "nobody" and (os.getuid() != 0 or interpreter_of_all() is None):
        pytest.skip("needs root, and a Python that others may run")
    found = in_setting(setting)
    assert found["wrong"] == []
    assert found["left"] == []
    assert not list(Path("/tmp").glob("cage-leak*"))
    assert found["programs"] > 200


def test_there_are_enough_of_every_kind():
    names = [name for name, _, _ in corpus()]
    assert len(set(names)) == len(names)
    assert len(CANARIES) + len(FAKES) >= 100
