"""When two programs are the same: equal up to layout, comments, docstrings and the names of their own variables.

Only what cannot be observed is taken away. A program may hold the name of a variable, a docstring or the number of a
line in its hands: by a class, an exception, a frame, `getattr`, a keyword dictionary, most modules. So whatever is not
known to show none of them makes a program the same only as its own text. In the others variables are renamed
consistently; functions keep their names, which `str` shows. The syntax tree is walked, never executed.
"""

import ast
import builtins
import hashlib
import importlib
import re
import types
import unicodedata
import warnings
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

MAX_BYTES = 1 << 14
"""Longer programs are the same only when their text is."""
_BUILTINS = frozenset(dir(builtins))
_ERRORS = {n for n in _BUILTINS if isinstance(v := getattr(builtins, n), type) and issubclass(v, BaseException)}
_PLAIN = _ERRORS | {
    "abs", "all", "any", "ascii", "bin", "bool", "bytearray", "bytes", "callable", "chr", "complex", "dict", "divmod",
    "enumerate", "filter", "float", "format", "frozenset", "hash", "hex", "int", "isinstance", "issubclass", "iter",
    "len", "list", "map", "max", "min", "next", "object", "oct", "ord", "pow", "print", "range", "reversed", "round",
    "set", "slice", "sorted", "str", "sum", "tuple", "zip",
}  # fmt: skip
"""Builtins that show a program nothing of itself."""
_STATELESS = {
    "math", "cmath", "re", "itertools", "collections", "functools", "heapq", "bisect", "string", "operator", "typing",
    "fractions", "copy", "datetime", "statistics",
}  # fmt: skip
"""Modules without settings that an honest program would change."""
_BLIND = _STATELESS | {"random", "decimal", "time", "calendar", "numbers", "collections.abc"}
"""Modules that show no names and no lines, and call nothing by keyword, but for `_SEEING`."""
_SEEING = {
    "attrgetter", "methodcaller", "Formatter", "format_map", "namedtuple", "NamedTuple", "TypedDict", "ForwardRef",
    "get_type_hints", "get_overloads", "get_protocol_members", "overload", "wraps", "update_wrapper", "register",
    "singledispatch", "singledispatchmethod", "Protocol", "runtime_checkable", "final", "no_type_check",
    "no_type_check_decorator", "dataclass_transform", "Literal", "Annotated",
}  # fmt: skip
"""What of these modules does, has a function called by keyword, evaluates annotations, changes a class for good, or
keeps the first of equal values."""
_SYS = {"maxsize", "setrecursionlimit", "getrecursionlimit", "float_info", "getsizeof", "exit", "version_info"}
"""What of `sys` does not."""


def _blind_attributes() -> Iterable[str]:
    kinds = [str, bytes, bytearray, int, float, complex, list, tuple, dict, set, frozenset, range, re.Match, re.Pattern]
    for module in map(importlib.import_module, _BLIND):
        for name in getattr(module, "__all__", dir(module)):
            if not isinstance(value := getattr(module, name), types.ModuleType) and name not in _SEEING:
                yield name
                kinds += [value] if isinstance(value, type) else []
    for kind in kinds:
        yield from dir(kind)


_BLIND_ATTRIBUTES = {n for n in _blind_attributes() if not n.startswith("_")} - _SEEING | {"abc", "cache_clear"}
"""What may be taken out of an object or a module: methods and members of plain types, and what `_BLIND` exports."""
_IMPORTED = {n for m in map(importlib.import_module, _BLIND) for n, v in vars(m).items() if type(v) is types.ModuleType}
"""What these modules have imported themselves: `statistics.random` is a way to all of `random`."""
_MODULES = _IMPORTED & _BLIND_ATTRIBUTES
_FIELD = re.compile(r"\{[^{}:!]*[.\[]")
"""A replacement field that looks into its value: `{0.__code__}`."""
_NUMPY = re.compile(r"numpy|import_module|__import__|\bexec\b")


def wants_numpy(source: str) -> bool:
    """Say whether a program may import numpy, which is loaded beforehand then."""
    return _NUMPY.search(_as_read(source)) is not None


def _as_read(source: str) -> str:
    """Return the text with the letters that Python takes for others."""
    return source if source.isascii() else unicodedata.normalize("NFKC", source)


@dataclass(frozen=True)
class Reading:
    """What the text of a program tells."""

    digest: bytes
    """20 bytes, equal for programs of equal meaning, as far as this module can tell."""
    clean: bool
    """It changes nothing that outlives its own definitions, so it may be run twice in one process."""


def read(source: str, kept: Iterable[str]) -> Reading:
    """Read a program.

    Args:
        source: the program.
        kept: names that tests use: the entry point, and whatever else asserts and set-up code mention.
    """
    text = source.encode("utf-8", "surrogatepass")
    if len(text) > MAX_BYTES:
        return Reading(_digest(b"text", text), clean=False)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of a program's own text
            tree = ast.parse(source)
        walk = _Walk(kept)
        walk.walk(tree)
        words = walk.told()
        if words is None:
            return Reading(_digest(b"text", text), walk.clean)
        words = [f"{wants_numpy(source)}", *words]  # by which it is run
        return Reading(_digest(b"tree", "\0".join(words).encode("utf-8", "surrogatepass")), walk.clean)
    except SyntaxError:
        return Reading(_digest(b"text", text), clean=True)  # it never gets to run
    except (ValueError, RecursionError, MemoryError):
        return Reading(_digest(b"text", text), clean=False)


def _digest(kind: bytes, content: bytes) -> bytes:
    return hashlib.blake2b(kind + content, digest_size=20).digest()


class _Walk:
    """One pass over a tree: its words in prefix form, lists counted, so that different trees never read the same."""

    def __init__(self, kept: Iterable[str]) -> None:
        self.words: list[str] = []
        self.names: list[int] = []
        """Where in `words` a variable's name stands."""
        self.kept, self.own = set(kept), set[str]()
        self.harmless = set[int]()
        """Nodes of names that are used in a way that shows nothing."""
        self.observed, self.clean = False, True

    def walk(self, tree: ast.Module) -> None:
        """Read a whole tree."""
        todo: list[Any] = [tree]
        while todo:
            node = todo.pop()
            if isinstance(node, ast.AST):
                kind = type(node)
                self.words.append(kind.__name__)
                see = _SEEN.get(kind)
                children = see(self, node) if see else [getattr(node, f, None) for f in kind._fields]
                todo.extend(reversed(children))
            elif isinstance(node, list):
                self.words.append(f"[{len(node)}")
                todo.extend(reversed(node))
            else:
                self.words.append(f"{type(node).__name__} {node!r}")

    def told(self) -> list[str] | None:
        """Return the words with own variables as v0, v1, ... in order of appearance; None where a name may be seen."""
        own = self.own - self.kept - _BUILTINS
        new: dict[str, str] = {}
        for at in self.names:
            name = self.words[at]
            self.words[at] = new.setdefault(name, f"v{len(new)}") if name in own else f"={name}"
        return None if self.observed else self.words

    def strange(self) -> None:
        """Note that the program uses what may show it to itself, and may reach what outlives it."""
        self.observed, self.clean = True, False

    def named(self, name: str, own: bool) -> None:
        """Take a variable's name, which is the program's own where it is bound."""
        if (name.startswith("__") and name != "__name__") or (own and name in _MODULES):
            self.strange()
        self.names.append(len(self.words))
        self.words.append(name)
        if own:
            self.own.add(name)

    def name(self, node: ast.Name) -> list[Any]:
        if node.id in _BUILTINS and node.id not in _PLAIN and id(node) not in self.harmless:
            self.strange()
        self.named(node.id, own=not isinstance(node.ctx, ast.Load))
        return []

    def arg(self, node: ast.arg) -> list[Any]:
        self.named(node.arg, own=True)
        return [node.annotation]

    def function(self, node: ast.FunctionDef | ast.AsyncFunctionDef) -> list[Any]:
        self.named(node.name, own=True)
        self.kept.add(node.name)
        generic = getattr(node, "type_params", [])
        return [node.args, self.body(node.body), node.decorator_list, node.returns, generic]

    def body(self, body: list[ast.stmt]) -> list[ast.stmt]:
        """Return a body without its docstring."""
        match body:
            case [ast.Expr(value=ast.Constant(value=str())), *rest]:
                return rest
        return body

    def module(self, node: ast.Module) -> list[Any]:
        return [self.body(node.body)]

    def compare(self, node: ast.Compare) -> list[Any]:
        for side in (node.left, *node.comparators):
            match side:
                case ast.Call(func=ast.Name(id="type") as kind, args=[of], keywords=[]) if type(of) is not ast.Starred:
                    self.harmless.add(id(kind))
                case ast.Name(id="__name__", ctx=ast.Load()):
                    self.harmless.add(id(side))
                    self.clean = False
        return [node.left, node.ops, node.comparators]

    def attribute(self, node: ast.Attribute) -> list[Any]:
        match node:
            case ast.Attribute(value=ast.Name(id="sys"), attr=attr) if attr in _SYS:
                self.clean = False
                return [node.value, node.attr]
            case ast.Attribute(value=ast.Constant(value=str(text)), attr="format") if not _FIELD.search(text):
                pass
            case ast.Attribute(attr="format"):
                self.strange()
        if node.attr not in _BLIND_ATTRIBUTES:
            self.strange()
        owner = node.value.id if isinstance(node.value, ast.Name) else ""
        if node.attr in _MODULES and owner != node.attr and (owner, node.attr) != ("collections", "abc"):
            self.strange()  # but for datetime.datetime
        self.clean &= isinstance(node.ctx, ast.Load)
        return [node.value, node.attr]

    def keyword(self, node: ast.keyword) -> list[Any]:
        if node.arg is None:  # f(**{"n": 1}) knows a parameter by its text
            self.observed = True
        else:
            self.kept.add(node.arg)
        return [node.arg, node.value]

    def alias(self, node: ast.alias) -> list[Any]:
        if node.asname and (node.asname.startswith("__") or node.asname in _MODULES):
            self.strange()
        self.kept.update(filter(None, (node.name.partition(".")[0], node.asname)))
        return [node.name, node.asname]

    def imported(self, node: ast.Import) -> list[Any]:
        for alias in node.names:
            # An alias of sys would hide what is taken out of it.
            self.observed |= alias.name not in _BLIND and (alias.name != "sys" or alias.asname is not None)
            self.clean &= alias.name in _STATELESS
        return [node.names]

    def imported_from(self, node: ast.ImportFrom) -> list[Any]:
        names = {a.name for a in node.names}
        blind = _BLIND_ATTRIBUTES if node.module in _BLIND else _SYS if node.module == "sys" else set[str]()
        self.observed |= not names <= blind or node.level > 0
        self.clean &= node.module in _STATELESS and names <= blind | {"namedtuple"}
        self.clean &= not (names & _IMPORTED) - {node.module}
        return [node.module, node.names, node.level]

    def declared(self, node: ast.Global | ast.Nonlocal) -> list[Any]:
        self.words.append(f"[{len(node.names)}")
        for name in node.names:
            self.named(name, own=False)
        return []

    def caught(self, node: ast.ExceptHandler) -> list[Any]:
        self.observed |= node.name is not None  # a NameError tells names
        self.clean = False
        return [node.type, node.name, node.body]

    def tried(self, node: ast.Try) -> list[Any]:
        self.clean &= not node.finalbody  # where a return swallows what was raised
        return [node.body, node.handlers, node.orelse, node.finalbody]

    def matched(self, node: ast.MatchClass) -> list[Any]:
        if node.kwd_attrs:  # attributes by their text
            self.strange()
        return [node.cls, node.patterns, node.kwd_attrs, node.kwd_patterns]

    def seeing(self, node: ast.AST) -> list[Any]:
        """Take what knows names by their text: members of a class are found by it, and a class names itself."""
        self.observed = True
        return [getattr(node, f, None) for f in node._fields]


_SEEN: dict[type, Callable[[_Walk, Any], list[Any]]] = {
    ast.Name: _Walk.name,
    ast.arg: _Walk.arg,
    ast.FunctionDef: _Walk.function,
    ast.AsyncFunctionDef: _Walk.function,
    ast.Module: _Walk.module,
    ast.ClassDef: _Walk.seeing,
    ast.Compare: _Walk.compare,
    ast.Attribute: _Walk.attribute,
    ast.keyword: _Walk.keyword,
    ast.alias: _Walk.alias,
    ast.Import: _Walk.imported,
    ast.ImportFrom: _Walk.imported_from,
    ast.Global: _Walk.declared,
    ast.Nonlocal: _Walk.declared,
    ast.ExceptHandler: _Walk.caught,
    ast.Try: _Walk.tried,
    ast.Match: _Walk.seeing,
    ast.MatchClass: _Walk.matched,
}
_NEWER = ("TypeAlias", "TypeVar", "ParamSpec", "TypeVarTuple", "TemplateStr", "Interpolation")
"""Since Python 3.12: they know their names as text."""
_SEEN |= {getattr(ast, name): _Walk.seeing for name in _NEWER if hasattr(ast, name)}
