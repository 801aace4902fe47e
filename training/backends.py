"""Storage systems behind the store: a handful of operations on keys, each whole or not done at all."""

import os
import shutil
import uuid
from pathlib import Path
from typing import Protocol

from evaluation.files import PARTIAL, sha256_file


class Backend(Protocol):
    """What a storage system must do; everything else is built on it."""

    def put(self, local: Path, key: str) -> None:
        """Store a file under `key`, whole or not at all."""
        ...

    def same(self, local: Path, key: str, sha256: str) -> bool:
        """Say whether `key` holds this file's bytes and they have this hash; never taken on trust."""
        ...

    def read(self, key: str) -> bytes | None:
        """Return the bytes, or None if there is no such file."""
        ...

    def sha256(self, key: str) -> str:
        """Return the hash of the bytes as stored."""
        ...

    def get(self, key: str, local: Path) -> None:
        """Copy a stored file to a local path."""
        ...

    def folders(self, folder: str) -> list[str]:
        """Return the names directly below `folder` that hold files."""
        ...

    def list(self, folder: str) -> dict[str, int]:
        """Return {path relative to folder: size} of every file below it; empty if there is none."""
        ...

    def remove(self, key: str) -> None:
        """Delete a file; a missing one is no error."""
        ...

    def sweep(self, folder: str) -> None:
        """Remove what killed writers left below `folder` half-written, where only its caller writes."""
        ...


class LocalBackend:
    """A directory; every write goes to another name first."""

    def __init__(self, root: Path) -> None:
        self.root = root

    def put(self, local: Path, key: str) -> None:
        """Copy to a name of this writer's own, and rename."""
        target = self.root / key
        target.parent.mkdir(parents=True, exist_ok=True)
        partial = target.with_name(f"{target.name}.{uuid.uuid4().hex[:8]}{PARTIAL}")
        shutil.copyfile(local, partial)
        partial.replace(target)

    def same(self, local: Path, key: str, sha256: str) -> bool:
        """Hash the file on disk."""
        target = self.root / key
        return target.is_file() and sha256_file(target) == sha256

    def read(self, key: str) -> bytes | None:
        """Read the whole file."""
        try:
            return (self.root / key).read_bytes()
        except (FileNotFoundError, IsADirectoryError, NotADirectoryError):
            return None

    def sha256(self, key: str) -> str:
        """Hash the file on disk."""
        return sha256_file(self.root / key)

    def get(self, key: str, local: Path) -> None:
        """Copy and rename."""
        local.parent.mkdir(parents=True, exist_ok=True)
        partial = local.with_name(local.name + PARTIAL)
        shutil.copyfile(self.root / key, partial)
        partial.replace(local)

    def folders(self, folder: str) -> list[str]:
        """Names of sub-directories."""
        top = self.root / folder
        return sorted(p.name for p in top.iterdir() if p.is_dir()) if top.is_dir() else []

    def list(self, folder: str) -> dict[str, int]:
        """Walk the folder."""
        found: dict[str, int] = {}
        top = self.root / folder
        for at, _, names in os.walk(top, onerror=_unless_absent):
            for name in names:
                path = Path(at, name)
                if not name.endswith(PARTIAL) and path.is_file():
                    found[path.relative_to(top).as_posix()] = path.stat().st_size
        return found

    def remove(self, key: str) -> None:
        """Unlink."""
        (self.root / key).unlink(missing_ok=True)

    def sweep(self, folder: str) -> None:
        """Unlink partial files."""
        for path in (self.root / folder).rglob(f"*{PARTIAL}"):
            path.unlink(missing_ok=True)


def _unless_absent(error: OSError) -> None:
    """A folder that is not there holds nothing; one that cannot be read must never look as if it held nothing."""
    if not isinstance(error, FileNotFoundError | NotADirectoryError):
        raise error
