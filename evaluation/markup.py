"""Tables in Markdown."""

from collections.abc import Sequence


def table(rows: Sequence[Sequence[str]]) -> str:
    """Return a Markdown table; the first row is its head."""
    head, *body = [[str(c).replace("|", "\\|") for c in row] for row in rows]
    return "\n".join(f"| {' | '.join(row)} |" for row in (head, ["---"] * len(head), *body))
