"""Manifests: written last, so that a folder with one is whole. Readers trust only complete manifests."""

import functools
import importlib.metadata
import platform
import re
import subprocess
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Literal

from pydantic import Field, ValidationError, field_validator

from evaluation.errors import InputError
from evaluation.files import PARTIAL, sha256_file, write_json
from evaluation.records import Record

MANIFEST = "MANIFEST.json"
PACKAGES = ("torch", "transformers", "trl", "peft", "datasets", "accelerate", "evalplus", "prefect", "numpy", "vllm")


_STEP = re.compile("(?:global_)?step_([0-9]+)")
"""Folders that are named by the step they are of."""


class Revisions(Record):
    """Where the bytes came from: hub commits, or sha256 of shipped or local files."""

    model: str
    datasets: dict[str, str]


class FileEntry(Record):
    """One file of a folder, its path relative to the manifest and never outside of its folder."""

    path: str
    sha256: str
    size_bytes: int

    @field_validator("path")
    @classmethod
    def _inside(cls, path: str) -> str:
        if not path or path.startswith("/") or "\\" in path or {"", ".", ".."} & set(path.split("/")):
            raise ValueError(f"path={path}: leads out of its folder; list files by relative paths")
        return path


class Manifest(Record):
    """`MANIFEST.json` (contracts: manifest/1). What does not apply is null."""

    schema_: Literal["manifest/1"] = Field(default="manifest/1", alias="schema")
    kind: Literal["checkpoint", "resume", "logs", "rollouts", "score", "report"]
    cell: str | None
    global_step: int | None
    fingerprint: str | None
    cell_config: dict[str, Any] | None
    files: tuple[FileEntry, ...]
    split_sha256: str | None
    prompt_sha256: str | None
    revisions: Revisions | None
    versions: dict[str, str]
    git_commit: str | None
    created_at: str


class Provenance(Record):
    """What a manifest says beside its files: the identity of what the folder belongs to."""

    cell: str | None = None
    global_step: int | None = None
    fingerprint: str | None = None
    cell_config: dict[str, Any] | None = None
    split_sha256: str | None = None
    prompt_sha256: str | None = None
    revisions: Revisions | None = None


def list_files(folder: Path) -> Iterator[Path]:
    """Yield the files that a manifest lists: all but itself and half-written ones, ascending by relative path.

    Raises:
        InputError: a link to a folder or to nothing, which copying would drop without a word.
    """
    for path in sorted(folder.rglob("*"), key=lambda p: p.relative_to(folder).as_posix()):
        if any(part.endswith(PARTIAL) for part in path.relative_to(folder).parts):
            continue
        if path.is_symlink() and not path.is_file():
            raise InputError("folder", path, "a linked folder or a broken link cannot be published", "copy the files")
        if path.is_file() and path != folder / MANIFEST:
            yield path


def write_manifest(folder: Path, kind: str, provenance: Provenance) -> Manifest:
    """Hash every file of `folder` and write its manifest, last and whole."""
    files = tuple(
        FileEntry(path=p.relative_to(folder).as_posix(), sha256=sha256_file(p), size_bytes=p.stat().st_size)
        for p in list_files(folder)
    )
    manifest = Manifest.model_validate(
        {
            **{f: getattr(provenance, f) for f in Provenance.model_fields},
            "kind": kind,
            "files": files,
            "versions": dict(versions()),
            "git_commit": git_commit(),
            "created_at": datetime.now(UTC).isoformat(timespec="seconds"),
        }
    )
    write_json(folder / MANIFEST, manifest)
    return manifest


def read_manifest(folder: Path) -> Manifest | None:
    """Return the manifest of a local folder, or None if there is no readable one (the folder is not whole)."""
    path = folder / MANIFEST
    return parse_manifest(path.read_bytes()) if path.is_file() else None


def parse_manifest(raw: bytes) -> Manifest | None:
    """Return the manifest in these bytes, or None if they are damaged: a damaged manifest vouches for nothing."""
    try:
        return Manifest.model_validate_json(raw)
    except ValidationError:
        return None


def is_complete(folder: Path) -> bool:
    """True when the manifest is there and the listing agrees in names and sizes (hashes are `verify`'s work)."""
    manifest = read_manifest(folder)
    if manifest is None or _misnamed(folder, manifest):
        return False
    return {f.path: f.size_bytes for f in manifest.files} == {
        p.relative_to(folder).as_posix(): p.stat().st_size for p in list_files(folder)
    }


def _misnamed(folder: Path, manifest: Manifest) -> bool:
    """True for a folder that somebody has given the name of another step's."""
    named = _STEP.fullmatch(folder.name)
    return named is not None and manifest.global_step not in {None, int(named[1])}


def damaged(folder: Path) -> str | None:
    """Return what differs between a local folder and its manifest, bytes included; None if nothing, or none is there.

    A disk that fails changes bytes and not sizes: read this before anything expensive rests on the folder.
    """
    manifest = read_manifest(folder)
    if manifest is None:
        return f"{MANIFEST} is damaged" if (folder / MANIFEST).is_file() else None
    if _misnamed(folder, manifest):
        return f"it is of step {manifest.global_step} by its manifest"
    found = {p.relative_to(folder).as_posix(): p for p in list_files(folder)}
    listed = {f.path: f for f in manifest.files}
    for path in sorted({*found, *listed}):
        if path not in found:
            return f"{path} is missing"
        if path not in listed:
            return f"{path} is not in its manifest"
        size = found[path].stat().st_size
        if size != listed[path].size_bytes:
            return f"{path} has {size} bytes where its manifest says {listed[path].size_bytes}"
        if sha256_file(found[path]) != listed[path].sha256:
            return f"{path} has other bytes than its manifest says"
    return None


@functools.cache
def versions() -> dict[str, str]:
    """Versions of the packages that make the numbers, of those that are installed."""
    found = {"python": platform.python_version()}
    for name in PACKAGES:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


@functools.cache  # the code that runs is what was checked out when it started
def git_commit() -> str | None:
    """Commit of the checkout this package runs from, `-dirty` if it has changes, or of an image; None elsewhere."""
    here = Path(__file__).resolve().parent.parent
    if not (here / ".git").exists():
        return _commit_of_image(here / ".git_commit")
    try:
        commit = subprocess.run(
            ["git", "rev-parse", "HEAD"], cwd=here, capture_output=True, text=True, timeout=10, check=True
        )
        dirty = subprocess.run(
            ["git", "status", "--porcelain", "-uno"], cwd=here, capture_output=True, text=True, timeout=10, check=True
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return commit.stdout.strip() + ("-dirty" if dirty.stdout.strip() else "")


def _commit_of_image(note: Path) -> str | None:
    """Read what deployments/Dockerfile was told; an image holds no history."""
    return (note.read_text(encoding="utf-8").strip() or None) if note.is_file() else None
