"""MBPP's asserts, judged outside the program: the call goes in, its value comes out, the rest is evaluated here.

`assert f([1, 2]) == 3` becomes the call's arguments and the question `value == 3`. Where arguments need the program's
own names (a tree of its Node class, built by the problem's set-up code), the call is evaluated in the program's
namespace instead; the comparison still happens here. So a program that redefines asserts, `==` or the checker's name
changes nothing.
"""

import ast
import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from types import CodeType
from typing import Any

from evaluation.judge.wire import Malformed, decode, spread

_VALUES = "__values"
MAX_BYTES = 1 << 21
"""Of a value that an assert is asked of; none of MBPP's comes near it, and decoding many small items costs 40 x."""
MAX_ELEMENTS = 1 << 16
"""Of its numpy arrays: numpy broadcasts what it is compared with."""
_BUILTINS = {
    f.__name__: f
    for f in (abs, all, any, bool, dict, float, frozenset, int, len, list, max, min, repr, round, set, sorted, str, sum,
              tuple, type)
}  # fmt: skip
_NAMES = {"math": math, "sys": sys, "__builtins__": _BUILTINS}
_FAILURES = (
    Malformed,
    TypeError,
    ValueError,
    ArithmeticError,
    LookupError,
    AttributeError,
    RecursionError,
    MemoryError,
)


@dataclass(frozen=True)
class AssertSuite:
    """Asserts of one problem, taken apart; the comparison of their values."""

    calls: tuple[Any, ...] | None
    """Argument tuples, or None: `expressions` are evaluated in the program's namespace."""
    expressions: tuple[str, ...]
    questions: tuple[CodeType, ...]
    """Compiled expressions over the values."""
    right: dict[int, bytes] = field(default_factory=dict, compare=False)
    """Per assert, the bytes of a value that it holds of."""

    @property
    def size(self) -> int:
        """Number of asserts."""
        return len(self.questions)

    def matches(self, index: int, payload: bytes) -> int:
        """Return 0: each value is looked at."""
        return 0

    def accepts(self, index: int, raw: bytes) -> bool | None:
        """Return whether the assert holds of the value that the child sent; None if it is needed in full."""
        if raw[:1] == b"h":
            return None
        if self.right.get(index) == raw:
            return True
        holds = self.accepts_in_full(index, raw)
        if holds:
            self.right[index] = raw
        return holds

    def accepts_in_full(self, index: int, raw: bytes) -> bool:
        """Return whether the assert holds of a value, whatever its size."""
        if raw[:1] != b"v" or len(raw) > MAX_BYTES:
            return False
        try:
            value = decode(raw[1:])
            if b"numpy" in raw and spread(value, MAX_ELEMENTS) > MAX_ELEMENTS:
                return False
            if self.calls is not None:
                value = (value,)
            elif type(value) is not tuple:
                return False
            return bool(eval(self.questions[index], {**_NAMES, _VALUES: value}))
        except _FAILURES:
            return False


def take_apart(entry_point: str, asserts: Sequence[str], setup: str) -> AssertSuite:
    """Split each assert into what the program computes and the question asked of it.

    Raises:
        ValueError: a line is not an assert, or does not call the function.
    """
    parsed = [_Assert(entry_point, line) for line in asserts]
    calls = [p.arguments for p in parsed]
    literal = all(c is not None for c in calls) and not setup.strip()
    return AssertSuite(
        calls=tuple(calls) if literal else None,
        expressions=tuple(p.expression for p in parsed),
        questions=tuple(p.question for p in parsed),
    )


class _Assert(ast.NodeTransformer):
    """One assert with each call of the function replaced by its place among the values."""

    def __init__(self, entry_point: str, line: str) -> None:
        self.entry_point = entry_point
        self.calls: list[ast.Call] = []
        body = ast.parse(line.strip()).body
        if len(body) != 1 or not isinstance(body[0], ast.Assert):
            raise ValueError(f"asserts: not one assert statement: {line.strip()[:80]}")
        question = ast.Expression(self.visit(body[0].test))
        if not self.calls:
            raise ValueError(f"asserts: {entry_point} is not called in: {line.strip()[:80]}")
        self.question: CodeType = compile(ast.fix_missing_locations(question), "<assert>", "eval", dont_inherit=True)
        self.expression = "(" + "".join(ast.unparse(c) + ", " for c in self.calls) + ")"

    def visit_Call(self, node: ast.Call) -> ast.AST:
        """Replace a call of the function; look inside any other."""
        if isinstance(node.func, ast.Name) and node.func.id == self.entry_point:
            self.calls.append(node)
            name = ast.Name(_VALUES, ast.Load())
            return ast.Subscript(name, ast.Constant(len(self.calls) - 1), ast.Load())
        return self.generic_visit(node)

    @property
    def arguments(self) -> tuple[Any, ...] | None:
        """The arguments, when there is one call and they are literals."""
        if len(self.calls) != 1 or self.calls[0].keywords:
            return None
        try:
            return tuple(ast.literal_eval(a) for a in self.calls[0].args)
        except (ValueError, TypeError, SyntaxError):
            return None
