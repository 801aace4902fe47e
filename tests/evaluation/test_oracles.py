"""EvalPlus's rules for one value against EvalPlus's own code, and the bounds on what a comparison may cost."""

import marshal
import struct
import time
import tracemalloc

import numpy as np
import pytest
from evalplus.eval import is_floats
from hypothesis import given, settings
from hypothesis import strategies as st

from evaluation.judge import Judge
from evaluation.judge.asserts import take_apart
from evaluation.judge.oracles import BYTEWISE, FLOATS, Comparison
from evaluation.records import Outcome, Problem, Program

numbers = st.integers(-5, 5) | st.sampled_from([0.1 + 0.2, 0.3, 1.0, 2.0, float("nan"), 1e-7, 0.0, -0.0, True])
values = numbers | st.lists(numbers, max_size=3) | st.tuples(numbers, numbers) | st.sampled_from(["a", None, {1: 2}])


def comparison(expected, entry_point="f", atol=0.0, inputs=()):
    raw = [b"v" + marshal.dumps(e, 2) for e in expected]
    flags = bytes(FLOATS * is_floats(e) + BYTEWISE * ("nan" not in repr(e)) for e in expected)
    return Comparison(entry_point, "Mbpp", atol, inputs, raw, flags)


def evalplus_says(outs, expected, atol=0.0):
    """The comparison of evalplus.eval.unsafe_execute, in its order; True for each test until the first that fails."""
    said = []
    for out, exp in zip(outs, expected, strict=True):
        try:
            exact_match = out == exp
            if atol == 0 and is_floats(exp):
                atol = 1e-6
            if not exact_match and atol != 0:
                assert type(out) is type(exp)
                if isinstance(exp, list | tuple):
                    assert len(out) == len(exp)
                assert np.allclose(out, exp, rtol=1e-07, atol=atol)
            else:
                assert exact_match
        except (AssertionError, TypeError, ValueError):
            return [*said, False]
        said.append(True)
    return said


@settings(max_examples=300, deadline=None)
@given(st.lists(st.tuples(values, values), min_size=1, max_size=5))
def test_every_value_is_compared_as_evalplus_compares_it(pairs):
    # Through the wire both sides are fresh objects, so that a NaN is never the same object on both.
    outs, expected = ([marshal.loads(marshal.dumps(p[i], 2)) for p in pairs] for i in (0, 1))
    ours, found = comparison(expected), []
    for i, out in enumerate(outs):
        found.append(bool(ours.accepts(i, b"v" + marshal.dumps(out, 2))))
        if not found[-1]:
            break
    assert found == evalplus_says(outs, expected)


def test_the_tolerance_stays_once_a_float_was_expected():
    before, after = comparison([1, 0.5, 3]), comparison([0.5, 1, 3])
    near = b"v" + marshal.dumps(3.0000001, 2)
    ints = b"v" + marshal.dumps([1.0, 3.0000001], 2)
    assert not before.accepts(0, near)
    assert not before.accepts(2, near)  # float for an int: another type
    assert comparison([0.5, [1, 3]]).accepts(1, ints)
    assert not comparison([[1, 3], 0.5]).accepts(0, ints)
    assert after.accepts(1, b"v" + marshal.dumps(1, 2))


def test_three_problems_only_ask_for_something():
    ours = comparison([True, False], "check_str")
    some, none, opaque = (b"v" + marshal.dumps(v, 2) for v in ("x", None, ("\0described", "opaque", "Match")))
    assert ours.accepts(0, some)
    assert ours.accepts(0, opaque)
    assert not ours.accepts(0, none)
    assert ours.accepts(1, none)
    assert not ours.accepts(1, some)
    assert not ours.accepts(1, b"vT")
    assert not ours.accepts(1, b"xKeyError")


def _as_set(value):
    unique = marshal.dumps(set(value), 2)
    return b"s" + struct.pack("<I", len(unique)) + unique + marshal.dumps(value, 2)


def test_eight_problems_compare_sets_so_duplicates_pass():
    """EVAL-121: EvalPlus's rule, the same for rewards of these problems' suites and for scores."""
    ours = Comparison("Diff", "Mbpp", 0, [], [_as_set([1, 9])], bytes([BYTEWISE]))
    assert ours.accepts(0, _as_set([9, 9, 9, 1]))
    assert ours.accepts(0, _as_set({1: 0, 9: 0}))
    assert not ours.accepts(0, _as_set([1]))


def test_special_formulas():
    assert comparison([5], "sum_div").accepts(0, b"v" + marshal.dumps(0, 2))
    assert not comparison([5], "f").accepts(0, b"v" + marshal.dumps(0, 2))
    assert comparison([False], "are_equivalent").accepts(0, b"v" + marshal.dumps(17, 2))
    assert not comparison([False], "are_equivalent").accepts(0, b"xValueError")
    assert comparison([1], "digit_distance_nums", inputs=[(1, 256)]).accepts(0, b"v" + marshal.dumps(12, 2))


def test_a_batch_that_is_right_is_seen_in_one_look():
    ours = comparison([1, "a", [2.0]])
    framed = [struct.pack("<I", len(r)) + r for r in ours.expected]
    assert ours.matches(0, b"".join(framed)) == 3
    assert ours.matches(1, framed[1]) == 1
    assert ours.matches(0, framed[1]) == 0
    assert ours.matches(0, framed[0] + framed[1][:-1]) == 0
    assert ours.matches(0, b"") == 0
    assert comparison([float("nan")]).matches(0, framed[0]) == 0


def test_a_value_costs_no_more_than_the_expected_one():
    ours = comparison([{1, 2}])
    colliding = {i * (2**61 - 1) for i in range(1)} | {-1}
    assert not ours.accepts(0, b"v" + marshal.dumps(colliding, 2))
    forged = b"v<" + struct.pack("<i", 30_000) + b"".join(marshal.dumps(i * (2**61 - 1), 2) for i in range(30_000))
    started = time.process_time()
    assert not ours.accepts(0, forged)
    assert time.process_time() - started < 0.05


def test_large_values_are_compared_whole_where_their_bytes_differ():
    p = Problem(
        problem_id="Test/1", text="", entry_point="f", asserts=("assert f(0) == 0",), base_inputs=[[0], [1]],
        reference="def f(x):\n    return list(range(100_000))\n", plus_inputs=[[0]],
    )  # fmt: skip
    cases = {
        "list(range(100_000))": True,
        "[float(i) for i in range(100_000)]": True,
        "[True if i == 1 else i for i in range(100_000)]": True,
        "[*range(99_999), 5]": False,
        "tuple(range(100_000))": False,
        "list(range(99_999))": False,
        "7": False,
    }
    with Judge([p]) as judge:
        programs = [Program(problem_id="Test/1", source=f"def f(x):\n    return {c}\n") for c in cases]
        assert dict(zip(cases, [v.passed for v in judge.judge(programs)], strict=True)) == cases


@pytest.mark.parametrize(
    ("line", "right", "wrong"),
    [
        ("assert f(1) == 3", 3, 4),
        ("assert math.isclose(f(1), 0.3, rel_tol=0.001)", 0.1 + 0.2, 0.31),
        ("assert set(f(1)) == set([1, 2])", (2, 1, 1), (1,)),
        ("assert not f(1)", False, True),
        ("assert (f(1)) == [1]", [1], (1,)),
        ("assert f(1) == None", None, 0),
        ("assert sorted(f(1)) == [1, 2]", [2, 1], 5),
    ],
)
def test_asserts_are_asked_outside(line, right, wrong):
    suite = take_apart("f", [line], "")
    assert suite.calls == ((1,),)
    assert suite.accepts(0, b"v" + marshal.dumps(right, 2))
    assert not suite.accepts(0, b"v" + marshal.dumps(wrong, 2))
    assert not suite.accepts(0, b"xKeyError")


def test_an_exception_equals_no_empty_expectation():
    """REWARD-012."""
    for empty in ("None", "''", "[]", "False", "0"):
        p = Problem(problem_id="T/1", text="", entry_point="f", reference="", asserts=(f"assert f(1) == {empty}",))
        with Judge([p], suites="reward") as judge:
            raises = Program(problem_id="T/1", source="def f(v): raise KeyError(v)\n")
            assert judge.judge([raises])[0].base is Outcome.FAIL


def test_a_line_that_is_no_assert_of_the_function_is_refused():
    for line in ("f(1)", "assert g(1) == 2", "assert f(1) == 2; f(2)"):
        with pytest.raises(ValueError, match="asserts"):
            take_apart("f", [line], "")


@pytest.mark.parametrize("expected", [[[i, i + 1] for i in range(20_000)], [float(i) for i in range(20_000)]])
@pytest.mark.parametrize("shape", [(4000, 1, 1), (2000, 1)])
def test_what_numpy_would_broadcast_takes_no_memory(expected, shape):
    """Element by element these would be 10^8 numbers: 400 MB and more in the judge."""
    value = b"v" + marshal.dumps(("\0described", "numpy", ("|b1", shape, [False] * shape[0])), 2)
    tracemalloc.start()
    assert not comparison([expected], atol=1e-6).accepts(0, value)
    nested = [[[0.0]] * 5000, *[[[0.0]]] * (len(expected) - 1)] if type(expected[0]) is float else expected[::-1]
    assert not comparison([expected], atol=1e-6).accepts(0, b"v" + marshal.dumps(nested, 2))
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 100 << 20


def test_arrays_of_one_shape_are_compared_however_large_they_are():
    large = np.arange(3_000_000, dtype=float)
    from evaluation.judge.oracles import is_close

    assert is_close(large, large.copy(), 1e-6)
    assert not is_close(large, large + 1, 1e-6)
    assert is_close([[1.0], [1.0]], [1.0, 1.0], 1e-6)  # small ones broadcast, as under EvalPlus
