"""Files that are either whole or absent: write under another name, flush, rename."""

import hashlib
import json
import os
import shutil
import tempfile
import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from pydantic import BaseModel

from evaluation.errors import InputError, MachineError
from evaluation.program import naming

PARTIAL = ".partial"
"""Suffix of everything half-written; readers skip it, writers may delete it."""


def write_text(path: Path, text: str) -> None:
    """Write `text` to `path` so that a kill leaves the old file or the new one, never a part."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f"{path.name}.{os.getpid()}-{threading.get_ident()}{PARTIAL}")
    with naming(path), partial.open("w", encoding="utf-8") as f:
        f.write(text)
        f.flush()
        os.fsync(f.fileno())
    partial.replace(path)


def write_json(path: Path, value: Any) -> None:
    """Write a record or plain value as indented JSON; NaN is refused (use strings)."""
    if isinstance(value, BaseModel):
        value = value.model_dump(mode="json", by_alias=True)
    write_text(path, _dumps(value, indent=1) + "\n")


def write_jsonl(path: Path, rows: Iterable[BaseModel | dict[str, Any]]) -> None:
    """Write one JSON object a line."""
    lines = (_dumps(r.model_dump(mode="json", by_alias=True) if isinstance(r, BaseModel) else r) for r in rows)
    write_text(path, "".join(line + "\n" for line in lines))


def _dumps(value: Any, indent: int | None = None) -> str:
    """Return readable JSON; escaped where a lone surrogate (a hostile program's) has no UTF-8 form."""
    text = json.dumps(value, indent=indent, ensure_ascii=False, allow_nan=False)
    try:
        text.encode()
    except UnicodeEncodeError:
        return json.dumps(value, indent=indent, allow_nan=False)
    return text


def append_jsonl(path: Path, rows: Iterable[BaseModel]) -> None:
    """Append rows in one write; a kill may cut the last line, which `read_jsonl` leaves out."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with naming(path), path.open("a", encoding="utf-8") as f:
        f.write(
            "".join(json.dumps(r.model_dump(mode="json"), ensure_ascii=False, allow_nan=False) + "\n" for r in rows)
        )
        f.flush()
        os.fsync(f.fileno())


def read_jsonl(path: Path) -> list[dict[str, Any]]:
    """Read the complete lines of a JSONL file; a last line cut by a kill is left out.

    Raises:
        InputError: a complete line is not a JSON object.
    """
    with path.open("rb") as f:
        return parse_jsonl(path, f)


def parse_jsonl(path: Path, lines: Iterable[bytes], first: int = 1) -> list[dict[str, Any]]:
    """Return the objects of the complete ones among a file's lines, of which the first has the number `first`.

    Raises:
        InputError: a complete line is not a JSON object.
    """
    rows = []
    for number, line in enumerate(lines, first):
        if not line.endswith(b"\n") or not line.strip():
            continue
        try:
            row = json.loads(line)
        except ValueError as e:
            raise InputError(path.name, f"line {number}", f"not JSON ({e})", f"mend or remove {path}") from e
        if not isinstance(row, dict):
            raise InputError(path.name, f"line {number}", "not a JSON object", f"mend or remove {path}")
        rows.append(row)
    return rows


def check_writable(field: str, folder: Path) -> None:
    """Refuse a folder that nothing could be written to, before anything expensive starts.

    Raises:
        MachineError: with the reason.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as e:
        fix = f"give another folder with --{field}"
        raise MachineError(field, folder, f"cannot be written ({e.strerror or e})", fix) from e


def check_readable(field: str, path: Path, what: str) -> None:
    """Refuse a path that is no file, or none that this user may read.

    Raises:
        InputError: with the reason.
    """
    if not path.is_file():
        raise InputError(field, path, "a folder" if path.is_dir() else "no such file", f"give {what}")
    if not os.access(path, os.R_OK):
        raise InputError(field, path, "this user may not read it", f"change its permissions, or give {what}")


@contextmanager
def whole_folder(path: Path) -> Iterator[Path]:
    """Yield a scratch folder that becomes `path` by rename at a clean exit; an exception leaves `path` untouched."""
    partial = path.with_name(path.name + PARTIAL)
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    with naming(path):
        yield partial
    if path.exists():
        shutil.rmtree(path)
    partial.rename(path)


def sha256_file(path: Path) -> str:
    """Return the hex sha256 of a file's bytes."""
    with path.open("rb") as f:
        return hashlib.file_digest(f, "sha256").hexdigest()
