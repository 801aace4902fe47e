"""How values leave the cage: plain builtins in marshal's second format, rebuilt by a bounded decoder of our own.

The parent never calls `marshal.loads` or `pickle.loads` on what a program sent. Values that are not plain builtins are
described (numpy, collections, ranges) or opaque; an opaque value equals nothing. A program may write such bytes itself:
then they are a value like any other, and need to be the right one.
"""

import collections
import struct
from collections.abc import Callable, Iterator
from decimal import Decimal, DecimalException
from fractions import Fraction
from typing import Any

DESCRIBED = "\0described"
"""First item of the tuple that stands for a described value."""
HASHED_BYTES, MAX_FULL_BYTES = 1 << 18, 64 << 20
"""From what size on the child sends a hash first; the most that is compared in full."""
MAX_RANGE = 1 << 20
MAX_FRACTION_BITS = 1 << 14
"""Of each part: a fraction is reduced, which takes quadratic time."""
MAX_COLLISIONS = 256
"""Items of one hash: a program's own set has two at most, unless somebody looks for more."""
_DEPTH = 650
_DTYPES = {"b1", "i1", "i2", "i4", "i8", "u1", "u2", "u4", "u8", "f2", "f4", "f8", "c8", "c16"}


class Malformed(ValueError):
    """The bytes are not of our format: the program wrote them itself."""


class Opaque:
    """A value that cannot be described; equal to nothing, itself included."""

    def __init__(self, name: str) -> None:
        self.name = name

    def __eq__(self, other: object) -> bool:
        return False

    __hash__ = object.__hash__


_BROKEN = (
    LookupError, struct.error, ValueError, TypeError, ArithmeticError, AttributeError, MemoryError, RecursionError,
)  # fmt: skip


def decode(raw: bytes) -> Any:
    """Rebuild a value from a program's bytes; time and memory are a small multiple of their number.

    Raises:
        Malformed: not our format, or too deep.
    """
    try:
        value, end = _Reader(raw).read(0, 0)
    except (*_BROKEN, DecimalException) as e:
        raise Malformed(f"{type(e).__name__}: {e}") from e
    if end != len(raw):
        raise Malformed("bytes after the value")
    return value


def spread(value: Any, most: int) -> int:
    """Count the numpy elements inside a value, up to the first count above `most`.

    numpy broadcasts what it is compared with: an array of n elements and a list of m may become n x m.
    """
    if (size := getattr(value, "size", None)) is not None and type(value).__module__ == "numpy":
        return int(size)
    total = 0
    if isinstance(value, list | tuple | set | frozenset | dict):
        for item in value.values() if isinstance(value, dict) else value:
            total += spread(item, most)
            if total > most:
                break
    return total


def items_of(raw: bytes) -> tuple[bytes, int, Iterator[Any]] | None:
    """Return kind, length and lazily the items of an encoded list or tuple; None for anything else."""
    if raw[:1] not in {b"[", b"("} or len(raw) < 5:
        return None
    reader = _Reader(raw)
    size, at = reader.size_at(1)

    def items() -> Iterator[Any]:
        place = at
        for _ in range(size):
            try:
                item, place = reader.read(place, 1)
            except (*_BROKEN, DecimalException) as e:
                raise Malformed(str(e)) from e
            yield item

    return raw[:1], size, items()


class _Reader:
    def __init__(self, raw: bytes) -> None:
        self.raw = raw

    def read(self, at: int, depth: int) -> tuple[Any, int]:
        if depth > _DEPTH:
            raise Malformed("too deep")
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
            size, at = self.size_at(at)
            content = self.raw[at : at + size]
            if len(content) < size:
                raise Malformed("cut")
            return (content.decode("utf-8", "surrogatepass") if kind == b"u" else content), at + size
        if kind in _SEQUENCES:
            return self._sequence(kind, at, depth)
        if kind == b"{":
            return self._dict(at, depth)
        raise Malformed(f"kind {kind!r}")

    def size_at(self, at: int) -> tuple[int, int]:
        """Read a count, which cannot be larger than the bytes that are there."""
        size = struct.unpack_from("<i", self.raw, at)[0]
        if not 0 <= size <= len(self.raw):
            raise Malformed("size")
        return size, at + 4

    def _long(self, at: int) -> tuple[int, int]:
        """Read 15-bit digits, least significant first; linear in their number."""
        count = struct.unpack_from("<i", self.raw, at)[0]
        if 2 * abs(count) > len(self.raw) - at:
            raise Malformed("cut")
        digits = struct.unpack_from(f"<{abs(count)}H", self.raw, at + 4)
        bits = "".join(format(d & 0x7FFF, "015b") for d in reversed(digits)) or "0"
        value = int(bits, 2)
        return (-value if count < 0 else value), at + 4 + 2 * abs(count)

    def _sequence(self, kind: bytes, at: int, depth: int) -> tuple[Any, int]:
        size, at = self.size_at(at)
        items = []
        for _ in range(size):
            item, at = self.read(at, depth + 1)
            items.append(item)
        if kind == b"(" and items and items[0] == DESCRIBED:
            _, name, content = items
            return rebuild(name, content), at
        if kind in b"<>":
            _refuse_collisions(items)
        return _SEQUENCES[kind](items), at

    def _dict(self, at: int, depth: int) -> tuple[dict[Any, Any], int]:
        keys, values = [], []
        while self.raw[at : at + 1] != b"0":
            key, at = self.read(at, depth + 1)
            value, at = self.read(at, depth + 1)
            keys.append(key)
            values.append(value)
        _refuse_collisions(keys)
        return dict(zip(keys, values, strict=True)), at + 1


def _refuse_collisions(items: list[Any]) -> None:
    """Refuse what would make a set or dictionary quadratic: many items of one hash, as integers can be chosen to have.

    Raises:
        Malformed: more than MAX_COLLISIONS.
    """
    if len(items) > MAX_COLLISIONS and max(collections.Counter(map(hash, items)).values()) > MAX_COLLISIONS:
        raise Malformed("collisions")


_CONSTANTS = {b"N": None, b"T": True, b"F": False, b".": ...}
_SEQUENCES = {b"(": tuple, b"[": list, b"<": set, b">": frozenset}
_MAKERS: dict[str, tuple[type, Callable[[Any], Any]]] = {
    "bytearray": (bytes, bytearray),
    "Counter": (dict, collections.Counter),
    "OrderedDict": (dict, collections.OrderedDict),
    "defaultdict": (dict, lambda c: collections.defaultdict(None, c)),
    "deque": (list, collections.deque),
    "dict_keys": (list, lambda c: dict.fromkeys(c).keys()),
    "dict_items": (list, lambda c: dict(c).items()),
}
"""What a description must contain, so that a few bytes never become many, and what is made of it."""
_SUBCLASSED = {t: type("subclass", (t,), {}) for t in (int, float, complex, str, tuple, list, dict, set, frozenset)}
"""A subclass of a builtin that inherits its comparison: equal like the builtin, of another type."""
_SCALARS = {int, float, str, bool, complex, type(None)}


def rebuild(kind: object, content: Any) -> Any:
    """Return the value that a description stands for."""
    if kind == "numpy":
        return _numpy(*content)
    if kind == "range":
        found = range(*content)
        return found if len(found) <= MAX_RANGE else Opaque("range")
    if kind == "Fraction":
        above, below = content
        small = type(above) is type(below) is int and max(above.bit_length(), below.bit_length()) <= MAX_FRACTION_BITS
        return Fraction(above, below) if small else Opaque("Fraction")
    if kind == "Decimal":
        number = Decimal(str(content)[:1000])
        return number if not number.is_finite() or abs(number.adjusted()) < 10_000 else Opaque("Decimal")
    if kind == "subclass" and type(content) in _SUBCLASSED:
        return _SUBCLASSED[type(content)](content)
    if isinstance(kind, str) and kind in _MAKERS and type(content) is _MAKERS[kind][0]:
        return _MAKERS[kind][1](content)
    return Opaque(str(kind)[:80])


def _numpy(dtype: object, shape: Any, items: Any) -> Any:
    import numpy as np

    code, flat = str(dtype)[1:], items if type(items) is list else [items]
    if not _SCALARS.issuperset(map(type, flat)):
        return Opaque("numpy")
    if code[:1] == "U":  # its claimed width would be memory, and so would one long text among many
        code = "U" if len(flat) * max(map(len, flat), default=0) < 1 << 24 else ""
    if code != "U" and code not in _DTYPES:
        return Opaque("numpy")
    array = np.array(items, dtype=np.dtype(code))
    return array.reshape(shape) if shape is not None else array[()]
