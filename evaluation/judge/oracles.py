"""EvalPlus's word on one value: the comparison of `evalplus.eval.unsafe_execute` (0.3.1), made outside the program.

Kept as they are, because the verdicts are the reference: the tolerance that, once a float is expected, stays for the
rest of the suite; the eight problems compared as sets; the three that only ask for something that is not None; the
alternative formulas. Deliberately different: an object with its own `__eq__` never reaches the comparison; and a root
that HumanEval/32's rule accepts counts, which 0.3.1 forgets (evalplus pull request 201: even its reference fails).
"""

import math
import struct
import warnings
from bisect import bisect_left
from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import Any

from evalplus.eval._special_oracle import (
    MBPP_OUTPUT_NOT_NONE_TASKS,
    MBPP_OUTPUT_SET_EQ_TASKS,
    _digit_distance_nums,
    _poly,
    _surface_Area,
)

from evaluation.judge.wire import HASHED_BYTES, MAX_FULL_BYTES, Malformed, Opaque, decode, items_of, spread

RELATIVE_TOLERANCE = 1e-7
FLOAT_TOLERANCE = 1e-6
MAX_SPREAD = 1 << 22
"""Elements of what numpy makes of two values of different shapes."""
FLOATS, BYTEWISE = 1, 2
"""Flags of an expected value: it switches the tolerance on; equal bytes mean equal values (no NaN inside)."""
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


def too_long(raw: bytes, expected: bytes) -> bool:
    """Say whether `raw` has so many bytes that it cannot be equal; so decoding costs what the expected value costs.

    Equal values differ in size by what their types differ: True takes 1 byte, a described numpy scalar under 100.
    """
    return len(raw) > 100 * len(expected) + 4096


class Comparison:
    """Judges the values of one suite by the reference's; holds no state, so all programs share it."""

    def __init__(
        self,
        entry_point: str,
        family: str,
        atol: float,
        inputs: Sequence[Any],
        expected: Sequence[bytes],
        flags: bytes,
    ) -> None:
        """Make the comparison of a suite.

        Args:
            entry_point: decides the special rules, as in EvalPlus.
            family: `Mbpp` or `HumanEval`, whose special rules apply; anything else has none.
            atol: absolute tolerance of the problem; 0 becomes 1e-6 once a float is expected.
            inputs: argument tuples.
            expected: the reference's values: kind byte and bytes, large ones as hashes.
            flags: of each expected value.
        """
        self.entry_point, self.atol = entry_point if family == "Mbpp" else "", atol
        self.is_root = family == "HumanEval" and entry_point == "find_zero"
        if self.is_root:
            flags = bytes(len(flags))  # any root will do, and EvalPlus checks the reference's as well
        self.inputs, self.expected, self.flags = inputs, expected, flags
        self.not_none = self.entry_point in MBPP_OUTPUT_NOT_NONE_TASKS
        self.first_floats = next((i for i, f in enumerate(flags) if f & FLOATS), len(flags))
        framed = [struct.pack("<I", len(e)) + e for e in expected]
        self.framed = b"".join(framed)
        self.offsets = [0, *accumulate(map(len, framed))]
        self.unsure = [0, *accumulate(not f & BYTEWISE for f in flags)]

    def matches(self, index: int, payload: bytes) -> int:
        """Return how many tests from `index` on a batch of values answers byte for byte; 0 if it is not just that."""
        start = self.offsets[index]
        end = bisect_left(self.offsets, start + len(payload))
        if end == len(self.offsets) or self.unsure[end] > self.unsure[index]:
            return 0
        return end - index if self.framed[start : self.offsets[end]] == payload else 0

    def accepts(self, index: int, raw: bytes) -> bool | None:
        """Return whether a value is right; None if a large one is needed in full.

        Args:
            index: of the test.
            raw: one kind byte (`v` value, `s` set and value, `h` hash of a large one, `x` exception) and its content.
        """
        expected = self.expected[index]
        if raw == expected and self.flags[index] & BYTEWISE:
            return True
        if raw[:1] not in {b"v", b"s", b"h"}:
            return False
        if self.entry_point == "are_equivalent":
            return True
        if self.not_none:
            return raw == expected if raw in {b"vT", b"vF"} else (raw != b"vN") == (expected == b"vT")
        if raw[:1] == b"h":
            return None if expected[:1] == b"h" or 100 * len(expected) > HASHED_BYTES else False
        return expected[:1] != b"h" and self.compare(index, raw, expected)

    def compare(self, index: int, raw: bytes, expected: bytes) -> bool:
        """Return whether a value, whatever its size, is right."""
        if raw[:1] != expected[:1] or len(raw) > MAX_FULL_BYTES:
            return False
        try:
            return self._compare_sets(index, raw, expected) if raw[:1] == b"s" else self._compare(index, raw, expected)
        except _FAILURES:
            return False

    def _tolerance(self, index: int) -> float:
        return FLOAT_TOLERANCE if self.atol == 0 and index >= self.first_floats else self.atol

    def _compare_sets(self, index: int, raw: bytes, expected: bytes) -> bool:
        """Compare where EvalPlus says `set(out) == set(exp)`, and, under a tolerance, the values if that fails."""
        (unique, value), (expected_unique, expected_value) = _split(raw), _split(expected)
        if not too_long(unique, expected_unique) and decode(unique) == decode(expected_unique):
            return True
        if self._tolerance(index) == 0 or too_long(value, expected_value):
            return False
        return is_close(decode(value), decode(expected_value), self._tolerance(index))

    def _compare(self, index: int, raw: bytes, expected: bytes) -> bool:
        raw, expected = raw[1:], expected[1:]
        if too_long(raw, expected):
            return False
        tolerance = self._tolerance(index)
        ours, theirs = items_of(raw), items_of(expected)
        if ours is not None and theirs is not None and len(raw) > 1 << 16:
            if ours[:2] != theirs[:2]:
                return False
            if all(a == b for a, b in zip(ours[2], theirs[2], strict=True)):
                return True
            if tolerance == 0:
                return False
        value, right = decode(raw), decode(expected)
        if b"numpy" in raw and not _alike(value, right) and spread(value, MAX_SPREAD) * len(expected) > MAX_SPREAD:
            return False
        if self.is_root:
            return bool(abs(_poly(self.inputs[index][0], value)) <= self.atol)
        exact = self._exact(index, value, right)
        return exact or (tolerance != 0 and is_close(value, right, tolerance))

    def _exact(self, index: int, value: Any, expected: Any) -> bool:
        exact = value == expected
        if self.entry_point == "sum_div":
            exact = exact or value == 0
        elif self.entry_point == "surface_Area":
            # EvalPlus's tolerance here is that of the tests before.
            atol = FLOAT_TOLERANCE if self.atol == 0 and index > self.first_floats else self.atol
            exact = exact or abs(value - _surface_Area(*self.inputs[index])) <= atol
        elif self.entry_point == "digit_distance_nums":
            exact = exact or value == _digit_distance_nums(*self.inputs[index])
        return bool(exact)


def _alike(value: Any, expected: Any) -> bool:
    """Say whether both are arrays of one shape, which are compared element by element, however many."""
    shape = getattr(value, "shape", None)
    return shape is not None and shape == getattr(expected, "shape", None)


class InFull:
    """A comparison that can get large expected values again; one a program."""

    def __init__(self, comparison: Comparison, again: Callable[[int], bytes]) -> None:
        self.comparison, self.again = comparison, again
        self.matches = comparison.matches

    def accepts(self, index: int, raw: bytes) -> bool | None:
        """Return whether a value is right; None if a large one is needed in full."""
        expected = self.comparison.expected[index]
        if expected[:1] == b"h" and raw[:1] in {b"v", b"s"} and 100 * len(raw) > HASHED_BYTES:
            return self.comparison.compare(index, raw, self.again(index))
        return self.comparison.accepts(index, raw)

    def accepts_in_full(self, index: int, raw: bytes) -> bool:
        """Return whether a large value is right; the reference answers that test once more."""
        expected = self.comparison.expected[index]
        return self.comparison.compare(index, raw, self.again(index) if expected[:1] == b"h" else expected)


def _split(raw: bytes) -> tuple[bytes, bytes]:
    if len(raw) < 5:
        raise Malformed("cut")
    size = struct.unpack_from("<I", raw, 1)[0]
    return raw[5 : 5 + size], raw[5 + size :]


def compared_as_set(entry_point: str) -> bool:
    """Say whether EvalPlus compares this MBPP problem's values as sets."""
    return entry_point in MBPP_OUTPUT_SET_EQ_TASKS


def compared_with_none(entry_point: str) -> bool:
    """Say whether EvalPlus only asks that this MBPP problem's value is not None."""
    return entry_point in MBPP_OUTPUT_NOT_NONE_TASKS


def is_close(value: Any, expected: Any, atol: float) -> bool:
    """Return EvalPlus's approximate equality: same type, same length, numpy's allclose with rtol 1e-7."""
    if type(value) is not type(expected) or isinstance(value, Opaque):
        return False
    if isinstance(expected, list | tuple) and len(value) != len(expected):
        return False
    if type(value) is float and type(expected) is float:
        if math.isfinite(value) and math.isfinite(expected):
            return abs(value - expected) <= atol + RELATIVE_TOLERANCE * abs(expected)
        return value == expected
    import numpy as np

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        a, b = np.asarray(value), np.asarray(expected)
        if math.prod(np.broadcast_shapes(a.shape, b.shape)) > max(MAX_SPREAD, a.size, b.size):
            return False
        return bool(np.allclose(value, expected, rtol=RELATIVE_TOLERANCE, atol=atol))
