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
        ("def f(x, k=4): return k * x\n", "def f(x, __debug__=4): return __debug__ * x\n"),
        ("g = lambda k: 4\ndef f(x): return x\n", "g = lambda __debug__: 4\ndef f(x): return x\n"),
        ("import math as __builtins__\ndef f(x): return a\ndef g(): a = 1\n", "import math as __builtins__\ndef f(x): return b\ndef g(): b = 1\n"),
        ("from functools import singledispatch\nT = int\n@singledispatch\ndef f(x): return 0\n@f.register\ndef _(x: 'T'): return 4 * x\n", "from functools import singledispatch\nS = int\n@singledispatch\ndef f(x): return 0\n@f.register\ndef _(x: 'T'): return 4 * x\n"),
    ],
)  # fmt: skip
def test_what_can_be_observed_keeps_programs_apart(a, b):
    if not a.startswith(("def f(a):\n    return max", "import math")):
        assert not same(a, b)
        return
    assert not same(a, b, ("f",))


PLACES = ["{}def f(x):{}\n    {}\n    return ", "\n\n{}# moved\ndef f(y):{}\n    'a text'\n    {}\n    return "]
"""The same program for who looks at what it does only: other lines, another name of a variable, a docstring."""
SEEING = {
    "a line, by an exception": ("", "try: 1 / 0\n    except Exception as e: n = e.__traceback__.tb_lineno", "n"),
    "a line, by a frame": ("import sys\n", "n = sys._getframe().f_lineno", "n"),
    "a line, by code": ("", "pass", "f.__code__.co_firstlineno"),
    "a line, by a format": ("", "pass", "'{0.__code__.co_firstlineno}'.format(f)"),
    "a line, by a format put together": ("", "t = '{0.__code__.co_first' + 'lineno}'", "t.format(f)"),
    "a line, by a format taken from its class": ("", "pass", "str.format('{0.__code__.co_firstlineno}', f)"),
    "a line, by format_map": ("", "pass", "'{f.__code__.co_firstlineno}'.format_map({'f': f})"),
    "a line, by a formatter": ("from string import Formatter\n", "pass", "Formatter().format('{0.__code__.co_firstlineno}', f)"),
    "a line, by attrgetter": ("import operator\n", "pass", "operator.attrgetter('__code__.co_firstlineno')(f)"),
    "a line, by a renamed attrgetter": ("from operator import attrgetter as a\n", "pass", "a('__code__.co_firstlineno')(f)"),
    "a line, by a generator": ("", "g = (i for i in [1])", "g.gi_frame.f_lineno"),
    "a line, by a module's own import": ("import random\n", "pass", "random._os.sys._getframe(0).f_lineno"),
    "a line, by another module": ("import traceback\n", "pass", "traceback.extract_stack()[-1].lineno"),
    "a line, by a warning": ("import warnings\n", "with warnings.catch_warnings(record=True) as w: warnings.simplefilter('always'); warnings.warn('')", "w[0].lineno"),
    "a docstring": ("", "pass", "f.__doc__"),
    "a docstring, by getattr": ("", "pass", "getattr(f, '__doc__')"),
    "a docstring, by partial getattr": ("", "g = getattr", "g(f, '_' + '_doc__')"),
    "a docstring, by a class": ("class A: __init__ = object.__init__\n", "pass", "f.__doc__"),
    "a variable, by locals": ("", "pass", "sorted(locals())"),
    "a variable, by vars": ("", "v = vars", "sorted(v())"),
    "a variable, by dir": ("", "pass", "dir()"),
    "a variable, by eval": ("", "pass", "eval('[n for n in dir() if n in \"xy\"]')"),
    "a variable, by builtins": ("import builtins\n", "pass", "sorted(builtins.locals())"),
    "a variable, by the dictionary of builtins": ("", "pass", "sorted(print.__self__.locals())"),
    "a variable, by an error": ("", "try: f()\n    except TypeError as e: n = str(e)", "n"),
    "a variable, by help on its signature": ("import inspect\n", "pass", "str(inspect.signature(f))"),
    "a variable, by wraps": ("import functools\n", "pass", "functools.wraps(f)(lambda: 0).__wrapped__.__code__.co_varnames[0]"),
}  # fmt: skip


@pytest.mark.parametrize("way", SEEING)
def test_no_way_of_seeing_a_line_a_docstring_or_a_name_makes_two_programs_one(way):
    before, work, result = SEEING[way]
    a, b = (place.format(before, "", work) + result + "\n" for place in PLACES)
    told = []
    for source in (a, b):
        space = {}
        exec(source, space)
        told.append(space["f"](0))
    assert told[0] != told[1], "the case shows nothing"
    assert not same(a, b)


@pytest.mark.parametrize(
    ("a", "b"),
    [
        ("def f(x): return str(g)\ndef g(): 0\n", "def f(x): return str(h)\ndef h(): 0\n"),
        ("def f(x):\n    def g(): 0\n    return str(g)\n", "def f(x):\n    def h(): 0\n    return str(h)\n"),
        ("def f(x): return x\n", "# numpy\ndef f(x): return x\n"),
        ("def f(x): return x\n", "# \uff4eumpy\ndef f(x): return x\n"),
        ("def f(x): return x\n", "def f(x):\n    '__import__'\n    return x\n"),
        ("def f(a, **k): return k\n", "def f(b, **k): return k\n"),
    ],
)
def test_functions_keep_their_names_and_words_that_choose_the_harness_count(a, b):
    assert same(a, b) is a.startswith("def f(a, **k)")


def test_names_that_tests_use_stay():
    a, b = ("def f(x): return size\nsize = 3\n", "def f(x): return width\nwidth = 3\n")
    assert same(a, b)
    assert not same(a, b, ("f", "size"))


BACK_DOORS = [
    ("re", "_cache"), ("re", "__builtins__"), ("math", "__dict__"), ("copy", "dispatch_table"),
    ("operator", "attrgetter"), ("functools", "wraps"), ("functools", "update_wrapper"), ("typing", "final"),
    ("typing", "runtime_checkable"), ("typing", "no_type_check"), ("typing", "Literal"), ("typing", "Annotated"),
]  # fmt: skip


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
        ("import random\ndef f(x): return random.random()\n", False),
        ("import datetime, re\ndef f(x): return datetime.datetime.min, re.sub('a', 'b', x)\n", True),
        ("import collections\ndef f(x): return isinstance(x, collections.abc.Sized)\n", True),
        ("import statistics\ndef f(x): return statistics.random.seed(x)\n", False),
        ("import statistics\ndef f(x): return statistics.\uff52andom.seed(x)\n", False),
        ("from statistics import random\ndef f(x): return random.seed(x)\n", False),
        ("from statistics import \uff52andom as r\ndef f(x): return r.seed(x)\n", False),
        ("import statistics as random\ndef f(x): return random.random.seed(x)\n", False),
        ("import statistics\nrandom = statistics\ndef f(x): return random.random.seed(x)\n", False),
        ("import fractions as re\ndef f(x): return re.re.purge()\n", False),
        ("import typing\ndef f(x): return typing.runtime_checkable(x)\n", False),
        ("from collections import namedtuple, Counter\ndef f(x): return Counter(x)\n", True),
        *((f"from {m} import {n} as g\ndef f(x): return g\n", False) for m, n in BACK_DOORS),
        ("import math\ndef f(x):\n    match math:\n        case object(__dict__=d): return d\n", False),
        ("import math\ndef f(x): return '{0.__dict__}'.format(math)\n", False),
        ("def f(x):\n    try: return 1\n    finally: return 2\n", False),
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
