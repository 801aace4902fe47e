"""When two programs are the same: only what nobody can observe is taken away."""

import json
import threading
import time
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from evaluation.judge.identity import MAX_BYTES, read

SHARED = Path(__file__).resolve().parents[2].parent / "shared"
BASE = "def f(xs):\n    total = 0\n    for x in xs:\n        total += x\n    return total\n"


def same(a, b, kept=("f",)):
    return read(a, kept).digest == read(b, kept).digest


@pytest.mark.parametrize(
    "other",
    [
        "def f(numbers):\n    s = 0\n    for n in numbers:\n        s += n\n    return s\n",
        'def f(xs):\n    """Sum."""\n    total = 0\n    for x in xs:\n        total += x\n    return total\n',
        '"""A module."""\n# sums\ndef f(xs):\n\ttotal = 0\n\tfor x in xs: total += x\n\treturn (total)\n',
        BASE.replace("\n", "\r\n"),
        "\n\n" + BASE,
    ],
)
def test_layout_names_and_docstrings_do_not_matter(other):
    assert same(BASE, other)


@pytest.mark.parametrize(
    ("a", "b"),
    [
        (BASE, BASE.replace("+=", "-=")),
        (BASE, BASE.replace("total = 0", "total = 0.0")),
        (BASE, BASE.replace("total = 0", "total = False")),
        (BASE, BASE.replace("f(xs)", "g(xs)")),
        ("def f(a, b):\n    return a - b\n", "def f(a, b):\n    return b - a\n"),
        ("def f(a, b):\n    return a\n", "def f(a, b):\n    return b\n"),
        ("def f(x): return 'a'\n", "def f(x): return b'a'\n"),
        ("def f(x): return -0.0\n", "def f(x): return 0.0\n"),
        ("def f(x): return [x]\n", "def f(x): return (x,)\n"),
        ("def f(x): return [x, [x]]\n", "def f(x): return [[x], x]\n"),
        ("def f(x): return max(x)\n", "def f(x): return min(x)\n"),
        ("def f(x):\n    return unknown\n", "def f(x):\n    return other\n"),
        # Names that the program itself can see.
        ("def f(a):\n    return locals()\n", "def f(b):\n    return locals()\n"),
        ("def f(a):\n    return eval('a')\n", "def f(b):\n    return eval('a')\n"),
        ("def f(a):\n    return f.__doc__\n", 'def f(a):\n    "x"\n    return f.__doc__\n'),
        ("def f(a):\n    return h(n=a)\ndef h(n): return n\n", "def f(a):\n    return h(n=a)\ndef h(m): return m\n"),
        ("def f(a):\n    return h(**{'n': a})\ndef h(n): return n\n", "def f(a):\n    return h(**{'n': a})\ndef h(m): return m\n"),
        ("class A:\n    x = 1\ndef f(a): return A.x\n", "class A:\n    y = 1\ndef f(a): return A.x\n"),
        ("import math\ndef f(math): return math\n", "import math\ndef f(a): return math\n"),
        ("def f(a):\n    return max(a)\nmax = min\n", "def f(a):\n    return mox(a)\nmox = min\n"),
        ("from m import *\ndef f(a): return a\n", "from m import *\ndef f(b): return b\n"),
        ("def f(a):\n    global g\n    g = a\n    return g\n", "def f(a):\n    g = a\n    return g\n"),
        ("def f(a)\n    return 1\n", "def f(a)\n    return 2\n"),
    ],
)  # fmt: skip
def test_what_can_be_observed_keeps_programs_apart(a, b):
    if not a.startswith(("def f(a):\n    return max", "import math")):
        assert not same(a, b)
        return
    assert not same(a, b, ("f",))


def test_names_that_tests_use_stay():
    a, b = (
        "def f(x): return helper(x)\ndef helper(y): return y\n",
        "def f(x): return other(x)\ndef other(y): return y\n",
    )
    assert same(a, b)
    assert not same(a, b, ("f", "helper"))


@pytest.mark.parametrize(
    ("source", "clean"),
    [
        (BASE, True),
        ("import math, re\nfrom collections import Counter\ndef f(x): return Counter(x)\n", True),
        ("import sys\nsys.setrecursionlimit(9999)\ndef f(x): return x\n", False),
        ("import math\nmath.pi = 3\ndef f(x): return x\n", False),
        ("import decimal\ndef f(x): return x\n", False),
        ("def f(x):\n    try: return 1\n    except MemoryError: return 2\n", False),
        ("def f(x):\n    return setattr(x, 'a', 1)\n", False),
        ("def f(x):\n    return x.__class__\n", False),
        ("from . import x\ndef f(x): return x\n", False),
    ],
)
def test_only_programs_that_leave_nothing_behind_are_clean(source, clean):
    assert read(source, ("f",)).clean is clean


FRAGMENTS = ["(", "[", "{", "f(", "-", "not ", "lambda x:", "1 if ", "a.", "(x:=", "{**", "await ", "1<", "a,", "x="]


@pytest.mark.parametrize("fragment", FRAGMENTS)
def test_hostile_text_is_read_in_no_time_and_does_no_harm(fragment):
    """In a thread, whose stack is the smallest on which programs are read."""
    found = []
    text = (fragment * MAX_BYTES)[: MAX_BYTES - 2] + "x\n"
    started = time.process_time()
    thread = threading.Thread(target=lambda: found.append(read(text, ())))
    thread.start()
    thread.join()
    assert len(found) == 1
    assert time.process_time() - started < 2


@given(st.text(alphabet="defxyz(): \n=+1,[]'\"#\\\0\ud800{}lambdtrnui", max_size=200))
@settings(max_examples=300, deadline=None)
def test_any_text_is_read(text):
    assert len(read(text, ("f",)).digest) == 20


@pytest.mark.skipif(not SHARED.is_dir(), reason="the data files are not beside the checkout")
def test_recorded_programs_that_count_as_the_same_have_the_same_verdicts():
    groups = {}
    for path in sorted((SHARED / "data/evalplus_verdicts").glob("*.jsonl")):
        for row in map(json.loads, path.read_text().splitlines()):
            key = row["task_id"], read(row["solution"], ()).digest
            groups.setdefault(key, set()).add((row["base_status"], row["plus_status"]))
    mixed = {k: v for k, v in groups.items() if len(v) > 1 and k[0] not in {"Mbpp/160", "Mbpp/599", "Mbpp/566"}}
    assert mixed == {}
    assert len(groups) < 1100  # of 1,134
