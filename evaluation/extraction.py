"""From a completion's text to the program in it, by text rules alone.

No parser is used: the result cannot depend on Python's version, and a completion cannot crash or stall one. Programs
are taken whole. What it does not do: repair code, choose statements, or judge.
"""

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

_FENCE_PREFIX = re.compile(r"[ \t]*(?:(?:[-*+]|\d{1,3}[.)])[ \t]+)?(?=```|~~~)")
"""What may stand before a fence: indentation and a list marker."""


@dataclass(frozen=True)
class Fence:
    """A line that opens or closes a fenced block."""

    line: int
    indent: int
    """Columns before the fence; the body's lines lose as many."""
    char: str
    length: int
    info: str
    """The language tag; a fence with one always opens a block."""


def cut(text: str, stop_strings: Sequence[str]) -> str:
    """Return the text before the first stop string."""
    found = [i for i in (text.find(s) for s in stop_strings) if i >= 0]
    return text[: min(found)] if found else text


def strip_end_markers(text: str, markers: Sequence[str]) -> str:
    """Remove end-of-text markers, and white space after or between them, from the end only.

    A marker inside the text stays: `</s>` may be data of the program.
    """
    markers = [m for m in markers if m]
    while True:
        bare = text.rstrip()
        marker = next((m for m in markers if bare.endswith(m)), None)
        if marker is None:
            return text
        text = bare[: -len(marker)]


def fenced_program(text: str, entry_point: str) -> str:
    """Return the last fenced block that defines the entry point, else the last block, else the text.

    "Last block" alone would take a usage example or its output (EXTRACT-033).
    """
    text = text.replace("\r\n", "\n").replace("\r", "\n")
    lines = text.split("\n")
    fences = list(_find_fences(lines))
    blocks = list(_pair(lines, fences))
    candidates = blocks[::-1]
    if fences and not fences[0].info:
        # The prompt had opened the fence: the program ends where it is closed (EXTRACT-034).
        candidates.append("\n".join(lines[: fences[0].line]))
    for binds in (_defines, _imports):  # `from solution import f` is usually a usage example
        for candidate in candidates:
            if binds(candidate, entry_point):
                return candidate
    return blocks[-1] if blocks else text


def _defines(source: str, name: str) -> bool:
    """True when a line at the top level binds `name` by a def, a class or an assignment."""
    n = re.escape(name)
    binding = rf"^(?:(?:async[ \t]+)?def[ \t]+{n}[ \t]*\(|class[ \t]+{n}\b|{n}[ \t]*(?::[^=\n]*)?=(?!=))"
    return bool(re.search(binding, source, re.MULTILINE))


def _imports(source: str, name: str) -> bool:
    """True when an import at the top level names `name`."""
    return bool(re.search(rf"^(?:from|import)[ \t][^\n]*\b{re.escape(name)}\b", source, re.MULTILINE))


def _find_fences(lines: Sequence[str]) -> Iterator[Fence]:
    for i, line in enumerate(lines):
        prefix = _FENCE_PREFIX.match(line)
        if not prefix:
            continue
        rest = line[prefix.end() :]
        char = rest[0]
        info = rest.lstrip(char)
        if char not in info:  # otherwise it is code in a line of text
            indent = len(prefix[0].expandtabs(4))
            yield Fence(line=i, indent=indent, char=char, length=len(rest) - len(info), info=info.strip())


def _pair(lines: Sequence[str], fences: Sequence[Fence]) -> Iterator[str]:
    """Yield the blocks' bodies in order; one that is never closed runs to the end (a truncated completion).

    A fence with a tag opens a block even inside another one: that other was text with an unpaired fence (EXTRACT-049).
    Fences indented by four columns more than the opening one belong to a docstring, unless nothing else closes.
    """
    opened: Fence | None = None
    deeper: Fence | None = None
    for fence in fences:
        if opened is None:
            opened, deeper = fence, None
        elif fence.indent >= opened.indent + 4:
            deeper = deeper or fence
        elif fence.info:
            yield _body(lines, opened, (deeper or fence).line)
            opened, deeper = fence, None
        elif fence.char == opened.char and fence.length >= opened.length:
            yield _body(lines, opened, fence.line)
            opened = None
    if opened is not None:
        yield _body(lines, opened, deeper.line if deeper else len(lines))


def _body(lines: Sequence[str], opened: Fence, stop: int) -> str:
    return "\n".join(_dedent(line, opened.indent) for line in lines[opened.line + 1 : stop])


def _dedent(line: str, columns: int) -> str:
    if not columns:
        return line
    line = line.expandtabs(4) if line.startswith("\t") else line
    return line[min(columns, len(line) - len(line.lstrip(" "))) :]
