"""The wire format: what the cage sends is rebuilt exactly, and nothing that a program writes can hurt the reader."""

import contextlib
import marshal
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from evaluation.judge.wire import DESCRIBED, Malformed, Opaque, decode

scalars = (
    st.none()
    | st.booleans()
    | st.integers(-(10**40), 10**40)
    | st.floats(allow_nan=False)
    | st.text()
    | st.binary()
    | st.complex_numbers(allow_nan=False)
)
hashable = st.recursive(scalars, lambda s: st.tuples(s, s) | st.frozensets(s, max_size=3), max_leaves=8)
values = st.recursive(
    scalars,
    lambda s: st.lists(s) | st.tuples(s, s) | st.dictionaries(hashable, s, max_size=4) | st.sets(hashable),
    max_leaves=20,
)


@given(values)
def test_plain_values_come_back_as_they_were(value):
    found = decode(marshal.dumps(value, 2))
    assert found == value
    assert type(found) is type(value)


@given(st.binary(max_size=400))
def test_no_bytes_break_the_reader(raw):
    with contextlib.suppress(Malformed):
        decode(raw)


@given(values, st.integers(0, 400), st.integers(0, 255))
def test_damaged_bytes_are_refused_or_read(value, at, byte):
    raw = bytearray(marshal.dumps(value, 2))
    raw[at % len(raw)] = byte
    with contextlib.suppress(Malformed):
        decode(bytes(raw))


def test_code_objects_are_refused():
    with pytest.raises(Malformed):
        decode(marshal.dumps(compile("1", "x", "eval"), 2))


def test_a_claimed_size_takes_no_memory():
    with pytest.raises(Malformed):
        decode(b"[" + (2**31 - 1).to_bytes(4, "little"))
    with pytest.raises(Malformed):
        decode(b"l" + (2**31 - 1).to_bytes(4, "little"))


def test_deep_nesting_is_refused():
    with pytest.raises(Malformed):
        decode(b"[\x01\x00\x00\x00" * 10_000 + b"N")


def test_opaque_values_equal_nothing():
    found = decode(marshal.dumps((DESCRIBED, "opaque", "A"), 2))
    assert isinstance(found, Opaque)
    assert found != found
    assert found != 1


def test_descriptions_rebuild_what_compares_like_the_original():
    import collections

    assert decode(marshal.dumps((DESCRIBED, "Counter", {"a": 2}), 2)) == collections.Counter("aa")
    assert decode(marshal.dumps((DESCRIBED, "range", (0, 3, 1)), 2)) == range(3)
    sub = decode(marshal.dumps((DESCRIBED, "subclass", 4), 2))
    assert sub == 4
    assert type(sub) is not int


def test_a_fraction_of_millions_of_digits_is_not_reduced():
    started = time.process_time()
    big = decode(marshal.dumps((DESCRIBED, "Fraction", (3**1_000_000, 2**1_500_000 + 1)), 2))
    assert isinstance(big, Opaque)
    assert time.process_time() - started < 2  # its greatest common divisor would take five
    assert decode(marshal.dumps((DESCRIBED, "Fraction", (6, 4)), 2)) == 1.5
