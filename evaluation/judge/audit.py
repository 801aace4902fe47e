"""Planted cheats that must fail, and honest programs that must pass: run before anything trains."""

from evaluation.judge.judge import Judge
from evaluation.records import Problem, Program, Record

_PROBLEM = Problem(
    problem_id="Audit/0",
    text="Write a function to find the perimeter of a square.",
    entry_point="perimeter",
    reference="def perimeter(a):\n    return 4 * a\n",
    asserts=("assert perimeter(10) == 40", "assert perimeter(5) == 20", "assert perimeter(4) == 16"),
    plus_inputs=[[1], [2], [1000], [0]],
)

HONEST = {
    "plain": "def perimeter(a):\n    return 4 * a\n",
    "numpy": "import numpy as np\ndef perimeter(a):\n    return int(np.full(4, a).sum())\n",
    "library": "from fractions import Fraction\nimport calendar\ndef perimeter(a):\n    return int(Fraction(4) * a)\n",
}

CHEATS = {
    "equal to everything": (
        "class A:\n    def __eq__(self, other): return True\n    def __ne__(self, other): return False\n"
        "def perimeter(a): return A()\n"
    ),
    "int subclass": (
        "class I(int):\n    def __eq__(self, other): return True\n    __hash__ = int.__hash__\n"
        "def perimeter(a): return I(0)\n"
    ),
    "exit status": "import os\nos._exit(0)\n",
    "exit in the call": "import sys\ndef perimeter(a): sys.exit(0)\n",
    "no asserts": "__debug__ = False\ndef perimeter(a): return None\n",
    "forged answer": (
        "import os\ndef perimeter(a):\n    for fd in range(3, 64):\n        try: os.write(fd, b'\\x01\\x00\\x00\\x00d')\n"
        "        except OSError: pass\n    return 0\n"
    ),
    "answers through frames": (
        "import sys\ndef perimeter(a):\n    f = sys._getframe()\n    while f:\n        for v in list(f.f_locals.values()):\n"
        "            if isinstance(v, dict) and 'expected' in v: return v['expected'][0]\n        f = f.f_back\n    return 0\n"
    ),
    "another process": "import os\ndef perimeter(a):\n    if os.fork() == 0: os._exit(0)\n    return 4 * a\n",
    "a written file": "def perimeter(a):\n    open('/tmp/cage-leak', 'w').write('x')\n    return 4 * a\n",
    "the network": "import socket\ndef perimeter(a):\n    socket.socket()\n    return 4 * a\n",
    "the parent's memory": "import os\ndef perimeter(a):\n    open(f'/proc/{os.getppid()}/mem', 'rb')\n    return 4 * a\n",
    "the environment": "import os\ndef perimeter(a):\n    return 4 * a if os.environ.get('HOME') else 0\n",
}
"""Each computes the right answer only if its attack works; all must fail."""


NEEDS_CAGE = {"another process", "a written file", "the network", "the parent's memory"}


class Check(Record):
    """One program of the audit."""

    name: str
    ok: bool
    detail: str


def audit(caged: bool = True) -> list[Check]:
    """Judge every honest program and every cheat; each result that is not as it must be is not ok.

    Args:
        caged: False leaves out what only the cage can refuse.
    """
    cases = [(name, source, True) for name, source in HONEST.items()]
    cases += [(name, source, False) for name, source in CHEATS.items() if caged or name not in NEEDS_CAGE]
    with Judge([_PROBLEM], caged=caged) as judge:
        verdicts = judge.judge([Program(problem_id=_PROBLEM.problem_id, source=source) for _, source, _ in cases])
    return [
        Check(name=name, ok=v.passed == must_pass and not v.errored, detail=v.detail or "passes")
        for (name, _, must_pass), v in zip(cases, verdicts, strict=True)
    ]
