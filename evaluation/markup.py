"""Tables as rows of text, and their form in Markdown."""

from collections.abc import Sequence
from dataclasses import dataclass

Row = tuple[str, ...]


@dataclass(frozen=True)
class Table:
    """Rows under a title, the first their head, and what one has to know to read them."""

    title: str
    rows: tuple[Row, ...]
    note: str = ""


def table(rows: Sequence[Sequence[str]]) -> str:
    """Return a Markdown table; the first row is its head."""
    head, *body = [[str(c).replace("|", "\\|") for c in row] for row in rows]
    return "\n".join(f"| {' | '.join(row)} |" for row in (head, ["---"] * len(head), *body))
