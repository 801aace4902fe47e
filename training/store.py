"""The object store: whole folders under a URL, manifests last, hashes read back after every upload.

Guarantees: a reader that asks for complete folders never sees half of one; publishing twice changes nothing; a folder
of another identity is never overwritten. Does not guarantee: anything about files that somebody else edits in place
(`verify` finds those). Only `file://` is served here; another scheme is another `Backend`.
"""

import re
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Literal, Protocol
from urllib.parse import unquote, urlparse

from pydantic import Field

from evaluation.errors import InputError, MachineError
from evaluation.files import PARTIAL, sha256_file
from evaluation.manifests import MANIFEST, Manifest, is_complete, read_manifest
from evaluation.records import Record
from training.cell import Identity


class Backend(Protocol):
    """What a storage system must do; everything else is built on it."""

    def put(self, local: Path, key: str) -> None:
        """Store a file under `key`, whole or not at all."""
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

    def list(self, folder: str) -> dict[str, int]:
        """Return {path relative to folder: size} of every file below it; empty if there is none."""
        ...

    def folders(self, folder: str) -> list[str]:
        """Return the names directly below `folder` that hold files."""
        ...

    def remove(self, key: str) -> None:
        """Delete a file; a missing one is no error."""
        ...


class LocalBackend:
    """A directory; every write goes to another name first."""

    def __init__(self, root: Path) -> None:
        self.root = root

    def put(self, local: Path, key: str) -> None:
        """Copy and rename."""
        target = self.root / key
        target.parent.mkdir(parents=True, exist_ok=True)
        partial = target.with_name(target.name + PARTIAL)
        shutil.copyfile(local, partial)
        partial.replace(target)

    def read(self, key: str) -> bytes | None:
        """Read the whole file."""
        try:
            return (self.root / key).read_bytes()
        except FileNotFoundError:
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

    def list(self, folder: str) -> dict[str, int]:
        """Walk the folder."""
        top = self.root / folder
        found = (p for p in top.rglob("*") if p.is_file() and not p.name.endswith(PARTIAL)) if top.is_dir() else ()
        return {p.relative_to(top).as_posix(): p.stat().st_size for p in found}

    def folders(self, folder: str) -> list[str]:
        """Names of sub-directories."""
        top = self.root / folder
        return sorted(p.name for p in top.iterdir() if p.is_dir()) if top.is_dir() else []

    def remove(self, key: str) -> None:
        """Unlink."""
        (self.root / key).unlink(missing_ok=True)


class Fault(Record):
    """One thing that `verify` found wrong."""

    path: str
    kind: Literal["missing", "extra", "hash", "size", "no_manifest"]
    detail: str


class Verification(Record):
    """Result of `ablation verify` (contracts: verify/1)."""

    schema_: Literal["verify/1"] = Field(default="verify/1", alias="schema")
    ok: bool
    folders: int
    problems: tuple[Fault, ...]


class Store:
    """Whole folders by relative path, e.g. `<cell>/global_step_30`."""

    def __init__(self, url: str, backend: Backend) -> None:
        self.url, self.backend = url, backend

    def manifest(self, rel: str) -> Manifest | None:
        """Return the manifest of a complete folder (names and sizes agree), else None."""
        raw = self.backend.read(f"{rel}/{MANIFEST}")
        if raw is None:
            return None
        manifest = Manifest.model_validate_json(raw)
        listed = self.backend.list(rel)
        listed.pop(MANIFEST, None)
        return manifest if listed == {f.path: f.size_bytes for f in manifest.files} else None

    def has(self, rel: str) -> bool:
        """True when the folder is complete."""
        return self.manifest(rel) is not None

    def publish(self, local: Path, rel: str) -> bool:
        """Upload a whole local folder; files that are there already are not sent again. False if nothing was to do.

        Raises:
            ValueError: the local folder is not whole.
            InputError: the store holds a folder of another identity under this name.
            OSError: the store cannot be written, or reads back other bytes.
        """
        manifest = read_manifest(local)
        if manifest is None or not is_complete(local):
            raise ValueError(f"{local}: not a whole folder (manifest and listing differ); it will be made again")
        there = self.manifest(rel)
        if there is not None:
            if there.fingerprint != manifest.fingerprint:
                raise _other(rel, self.url, f"fingerprint {manifest.fingerprint} -> {there.fingerprint}")
            if {f.path: f.sha256 for f in there.files} == {f.path: f.sha256 for f in manifest.files}:
                return False
        self.backend.remove(f"{rel}/{MANIFEST}")  # from here to the last line the folder is not complete
        stored = self.backend.list(rel)
        for extra in stored.keys() - {f.path for f in manifest.files}:
            self.backend.remove(f"{rel}/{extra}")
        for f in manifest.files:
            key = f"{rel}/{f.path}"
            if stored.get(f.path) == f.size_bytes and self.backend.sha256(key) == f.sha256:
                continue
            self.backend.put(local / f.path, key)
            if self.backend.sha256(key) != f.sha256:
                raise OSError(f"{self.url}/{key}: reads back other bytes than were sent")
        self.backend.put(local / MANIFEST, f"{rel}/{MANIFEST}")
        return True

    def publish_file(self, local: Path, rel: str) -> None:
        """Add one file to a folder that is still open (logs and rollouts of a cell in training)."""
        self.backend.put(local, rel)

    def fetch(self, rel: str, local: Path) -> Path:
        """Download a complete folder, check every hash, and return its local path; what is there already is kept.

        Raises:
            FileNotFoundError: the folder is not complete in the store.
            OSError: a downloaded file has another hash than its manifest says.
        """
        manifest = self.manifest(rel)
        if manifest is None:
            raise FileNotFoundError(f"{self.url}/{rel}: no complete folder")
        for f in manifest.files:
            target = local / f.path
            if not (target.is_file() and target.stat().st_size == f.size_bytes and sha256_file(target) == f.sha256):
                self.backend.get(f"{rel}/{f.path}", target)
                if sha256_file(target) != f.sha256:
                    raise OSError(f"{self.url}/{rel}/{f.path}: hash differs from its manifest; run `ablation verify`")
        self.backend.get(f"{rel}/{MANIFEST}", local / MANIFEST)
        return local

    def read(self, rel: str) -> bytes | None:
        """Return a file's bytes, or None."""
        return self.backend.read(rel)

    def numbered(self, rel: str, prefix: str) -> list[int]:
        """Return the N of every complete `<rel>/<prefix>N`, in numeric order (never by text, never by a shared prefix)."""
        pattern = re.compile(re.escape(prefix) + r"(\d+)")
        found = (pattern.fullmatch(name) for name in self.backend.folders(rel))
        return sorted(int(m[1]) for m in found if m and self.has(f"{rel}/{m[0]}"))

    def refuse_other(self, rel: str, identity: Identity) -> None:
        """Refuse a stored folder of another identity, with the fields that differ.

        Raises:
            InputError: the folder is complete and its fingerprint is not `identity.fingerprint`.
        """
        found = self.manifest(rel)
        if found is not None and found.fingerprint != identity.fingerprint:
            raise _other(rel, self.url, "; ".join(identity.differences(found)[:4]) or "fingerprint differs")

    def check_writable(self) -> None:
        """Write and read back a small file.

        Raises:
            MachineError: the store cannot be written.
        """
        probe = Path(__file__)
        try:
            self.backend.put(probe, ".probe")
            same = self.backend.sha256(".probe") == sha256_file(probe)
            self.backend.remove(".probe")
        except OSError as e:
            raise MachineError(
                "store", self.url, f"cannot be written ({e.strerror or e})", "give a writable --store URL"
            ) from e
        if not same:
            raise MachineError("store", self.url, "reads back other bytes than were written", "use another store")

    def verify(self, progress: Callable[[str], None] | None = None) -> Verification:
        """Check every folder against its manifest, bytes included; open logs and rollouts are no fault."""
        faults, count = [], 0
        for rel in self._folders():
            count += 1
            if progress:
                progress(rel)
            faults += self._verify_folder(rel)
        return Verification(ok=not faults, folders=count, problems=tuple(faults))

    def _folders(self) -> Iterator[str]:
        """Every folder that should have a manifest: those that do, and the planned kinds that do not."""
        seen = set()
        for path in self.backend.list(""):
            parts = path.split("/")
            depth = _depth(parts)
            if depth and (rel := "/".join(parts[:depth])) not in seen:
                seen.add(rel)
                yield rel

    def _verify_folder(self, rel: str) -> list[Fault]:
        raw, listed = self.backend.read(f"{rel}/{MANIFEST}"), self.backend.list(rel)
        listed.pop(MANIFEST, None)
        if raw is None:
            if rel.rsplit("/", 1)[-1] in {"logs", "rollouts"}:
                return []
            return [Fault(path=rel, kind="no_manifest", detail=f"{len(listed)} files without a manifest")]
        faults, manifest = [], Manifest.model_validate_json(raw)
        for f in manifest.files:
            size = listed.pop(f.path, None)
            if size is None:
                faults.append(Fault(path=f"{rel}/{f.path}", kind="missing", detail="listed, not stored"))
            elif size != f.size_bytes:
                faults.append(
                    Fault(path=f"{rel}/{f.path}", kind="size", detail=f"{size} bytes, manifest {f.size_bytes}")
                )
            elif (found := self.backend.sha256(f"{rel}/{f.path}")) != f.sha256:
                faults.append(
                    Fault(path=f"{rel}/{f.path}", kind="hash", detail=f"{found[:12]}, manifest {f.sha256[:12]}")
                )
        return faults + [Fault(path=f"{rel}/{p}", kind="extra", detail="stored, not listed") for p in sorted(listed)]


def _depth(parts: list[str]) -> int:
    """How many leading parts of a file's path name its manifest folder (contracts: Files in a store); 0 if none does."""
    if parts[0] == "reports":
        return 2 if len(parts) > 2 else 0
    if len(parts) > 4 and parts[1] == "scores":
        return 4
    if len(parts) > 3 and parts[1] == "resume":
        return 3
    if len(parts) > 2 and (parts[1] in {"logs", "rollouts"} or parts[1].startswith("global_step_")):
        return 2
    return 0


def _other(rel: str, url: str, difference: str) -> InputError:
    return InputError(
        "store", f"{url}/{rel}", f"holds another run ({difference})", "use another --store, or ask for what is there"
    )


def open_store(url: str) -> Store:
    """Return the store at a URL; a plain path means `file://`.

    Raises:
        InputError: a scheme that is not served.
    """
    parsed = urlparse(url)
    if parsed.scheme in {"", "file"}:
        root = Path(unquote(parsed.path)).expanduser().absolute()
        return Store(root.as_uri(), LocalBackend(root))
    raise InputError("store", url, f"scheme '{parsed.scheme}' is not served yet", "use file:///path")
