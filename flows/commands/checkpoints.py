"""Where a checkpoint named on the command line is: a local folder, or a repository on the Hub. Weights are not read."""

import re
from dataclasses import dataclass
from pathlib import Path

from evaluation.errors import InputError, MachineError
from evaluation.files import sha256_file
from evaluation.manifests import Manifest, damaged, read_manifest

SMALL_FILES = ("*.json", "*.jinja", "*.txt", "*.model")
"""Configuration, tokenizer and manifest: what a prompt specification is read from."""


@dataclass(frozen=True)
class Checkpoint:
    """A model to draw from."""

    label: str
    """As the person wrote it."""
    path: str
    """Local folder or repository, for the child that loads it."""
    subfolder: str | None
    """Within a repository."""
    revision: str | None
    """Commit of a repository."""
    files: Path
    """Local folder with at least its small files."""

    @property
    def manifest(self) -> Manifest | None:
        """Its own, if it is one of ours."""
        return read_manifest(self.files)

    @property
    def identity(self) -> str:
        """What its weights are, for the score's manifest: the hub's commit, or the hash of its hashes."""
        if self.revision is not None:
            return self.revision
        weights = sorted(self.files.glob("*.safetensors")) or [self.files / "config.json"]
        return "sha256:" + ",".join(sha256_file(p) for p in weights)


def locate(text: str) -> Checkpoint:
    """Return the checkpoint that PATH_OR_REPO[:SUBFOLDER] names.

    Raises:
        InputError: nothing is there, or it is no model.
        MachineError: the Hub cannot be reached.
    """
    text = text.removeprefix("file://")
    if not text:
        raise InputError("checkpoint", text, "is empty", "give a model folder or ORG/NAME[:SUBFOLDER]")
    base, _, sub = text.partition(":")
    for path in (Path(text), Path(base, sub)):
        if path.is_dir():
            return _local(text, path)
    if Path(base).exists() or not re.fullmatch(r"[\w-][\w.-]*/[\w.-]+", base, re.ASCII):
        raise InputError("checkpoint", text, "no such folder", "give a model folder or ORG/NAME[:SUBFOLDER]")
    return _on_hub(text, base, sub.strip("/") or None)


def _local(text: str, path: Path) -> Checkpoint:
    if not (path / "config.json").is_file():
        raise InputError("checkpoint", text, "has no config.json", "give a Hugging Face model folder")
    if difference := damaged(path):
        raise InputError("checkpoint", text, f"differs from its manifest: {difference}", "fetch it again")
    return Checkpoint(text, str(path.absolute()), None, None, path)


def _on_hub(text: str, repo: str, sub: str | None) -> Checkpoint:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import EntryNotFoundError, HfHubHTTPError, LocalEntryNotFoundError
    from huggingface_hub.errors import RepositoryNotFoundError as Missing

    patterns = [f"{sub}/{p}" if sub else p for p in SMALL_FILES]
    try:
        root = Path(snapshot_download(repo, allow_patterns=patterns, etag_timeout=5))
    except Missing as e:
        raise InputError("checkpoint", text, "no such repository on the Hub", "give ORG/NAME[:SUBFOLDER]") from e
    except (HfHubHTTPError, LocalEntryNotFoundError, EntryNotFoundError, OSError) as e:
        reason = str(e).splitlines()[0] if str(e) else type(e).__name__
        raise MachineError(
            "hub",
            repo,
            f"no such folder here, and the Hub cannot be reached ({reason[:100]})",
            "go online, or mend the path",
        ) from e
    files = root / sub if sub else root
    if not (files / "config.json").is_file():
        raise InputError("checkpoint", text, "has no config.json there", "give ORG/NAME[:SUBFOLDER] of a model")
    return Checkpoint(text, repo, sub, root.name, files)
