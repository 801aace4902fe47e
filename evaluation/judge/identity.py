"""When two programs are the same: equal up to layout, comments, docstrings and the names of their own variables.

Only what cannot be observed is taken away. Renaming is consistent over the whole program, so it keeps meaning as long
as no name is seen as text; a program that could see one (by `locals`, `eval`, an exception's message, ...) keeps its
names. The syntax tree is walked, never executed.
"""

import ast
import builtins
import hashlib
import warnings
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

MAX_BYTES = 1 << 14
"""Longer programs are the same only when their text is."""
_DYNAMIC = {
    "eval", "exec", "compile", "globals", "locals", "vars", "dir", "getattr", "setattr", "delattr", "hasattr",
    "inspect", "sys", "gc", "traceback", "symtable", "ast", "dis", "importlib", "builtins", "dataclass", "dataclasses",
    "namedtuple", "NamedTuple", "Enum", "enum", "super", "help", "repr", "print_exc", "ctypes", "types", "pickle",
}  # fmt: skip
"""Names that may see names."""
_BUILTINS = frozenset(dir(builtins))
_STATELESS = {
    "math", "cmath", "re", "itertools", "collections", "functools", "heapq", "bisect", "string", "operator", "typing",
    "fractions", "copy", "datetime", "statistics",
}  # fmt: skip
"""Modules without settings that an honest program would change."""


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
    text = source.strip().encode("utf-8", "surrogatepass")
    if len(text) > MAX_BYTES:
        return Reading(_digest(b"text", text), clean=False)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of a program's own text
            tree = ast.parse(source)
        walk = _Walk(kept)
        walk.walk(tree)
        return Reading(_digest(b"tree", "\0".join(walk.told()).encode("utf-8", "surrogatepass")), walk.clean)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return Reading(_digest(b"text", text), clean=True)  # it never gets to run


def _digest(kind: bytes, content: bytes) -> bytes:
    return hashlib.blake2b(kind + content, digest_size=20).digest()


class _Walk:
    """One pass over a tree: its words in prefix form, lists counted, so that different trees never read the same."""

    def __init__(self, kept: Iterable[str]) -> None:
        self.words: list[str] = []
        self.names: list[int] = []
        """Where in `words` a variable's name stands."""
        self.docstrings: list[str] = []
        """Each with where it stood."""
        self.kept, self.own = set(kept), set[str]()
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

    def told(self) -> list[str]:
        """Return the words with own variables as v0, v1, ... in order of appearance, or everything where it is seen."""
        if self.observed:
            return [*self.words, *self.docstrings]
        own = {n for n in self.own - self.kept - _BUILTINS if not n.startswith("__")}
        new: dict[str, str] = {}
        for at in self.names:
            name = self.words[at]
            self.words[at] = new.setdefault(name, f"v{len(new)}") if name in own else f"={name}"
        return self.words

    def named(self, name: str, own: bool) -> None:
        """Take a variable's name, which is the program's own where it is bound."""
        self.names.append(len(self.words))
        self.words.append(name)
        if own:
            self.own.add(name)

    def name(self, node: ast.Name) -> list[Any]:
        if node.id in _DYNAMIC or node.id.startswith("__"):
            self.observed, self.clean = True, False
        self.named(node.id, own=not isinstance(node.ctx, ast.Load))
        return []

    def arg(self, node: ast.arg) -> list[Any]:
        self.named(node.arg, own=True)
        return [node.annotation]

    def function(self, node: ast.FunctionDef | ast.AsyncFunctionDef) -> list[Any]:
        self.named(node.name, own=True)
        return [node.args, self.body(node.body), node.decorator_list, node.returns]

    def body(self, body: list[ast.stmt]) -> list[ast.stmt]:
        """Return a body without its docstring."""
        match body:
            case [ast.Expr(value=ast.Constant(value=str(text))), *rest]:
                self.docstrings.append(f"{len(self.words)} {text!r}")
                return rest
        return body

    def module(self, node: ast.Module) -> list[Any]:
        return [self.body(node.body)]

    def class_(self, node: ast.ClassDef) -> list[Any]:
        self.observed = True  # its members are found by name, and it names itself
        return [node.name, node.bases, node.keywords, node.body, node.decorator_list]

    def attribute(self, node: ast.Attribute) -> list[Any]:
        if node.attr in _DYNAMIC or node.attr.startswith("__"):
            self.observed, self.clean = True, False
        self.clean &= isinstance(node.ctx, ast.Load)
        return [node.value, node.attr]

    def keyword(self, node: ast.keyword) -> list[Any]:
        if node.arg is None:  # f(**{"n": 1}) knows a parameter by its text
            self.observed = True
        else:
            self.kept.add(node.arg)
        return [node.arg, node.value]

    def alias(self, node: ast.alias) -> list[Any]:
        self.observed |= node.name.partition(".")[0] in _DYNAMIC or node.name == "*"
        self.kept.update(filter(None, (node.name.partition(".")[0], node.asname)))
        return [node.name, node.asname]

    def imported(self, node: ast.Import) -> list[Any]:
        self.clean &= all(a.name.partition(".")[0] in _STATELESS for a in node.names)
        return [node.names]

    def imported_from(self, node: ast.ImportFrom) -> list[Any]:
        self.clean &= (node.module or "").partition(".")[0] in _STATELESS
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

    def matched(self, node: ast.AST) -> list[Any]:
        self.observed = True
        return [getattr(node, f, None) for f in node._fields]


_SEEN: dict[type, Callable[[_Walk, Any], list[Any]]] = {
    ast.Name: _Walk.name,
    ast.arg: _Walk.arg,
    ast.FunctionDef: _Walk.function,
    ast.AsyncFunctionDef: _Walk.function,
    ast.Module: _Walk.module,
    ast.ClassDef: _Walk.class_,
    ast.Attribute: _Walk.attribute,
    ast.keyword: _Walk.keyword,
    ast.alias: _Walk.alias,
    ast.Import: _Walk.imported,
    ast.ImportFrom: _Walk.imported_from,
    ast.Global: _Walk.declared,
    ast.Nonlocal: _Walk.declared,
    ast.ExceptHandler: _Walk.caught,
    ast.MatchAs: _Walk.matched,
    ast.MatchStar: _Walk.matched,
    ast.MatchMapping: _Walk.matched,
    ast.MatchClass: _Walk.matched,
}
