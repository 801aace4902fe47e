"""From completions to programs; cases from the fault list are named by their id."""

import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from evaluation.extraction import cut, fenced_program, strip_end_markers
from evaluation.prompts import END_MARKERS, STOP_STRINGS, PromptSpec, extract
from evaluation.records import Problem

CHAT = PromptSpec(name="mbpp/1", rendering="chat", extraction="fenced/1", stop_ids=(0,))
DOCSTRING = PromptSpec(
    name="mbpp/1", rendering="docstring", extraction="continue/1", stop_ids=(0,), stop_strings=STOP_STRINGS
)
PLAIN = PromptSpec(name="toy/1", rendering="plain", extraction="whole/1", stop_ids=(0,))

DBL = "def dbl(x):\n    return 2 * x"


def problem(entry_point: str) -> Problem:
    return Problem(
        problem_id="Mbpp/1", text="?", entry_point=entry_point, reference="", asserts=(f"assert {entry_point}(4) == 8",)
    )


def run(spec: PromptSpec, completion: str, entry_point: str = "dbl"):
    """Execute the extracted program and return its function."""
    scope: dict = {}
    exec(extract(spec, completion, problem(entry_point)), scope)
    return scope[entry_point]


@pytest.mark.parametrize(
    ("case", "completion"),
    [
        (
            "EXTRACT-033 usage after",
            f"```python\n{DBL}\n```\nUsage:\n```python\nprint(dbl(4))\n```\nOutput:\n```\n8\n```",
        ),
        ("EXTRACT-033 usage imports it", f"```python\n{DBL}\n```\n```python\nfrom solution import dbl\n```"),
        ("EXTRACT-034", f"{DBL}\n```\nDone."),
        ("EXTRACT-034 then usage", f"{DBL}\n```\nUsage:\n```python\nprint(dbl(4))\n```"),
        ("EXTRACT-035 py", f"```py\n{DBL}\n```"),
        ("EXTRACT-035 Python", f"```Python\n{DBL}\n```"),
        ("EXTRACT-035 python3", f"```python3\n{DBL}\n```"),
        ("EXTRACT-035 blank", f"```python \n{DBL}\n``` "),
        ("EXTRACT-035 tilde", f"~~~python\n{DBL}\n~~~"),
        ("EXTRACT-035 attribute", f'``` {{.python title="a"}}\n{DBL}\n```'),
        ("EXTRACT-040", f"{DBL}<|endoftext|>"),
        ("EXTRACT-040 fenced", f"```python\n{DBL}<|im_end|>\n```<|im_end|>\n<|endoftext|>"),
        ("EXTRACT-049", f"Return only code in a ``` block.\n### Answer:\n```python\n{DBL}\n```"),
        ("EXTRACT-049 echoed fence", f"Only code:\n```\n### Answer:\n```python\n{DBL}\n```"),
        ("EXTRACT-049 install", f"```bash\npip install x\n```\n```python\n{DBL}\n```"),
        ("corrected", f"```python\ndef dbl(x):\n    return x\n```\nWait:\n```python\n{DBL}\n```"),
        ("truncated", f"```python\n{DBL}\n"),
        ("no fence", DBL),
        ("crlf", f"Sure.\r\n```python\r\n{DBL}\r\n```\r\n".replace("\n    ", "\r\n    ")),
        ("in a list", "1. Code:\n   ```python\n   def dbl(x):\n       return 2 * x\n   ```"),
        ("is a list item", "1. ```python\n   def dbl(x):\n       return 2 * x\n   ```"),
        ("closing fence indented", f"```python\n{DBL}\n      ```\nThat is all"),
        ("longer fence", f"````python\n{DBL}\n````"),
        ("nested markdown", f"```markdown\n```python\n{DBL}\n```\n```"),
        ("text after the closing fence", f"```python\n{DBL}\n``` This doubles."),
        ("lambda", "```python\ndbl = lambda x: 2 * x\n```\n```\n8\n```"),
        (
            "annotated",
            "```python\nfrom collections.abc import Callable\ndbl: Callable = lambda x: 2 * x\n```\n```\n8\n```",
        ),
        ("class", "```python\nclass dbl(int):\n    def __new__(cls, x): return 2 * x\n```\n```\n8\n```"),
        (
            "fence in a docstring",
            "```python\ndef dbl(x):\n    '''\n    ```\n    dbl(4)\n    ```\n    '''\n    return 2 * x\n```\nDone",
        ),
    ],
)
def test_double_is_found(case, completion):
    assert run(CHAT, completion)(4) == 8, case


def test_imported_function_is_found():
    assert run(CHAT, "```python\nfrom math import gcd\n```\nE.g.\n```\n6\n```", "gcd")(12, 18) == 6


@pytest.mark.parametrize("spec", [CHAT, DOCSTRING, PLAIN])
def test_carriage_returns_add_no_lines_to_strings(spec):
    """EXTRACT-038."""
    assert run(spec, "def f(s):\r\n\treturn '''a\r\nb'''\r\n", "f")(0) == "a\nb"


@pytest.mark.parametrize("wrap", ["{}", "```python\n{}\n```"])
@pytest.mark.parametrize(
    ("source", "entry", "argument", "value"),
    [
        ("from functools import lru_cache\n\n@lru_cache(None)\ndef fib(n):\n    return n if n < 2 else "
         "fib(n-1) + fib(n-2)", "fib", 10, 55),
        ("def odds(n):\n    for i in range(n):\n        if i % 2:\n            yield i\n"
         "def sum_odds(n):\n    return sum(odds(n))", "sum_odds", 6, 9),
        ("LOW, HIGH = 0, 9\ndef inside(x):\n    return LOW <= x <= HIGH", "inside", 5, True),
        ("try:\n    import nothing_here\nexcept ImportError:\n    N = 3\ndef f(x):\n    return N * x", "f", 2, 6),
        ("MEMO = {}\nMEMO.update({1: 5})\ndef f(x):\n    return MEMO[x]", "f", 1, 5),
    ],
)  # fmt: skip
def test_programs_are_taken_whole(wrap, source, entry, argument, value):
    """EXTRACT-041, EXTRACT-042, EXTRACT-043: decorators, helpers without return and top-level statements stay."""
    assert extract(CHAT, wrap.format(source), problem(entry)) == source
    assert run(CHAT, wrap.format(source), entry)(argument) == value


def test_demo_statements_stay():
    """EXTRACT-048: whatever they do, they do it in training and evaluation alike."""
    source = "def f(n):\n    return n\nn = int(input())\nprint(f(n))"
    assert extract(CHAT, f"```\n{source}\n```", problem("f")) == source
    assert extract(PLAIN, source, problem("f")) == source


def test_docstring_stops_where_evalplus_stops():
    completion = "import math\n\ndef dbl(x):\n    print(x)\n    assert x\n    return 2 * x\n"
    for tail in ("\nif __name__ == '__main__':\n    x", "\nassert dbl(4) == 8", "\nprint(dbl(4))", '\n"""\nNext'):
        assert extract(DOCSTRING, completion + tail, problem("dbl")) == completion
    assert extract(DOCSTRING, DBL + "<|endoftext|>def dbl", problem("dbl")) == DBL


def test_without_a_definition_the_last_block_is_taken():
    assert fenced_program("a\n```\nb\n```\nc\n```\nd\n```", "f") == "d"
    assert fenced_program("no code at all", "f") == "no code at all"
    assert fenced_program("", "f") == ""


def test_end_markers_inside_the_program_stay():
    source = "def f(s):\n    return s.replace('</s>', '')"
    assert extract(CHAT, f"```\n{source}\n```", problem("f")) == source
    assert strip_end_markers("x</s> \n<|im_end|>\n", END_MARKERS) == "x"
    assert cut("ab", ()) == "ab"


@given(st.text(alphabet=st.sampled_from(list("`~ \n\tpydef(f):=#1.-x'\"")) | st.characters(), max_size=200))
def test_any_text_gives_a_text(text):
    for spec in (CHAT, DOCSTRING, PLAIN):
        assert isinstance(extract(spec, text, problem("f")), str)


@given(st.lists(st.sampled_from(["x = 1", "    y", "", "def g():", "    return '`'", "# ```x```"]), max_size=8))
def test_a_fenced_program_comes_back_as_written(lines):
    source = "\n".join([DBL, *lines])
    assert fenced_program(f"Here:\n```python\n{source}\n```\nDone.", "dbl") == source


@pytest.mark.parametrize(
    "text",
    [
        "```\n" * 20_000,
        "```" + " " * 100_000 + "`",
        "`" * 100_000,
        " " * 100_000 + "```",
        "import " * 20_000,
        "def f" + " " * 100_000,
        "f" + " " * 100_000 + ":" * 1000,
        "</s>" * 5_000,
        "(" * 100_000,
        "\0" * 1000 + "```\n\0\n```",
    ],
)
def test_hostile_texts_take_no_time(text):
    start = time.process_time()
    for spec in (CHAT, DOCSTRING, PLAIN):
        extract(spec, text, problem("f"))
    assert time.process_time() - start < 2
