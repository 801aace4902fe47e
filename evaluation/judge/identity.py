"""When two programs are the same: equal up to layout, comments, docstrings and the names of their own variables.

Only what cannot be observed is taken away. Renaming is consistent over the whole program, so it keeps meaning as long
as no name is seen as text; a program that could see one (by `locals`, `eval`, an exception's message, ...) keeps its
names. The syntax tree is walked, never executed.
"""

import ast
import builtins
import hashlib
import warnings
from collections.abc import Iterable

MAX_BYTES = 1 << 14
"""Longer programs are the same only when their text is."""
_DYNAMIC = {
    "eval", "exec", "compile", "globals", "locals", "vars", "dir", "getattr", "setattr", "delattr", "hasattr",
    "inspect", "sys", "gc", "traceback", "symtable", "ast", "dis", "importlib", "builtins", "dataclass", "dataclasses",
    "namedtuple", "NamedTuple", "Enum", "enum", "super", "help", "repr", "print_exc", "ctypes", "types", "pickle",
}  # fmt: skip
"""Names that may see names."""
_BUILTINS = frozenset(dir(builtins))
_DOCUMENTED = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef, ast.Module)


def identity(source: str, kept: Iterable[str]) -> bytes:
    """Return 20 bytes that are equal for programs of equal meaning, as far as this module can tell.

    Args:
        source: the program.
        kept: names that tests use: the entry point, and whatever else asserts and set-up code mention.
    """
    text = source.strip().encode("utf-8", "surrogatepass")
    if len(text) > MAX_BYTES:
        return _digest(b"text", text)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of a program's own text
            tree = ast.parse(source)
        names = _Names(tree, kept)
        return _digest(b"tree", "\0".join(_words(tree, names)).encode("utf-8", "surrogatepass"))
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return _digest(b"text", text)


def _digest(kind: bytes, content: bytes) -> bytes:
    return hashlib.blake2b(kind + content, digest_size=20).digest()


class _Names:
    """Which names of a program may be replaced, and by what: v0, v1, ... in order of appearance."""

    def __init__(self, tree: ast.Module, kept_names: Iterable[str]) -> None:
        self.found: dict[str, str] = {}
        self.own: set[str] = set()
        kept = set(kept_names)
        self.observed = False
        for node in ast.walk(tree):
            self._see(node, kept)
        self.own = {n for n in self.own - kept - _BUILTINS if not n.startswith("__")}
        self.docstrings = not self.observed

    def _see(self, node: ast.AST, kept: set[str]) -> None:
        match node:
            case ast.Name(id=name, ctx=context):
                self.observed |= name in _DYNAMIC or name.startswith("__")
                if not isinstance(context, ast.Load):
                    self.own.add(name)
            case ast.arg(arg=name):
                self.own.add(name)
            case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name):
                self.own.add(name)
            case ast.ClassDef():  # its members are found by name, and it names itself
                self.observed = True
            case ast.Attribute(attr=name):
                self.observed |= name.startswith("__") or name in _DYNAMIC
            case ast.keyword(arg=None):  # f(**{"n": 1}) knows a parameter by its text
                self.observed = True
            case ast.keyword(arg=str(name)):
                kept.add(name)
            case ast.alias(name=name, asname=alias):
                self.observed |= name.partition(".")[0] in _DYNAMIC or name == "*"
                kept.update(filter(None, (name.partition(".")[0], alias)))
            case ast.ExceptHandler(name=name):  # a NameError tells names
                self.observed |= name is not None
            case ast.MatchAs() | ast.MatchStar() | ast.MatchMapping() | ast.MatchClass():
                self.observed = True
            case _:
                pass

    def of(self, name: str) -> str:
        """Return the name that stands for `name`."""
        if self.observed or name not in self.own:
            return f"={name}"
        return self.found.setdefault(name, f"v{len(self.found)}")


def _words(tree: ast.AST, names: _Names) -> list[str]:
    """Return the tree in prefix form, children counted, so that different trees never read the same."""
    words: list[str] = []
    todo: list[object] = [tree]
    while todo:
        node = todo.pop()
        if isinstance(node, ast.AST):
            words.append(type(node).__name__)
            children = [getattr(node, f, None) for f in node._fields]
            if names.docstrings and isinstance(node, _DOCUMENTED):
                children[node._fields.index("body")] = _undocumented(node.body)
            if isinstance(node, ast.Name):
                children[0] = _Word(names.of(node.id))
            elif isinstance(node, ast.arg):
                children[0] = _Word(names.of(node.arg))
            elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                children[0] = _Word(names.of(node.name))
            elif isinstance(node, ast.Global | ast.Nonlocal):
                children[0] = [_Word(names.of(n)) for n in node.names]
            todo.extend(reversed(children))
        elif isinstance(node, list):
            words.append(f"[{len(node)}")
            todo.extend(reversed(node))
        elif isinstance(node, _Word):
            words.append(node)
        else:
            words.append(f"{type(node).__name__} {node!r}")
    return words


class _Word(str):
    """A name that has been looked at."""


def _undocumented(body: list[ast.stmt]) -> list[ast.stmt]:
    """Return a body without its docstring."""
    match body:
        case [ast.Expr(value=ast.Constant(value=str())), *rest]:
            return rest
    return body
