"""The object store: whole folders under a URL, manifests last, hashes read back after every upload.

Guarantees: a reader that asks for complete folders never sees half of one; publishing twice changes nothing; a folder
of another identity is never overwritten. Does not guarantee: anything about files that somebody else edits in place
(`verify` finds those). `file://` and `s3://` are served; another scheme is another `Backend`.
"""

import os
import re
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Literal
from urllib.parse import quote, unquote_to_bytes

from pydantic import Field

from evaluation.errors import InputError, MachineError
from evaluation.files import sha256_file
from evaluation.manifests import MANIFEST, Manifest, damaged, is_complete, list_files, parse_manifest, read_manifest
from evaluation.records import Record
from training.backends import Backend, LocalBackend
from training.cell import Identity, differences

SENDS = 4
"""Of one file whose bytes arrive broken."""


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
        manifest = self._claim(rel)
        if manifest is None:
            return None
        listed = self.backend.list(rel)
        listed.pop(MANIFEST, None)
        return manifest if listed == {f.path: f.size_bytes for f in manifest.files} else None

    def _claim(self, rel: str) -> Manifest | None:
        """Return what the folder says it is, whole or not: enough to refuse another run's, not to trust its files."""
        raw = self.backend.read(f"{rel}/{MANIFEST}")
        return parse_manifest(raw) if raw is not None else None

    def has(self, rel: str) -> bool:
        """True when the folder is complete."""
        return self.manifest(rel) is not None

    def publish(self, local: Path, rel: str, before_manifest: Callable[[], None] = lambda: None) -> bool:
        """Upload a whole local folder; files that are there already are not sent again. False if nothing was to do.

        Args:
            local: the folder.
            rel: its place in the store.
            before_manifest: called when all but the manifest is there; raises where it may not be written any more.

        Raises:
            ValueError: the local folder is not whole.
            InputError: the store holds a folder of another identity under this name.
            OSError: the store cannot be written, or reads back other bytes.
        """
        manifest = read_manifest(local)
        if manifest is None or not is_complete(local):
            raise ValueError(f"{local}: not a whole folder (manifest and listing differ); it will be made again")
        claim = self._claim(rel)
        if claim is not None and claim.fingerprint != manifest.fingerprint:
            raise _other(rel, self.url, differences(manifest.model_dump(mode="json"), claim))
        there = self.manifest(rel)
        if there is not None and there.files == manifest.files:
            return False
        self.backend.remove(f"{rel}/{MANIFEST}")  # from here to the last line the folder is not complete
        self.backend.sweep(rel)
        stored = self.backend.list(rel)
        for extra in stored.keys() - {f.path for f in manifest.files}:
            self.backend.remove(f"{rel}/{extra}")
        for f in manifest.files:
            key = f"{rel}/{f.path}"
            if stored.get(f.path) == f.size_bytes and self.backend.same(local / f.path, key, f.sha256):
                continue
            self._send(local, f.path, key, f.sha256)
        before_manifest()
        self._send(local, MANIFEST, f"{rel}/{MANIFEST}", sha256_file(local / MANIFEST))
        return True

    def _send(self, folder: Path, name: str, key: str, sha256: str) -> None:
        """Upload a file of a folder and prove that it is there; bytes that were broken on the way are sent again."""
        for _ in range(SENDS):
            self.backend.put(folder / name, key)
            if self.backend.same(folder / name, key, sha256):
                return
            if difference := damaged(folder):
                raise ValueError(f"{folder}: {difference}")
        self.backend.remove(key)
        raise OSError(f"{self.url}/{key}: reads back other bytes than were sent")

    def publish_file(self, local: Path, rel: str) -> None:
        """Add one file to a folder that is still open (logs and rollouts of a cell in training)."""
        self.backend.put(local, rel)

    def fetch(self, rel: str, local: Path) -> Path:
        """Download a complete folder, check every hash, and return its local path; what is there already is kept.

        Files of an earlier fetch that the folder no longer has are removed: a loader would mix them in.

        Raises:
            FileNotFoundError: the folder is not complete in the store.
            InputError: the local folder holds files that no fetch put there.
            OSError: a downloaded file has another hash than its manifest says.
        """
        manifest = self.manifest(rel)
        if manifest is None:
            raise FileNotFoundError(f"{self.url}/{rel}: no complete folder")
        _make_room(local, manifest)
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
        """Return the N of every complete `<rel>/<prefix>N`, in numeric order (never by text or shared prefix)."""
        pattern = re.compile(re.escape(prefix) + "(0|[1-9][0-9]*)")
        found = (pattern.fullmatch(name) for name in self.backend.folders(rel))
        return sorted(int(m[1]) for m in found if m and self.has(f"{rel}/{m[0]}"))

    def refuse_other(self, rel: str, identity: Identity) -> None:
        """Refuse a stored folder of another identity, with the fields that differ.

        Raises:
            InputError: the folder says that it is another's: its fingerprint is not `identity.fingerprint`.
        """
        found = self._claim(rel)
        if found is not None and found.fingerprint != identity.fingerprint:
            raise _other(rel, self.url, identity.differences(found))

    def check_writable(self) -> None:
        """Write and read back a small file.

        Raises:
            MachineError: the store cannot be written.
        """
        probe, key = Path(__file__), f".probe-{uuid.uuid4().hex}"
        try:
            self.backend.put(probe, key)
            same = self.backend.sha256(key) == sha256_file(probe)
            self.backend.remove(key)
        except OSError as e:
            raise MachineError(
                "store", self.url, f"cannot be written ({e.strerror or e})", "give a writable --store URL"
            ) from e
        if not same:
            raise MachineError("store", self.url, "reads back other bytes than were written", "use another store")

    def verify(self, progress: Callable[[str], None] | None = None) -> Verification:
        """Check every folder against its manifest, bytes included; open logs and rollouts are no fault."""
        faults, count = [], 0
        for rel in self.folders():
            count += 1
            if progress:
                progress(rel)
            faults += self._verify_folder(rel)
        return Verification(ok=not faults, folders=count, problems=tuple(faults))

    def folders(self) -> Iterator[str]:
        """Yield every folder that has or should have a manifest."""
        seen = set()
        for path in sorted(self.backend.list("")):
            parts = path.split("/")
            depth = _depth(parts)
            if depth and (rel := "/".join(parts[:depth])) not in seen:
                seen.add(rel)
                yield rel

    def _is_open(self, rel: str) -> bool:
        """True for the logs and rollouts of a cell that has not ended: neither has its manifest yet."""
        cell, _, name = rel.rpartition("/")
        other = {"logs": "rollouts", "rollouts": "logs"}.get(name)
        return other is not None and self.backend.read(f"{cell}/{other}/{MANIFEST}") is None

    def _verify_folder(self, rel: str) -> list[Fault]:
        raw, listed = self.backend.read(f"{rel}/{MANIFEST}"), self.backend.list(rel)
        listed.pop(MANIFEST, None)
        if raw is None:
            if self._is_open(rel):
                return []
            return [Fault(path=rel, kind="no_manifest", detail=f"{len(listed)} files without a manifest")]
        faults, manifest = [], parse_manifest(raw)
        if manifest is None:
            return [Fault(path=rel, kind="no_manifest", detail="the manifest is damaged")]
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
    """Return how many leading parts of a file's path name its manifest folder; 0 if none does."""
    if parts[0] == "reports":
        return 2 if len(parts) > 2 else 0
    if len(parts) > 4 and parts[1] == "scores":
        return 4
    if len(parts) > 3 and parts[1] == "resume":
        return 3
    if len(parts) > 2 and (parts[1] in {"logs", "rollouts"} or parts[1].startswith("global_step_")):
        return 2
    return 0


def _make_room(local: Path, manifest: Manifest) -> None:
    """Remove what an earlier fetch left in `local` and `manifest` does not list; refuse anybody else's files."""
    if not local.is_dir():
        return
    ours = (local / MANIFEST).is_file()
    listed = {f.path for f in manifest.files}
    for path in [p for p in list_files(local) if p.relative_to(local).as_posix() not in listed]:
        if not ours:
            raise InputError("folder", local, f"holds {path.name}, which was not fetched", "give an empty folder")
        path.unlink()
    (local / MANIFEST).unlink(missing_ok=True)  # whatever comes next, a kill must not leave a manifest over a mixture


def _other(rel: str, url: str, differing: list[str]) -> InputError:
    found = "; ".join(differing[:4]) or "its fingerprint differs"
    more = f" and {len(differing) - 4} more" if len(differing) > 4 else ""
    return InputError(
        "store",
        f"{url}/{rel}",
        f"holds another run (asked -> found: {found}{more})",
        "use another --store, or ask for what is there",
    )


def open_store(url: str) -> Store:
    """Return the store at a URL; a plain path means `file://`.

    Raises:
        InputError: a scheme that is not served.
    """
    scheme, separator, rest = url.partition("://")
    if not separator:
        scheme, rest = "file", quote(os.fsencode(url))
    if scheme == "s3":
        if not re.fullmatch(r"[a-z0-9][a-z0-9.-]{1,61}[a-z0-9](/.*)?", rest):
            raise InputError("store", url, "names no bucket", "use s3://BUCKET/PREFIX")
        from training.s3 import S3Backend

        return Store(url.rstrip("/"), S3Backend(rest))
    if scheme != "file":
        raise InputError("store", url, f"scheme '{scheme}' is not served", "use s3://BUCKET/PREFIX or file:///path")
    if separator and not rest.startswith("/"):
        raise InputError("store", url, "a file URL has three slashes and a full path", "use file:///path")
    if not rest:
        raise InputError("store", url, "is empty", "use file:///path")
    root = Path(os.fsdecode(unquote_to_bytes(rest))).expanduser().absolute()
    return Store(root.as_uri(), LocalBackend(root))
