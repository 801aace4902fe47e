"""From a completion's text to the program in it, by text rules alone.

No parser is used: the result cannot depend on Python's version, and a completion cannot crash or stall one. Programs
are taken whole. What it does not do: repair code, choose statements, or judge.
"""

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

_FENCE = re.compile(r"(?P<indent>[ \t]*)(?P<fence>`{3,}|~{3,})[ \t]*(?P<info>[^`\n]*?)[ \t]*")


@dataclass(frozen=True)
class Fence:
    """A line that opens or closes a fenced block."""

    line: int
    indent: str
    char: str
    length: int
    info: str
    """The language tag; a fence with one always opens a block."""


@dataclass(frozen=True)
class Block:
    """A fenced block's body, `lines[start:stop]` without the fence's own indentation."""

    start: int
    stop: int
    text: str


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

    "Last block" alone would take a usage example or its output (EXTRACT-033). Fences are paired twice: strictly, so
    that fences inside an indented docstring are data, then leniently, for blocks whose closing fence is indented.
    """
    text = text.replace("\r\n", "\n").replace("\r", "\n")
    lines = text.split("\n")
    fences = list(_find_fences(lines))
    strict = list(_pair(lines, fences, strict=True))
    lenient = list(_pair(lines, fences, strict=False))
    for blocks in (strict, lenient):
        for block in reversed(blocks):
            if defines(block.text, entry_point):
                return block.text
    if fences and not fences[0].info:
        # The prompt had opened the fence: the program ends where it is closed (EXTRACT-034).
        head = "\n".join(lines[: fences[0].line])
        if defines(head, entry_point):
            return head
    return strict[-1].text if strict else text


def defines(source: str, name: str) -> bool:
    """True when some line at the top level of `source` binds `name`: a def, a class, an assignment or an import."""
    n = re.escape(name)
    return bool(
        re.search(
            rf"^(?:(?:async[ \t]+)?def[ \t]+{n}[ \t]*\(|class[ \t]+{n}\b|{n}[ \t]*(?::[^=\n]*)?=(?!=)"
            rf"|(?:from|import)\b[^\n]*\b(?:import|as)[ \t]+(?:[^\n]*[ \t,(])?{n}\b)",
            source,
            re.MULTILINE,
        )
    )


def _find_fences(lines: Sequence[str]) -> Iterator[Fence]:
    for i, line in enumerate(lines):
        m = _FENCE.fullmatch(line)
        if m:
            fence = m["fence"]
            yield Fence(line=i, indent=m["indent"], char=fence[0], length=len(fence), info=m["info"])


def _pair(lines: Sequence[str], fences: Sequence[Fence], *, strict: bool) -> Iterator[Block]:
    """Yield the blocks in order; one that is never closed runs to the end (a truncated completion).

    A fence with a tag opens a block even inside another one: that other was text with an unpaired fence (EXTRACT-049).
    """
    opened: Fence | None = None
    for fence in fences:
        if opened is None:
            opened = fence
            continue
        if strict and len(fence.indent.expandtabs(4)) >= len(opened.indent.expandtabs(4)) + 4:
            continue
        if fence.info:
            yield _body(lines, opened, fence.line)
            opened = fence
        elif fence.char == opened.char and fence.length >= opened.length:
            yield _body(lines, opened, fence.line)
            opened = None
    if opened is not None:
        yield _body(lines, opened, len(lines))


def _body(lines: Sequence[str], opened: Fence, stop: int) -> Block:
    body = [line.removeprefix(opened.indent) for line in lines[opened.line + 1 : stop]]
    return Block(start=opened.line + 1, stop=stop, text="\n".join(body))
