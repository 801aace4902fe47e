"""How values leave the cage: plain builtins in marshal's second format, rebuilt by a bounded decoder of our own.

The parent never calls `marshal.loads` or `pickle.loads` on what a program sent. Values that are not plain builtins are
described (numpy, collections, ranges) or opaque; an opaque value equals nothing.
"""

import collections
import math
import struct
from fractions import Fraction
from typing import Any

DESCRIBED = "\0described"
"""First item of the tuple that stands for a described value."""
_BUDGET = 20_000_000
_DEPTH = 400


class Malformed(ValueError):
    """The bytes are not of our format: the program wrote them itself."""


class Opaque:
    """A value that cannot be described; equal to nothing, itself included."""

    def __init__(self, name: str) -> None:
        self.name = name

    def __eq__(self, other: object) -> bool:
        return False

    __hash__ = object.__hash__


def decode(raw: bytes) -> Any:
    """Rebuild a value from a program's bytes.

    Raises:
        Malformed: not our format, too deep or too large.
    """
    try:
        value, end = _Reader(raw).read(0, 0)
    except (IndexError, struct.error, UnicodeDecodeError, TypeError, OverflowError, MemoryError, RecursionError) as e:
        raise Malformed(str(e)) from e
    if end != len(raw):
        raise Malformed("bytes after the value")
    return value


class _Reader:
    def __init__(self, raw: bytes) -> None:
        self.raw, self.left = raw, _BUDGET

    def read(self, at: int, depth: int) -> tuple[Any, int]:
        self.left -= 1
        if self.left < 0 or depth > _DEPTH:
            raise Malformed("too large or too deep")
        kind, at = self.raw[at : at + 1], at + 1
        if kind in _CONSTANTS:
            return _CONSTANTS[kind], at
        if kind == b"i":
            return struct.unpack_from("<i", self.raw, at)[0], at + 4
        if kind == b"g":
            return struct.unpack_from("<d", self.raw, at)[0], at + 8
        if kind == b"y":
            return complex(*struct.unpack_from("<dd", self.raw, at)), at + 16
        if kind == b"l":
            return self._long(at)
        if kind in {b"u", b"s"}:
            text, at = self._bytes(at)
            return (text.decode("utf-8", "surrogatepass") if kind == b"u" else text), at
        if kind in {b"(", b"[", b"<", b">"}:
            return self._sequence(kind, at, depth)
        if kind == b"{":
            return self._dict(at, depth)
        raise Malformed(f"kind {kind!r}")

    def _size(self, at: int) -> tuple[int, int]:
        size = struct.unpack_from("<i", self.raw, at)[0]
        if not 0 <= size <= len(self.raw):
            raise Malformed("size")
        return size, at + 4

    def _bytes(self, at: int) -> tuple[bytes, int]:
        size, at = self._size(at)
        if at + size > len(self.raw):
            raise Malformed("cut")
        return self.raw[at : at + size], at + size

    def _long(self, at: int) -> tuple[int, int]:
        """Read 15-bit digits, least significant first; linear in their number."""
        count = struct.unpack_from("<i", self.raw, at)[0]
        digits = struct.unpack_from(f"<{abs(count)}H", self.raw, at + 4)
        bits = "".join(format(d & 0x7FFF, "015b") for d in reversed(digits)) or "0"
        value = int(bits, 2)
        return (-value if count < 0 else value), at + 4 + 2 * abs(count)

    def _sequence(self, kind: bytes, at: int, depth: int) -> tuple[Any, int]:
        size, at = self._size(at)
        items = []
        for _ in range(size):
            item, at = self.read(at, depth + 1)
            items.append(item)
        if kind == b"(" and items and items[0] == DESCRIBED:
            return rebuild(items[1], items[2]), at
        return {b"(": tuple, b"[": list, b"<": set, b">": frozenset}[kind](items), at

    def _dict(self, at: int, depth: int) -> tuple[dict[Any, Any], int]:
        found = {}
        while self.raw[at : at + 1] != b"0":
            key, at = self.read(at, depth + 1)
            found[key], at = self.read(at, depth + 1)
        return found, at + 1


_CONSTANTS = {b"N": None, b"T": True, b"F": False, b".": ...}


def rebuild(kind: object, content: Any) -> Any:
    """Return the value that a description stands for."""
    if kind == "numpy":
        import numpy as np

        dtype, shape, items = content
        if not isinstance(dtype, str) or dtype[1:2] not in "biufcU":
            raise Malformed("dtype")
        array = np.array(items, dtype=np.dtype(dtype))
        return array.reshape(shape) if shape is not None else array[()]
    if kind == "subclass":
        # A subclass of a builtin that inherits its comparison: equal like the builtin, of another type.
        return type("subclass", (type(content),), {})(content)
    makers = {
        "bytearray": bytearray,
        "Counter": collections.Counter,
        "OrderedDict": collections.OrderedDict,
        "defaultdict": lambda c: collections.defaultdict(None, c),
        "deque": collections.deque,
        "range": lambda c: range(*c),
        "dict_keys": lambda c: dict.fromkeys(c).keys(),
        "dict_items": lambda c: dict(c).items(),
        "Fraction": lambda c: Fraction(*c),
    }
    if kind in makers:
        return makers[str(kind)](content)
    return Opaque(str(content))


def has_nan(value: Any) -> bool:
    """True when a NaN is anywhere inside: its bytes are equal to themselves, the value is not."""
    if isinstance(value, float | complex):
        return math.isnan(abs(value)) if isinstance(value, complex) else math.isnan(value)
    if isinstance(value, list | tuple | set | frozenset):
        return any(map(has_nan, value))
    if isinstance(value, dict):
        return any(has_nan(k) or has_nan(v) for k, v in value.items())
    return False
