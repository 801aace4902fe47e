"""EvalPlus's word on one value: the comparison of `evalplus.eval.unsafe_execute` (0.3.1), made outside the program.

Kept as they are, because the verdicts are the reference: the tolerance that, once a float is expected, stays for the
rest of the suite; the eight problems compared as sets; the three that only ask for something that is not None; the
alternative formulas. Deliberately different: an object with its own `__eq__` never reaches the comparison, and values
over 256 KiB compare by the hash of their bytes.
"""

import math
import warnings
from collections.abc import Sequence
from typing import Any

from evalplus.eval._special_oracle import (
    MBPP_OUTPUT_NOT_NONE_TASKS,
    MBPP_OUTPUT_SET_EQ_TASKS,
    _digit_distance_nums,
    _surface_Area,
)

from evaluation.judge.wire import Malformed, decode, has_nan

RELATIVE_TOLERANCE = 1e-7
FLOAT_TOLERANCE = 1e-6


class Comparison:
    """Judges the values of one suite in order; the tolerance is its only state."""

    def __init__(
        self, entry_point: str, special: bool, atol: float, inputs: Sequence[Any], expected: Sequence[bytes]
    ) -> None:
        self.entry_point, self.atol = entry_point, atol
        self.inputs, self.expected = inputs, expected
        self.as_set = special and entry_point in MBPP_OUTPUT_SET_EQ_TASKS
        self.not_none = special and entry_point in MBPP_OUTPUT_NOT_NONE_TASKS
        self.special = special

    def accepts(self, index: int, raw: bytes) -> bool:
        """Return whether the value of test `index`, as the child sent it, is right.

        Args:
            index: of the test; indices ascend within a suite.
            raw: one kind byte (`v` value, `h` hash of a large value, `x` exception) and its content.
        """
        expected_raw = self.expected[index]
        if raw[:1] == b"h" or expected_raw[:1] == b"h":
            return raw == expected_raw
        if raw[:1] != b"v" or expected_raw[:1] != b"v":
            return False
        expected = decode(expected_raw[1:])
        try:
            same = raw == expected_raw and not has_nan(expected)
            return self._accepts(index, same, raw, expected)
        except (Malformed, TypeError, ValueError, OverflowError, ArithmeticError, RecursionError, AttributeError):
            return False

    def _accepts(self, index: int, same: bool, raw: bytes, expected: Any) -> bool:
        if self.as_set:
            value, as_set = decode(raw[1:])
            expected, expected_set = expected
            exact = bool(as_set == expected_set)
        else:
            value = expected if same else decode(raw[1:])
            exact = same or self._exact(index, value, expected)
        if self.atol == 0 and _is_floats(expected):
            self.atol = FLOAT_TOLERANCE
        if exact or self.atol == 0:
            return exact
        if type(value) is not type(expected):
            return False
        if isinstance(expected, list | tuple) and len(value) != len(expected):
            return False
        return _all_close(value, expected, self.atol)

    def _exact(self, index: int, value: Any, expected: Any) -> bool:
        if not self.special:
            return bool(value == expected)
        if self.not_none:
            return bool(value == expected) if isinstance(value, bool) else expected == (value is not None)
        if self.entry_point == "are_equivalent":
            return True
        exact = value == expected
        if self.entry_point == "sum_div":
            exact = exact or value == 0
        elif self.entry_point == "surface_Area":
            exact = exact or abs(value - _surface_Area(*self.inputs[index])) <= self.atol
        elif self.entry_point == "digit_distance_nums":
            exact = exact or value == _digit_distance_nums(*self.inputs[index])
        return bool(exact)


def _is_floats(expected: Any) -> bool:
    if isinstance(expected, float):
        return True
    if isinstance(expected, list | tuple) and expected:
        return all(isinstance(x, float) for x in expected)
    return getattr(getattr(expected, "dtype", None), "name", "") in {"float32", "float64"}


def _all_close(value: Any, expected: Any, atol: float) -> bool:
    if type(value) is float and type(expected) is float:
        if math.isfinite(value) and math.isfinite(expected):
            return abs(value - expected) <= atol + RELATIVE_TOLERANCE * abs(expected)
        return value == expected
    import numpy as np

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return bool(np.allclose(value, expected, rtol=RELATIVE_TOLERANCE, atol=atol))
