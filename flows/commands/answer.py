"""What a subcommand gives back: one document for `--json`, one text for people, one exit code."""

import argparse
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from pydantic import BaseModel

from training.cell import format_lr


@dataclass(frozen=True)
class Answer:
    """The result of a subcommand."""

    document: dict[str, Any]
    """Printed with `--json`; carries `schema`."""
    text: str
    """Printed without."""
    exit_code: int = 0

    @classmethod
    def of(cls, record: BaseModel, text: str, exit_code: int = 0) -> "Answer":
        """Return the answer whose document is a record."""
        return cls(record.model_dump(mode="json", by_alias=True), text, exit_code)


@dataclass(frozen=True)
class Command:
    """A subcommand."""

    configure: Callable[[argparse.ArgumentParser], None]
    execute: Callable[[argparse.Namespace], Answer]
    help: str


def rate(lr: float) -> str:
    """Return a learning rate as people write it: 6e-6, 2.5e-6 (Python's own form is 6e-06, and 0.001 for 1e-3)."""
    return format_lr(lr).removeprefix("lr").replace("p", ".").replace("e", "e-")


def table(rows: list[tuple[str, ...]]) -> str:
    """Return rows of text in columns, the first left-aligned, the others right."""
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    return "\n".join(
        "  ".join(c.ljust(w) if i == 0 else c.rjust(w) for i, (c, w) in enumerate(zip(row, widths, strict=True)))
        for row in rows
    )
