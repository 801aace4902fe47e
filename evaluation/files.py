"""Files that are either whole or absent: write under another name, flush, rename."""

import hashlib
import json
import os
import shutil
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from pydantic import BaseModel

PARTIAL = ".partial"
"""Suffix of everything half-written; readers skip it, writers may delete it."""


def write_text(path: Path, text: str) -> None:
    """Write `text` to `path` so that a kill leaves the old file or the new one, never a part."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f"{path.name}.{os.getpid()}{PARTIAL}")
    with partial.open("w", encoding="utf-8") as f:
        f.write(text)
        f.flush()
        os.fsync(f.fileno())
    partial.replace(path)


def write_json(path: Path, value: Any) -> None:
    """Write a record or plain value as indented JSON; NaN is refused (use strings)."""
    if isinstance(value, BaseModel):
        value = value.model_dump(mode="json", by_alias=True)
    write_text(path, json.dumps(value, indent=1, ensure_ascii=False, allow_nan=False) + "\n")


def write_jsonl(path: Path, rows: Iterable[BaseModel | dict[str, Any]]) -> None:
    """Write one JSON object a line."""
    lines = (
        json.dumps(r.model_dump(mode="json") if isinstance(r, BaseModel) else r, ensure_ascii=False, allow_nan=False)
        for r in rows
    )
    write_text(path, "".join(line + "\n" for line in lines))


def read_jsonl(path: Path) -> list[dict[str, Any]]:
    """Read the complete lines of a JSONL file; a last line cut by a kill is left out."""
    rows = []
    with path.open(encoding="utf-8") as f:
        for line in f:
            if line.endswith("\n") and line.strip():
                rows.append(json.loads(line))
    return rows


@contextmanager
def whole_folder(path: Path) -> Iterator[Path]:
    """Yield a scratch folder that becomes `path` by rename at a clean exit; an exception leaves `path` untouched."""
    partial = path.with_name(path.name + PARTIAL)
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    yield partial
    if path.exists():
        shutil.rmtree(path)
    partial.rename(path)


def sha256_file(path: Path) -> str:
    """Return the hex sha256 of a file's bytes."""
    with path.open("rb") as f:
        return hashlib.file_digest(f, "sha256").hexdigest()
