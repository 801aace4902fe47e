"""A store's complete folders on the Hugging Face Hub, under the same paths. Resume states stay at home.

Each folder is one commit, so that a reader of the Hub sees it whole; a folder whose manifest is there already is not
sent again. A folder of another run under the same name is refused, as in every store.
"""

import json
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

from evaluation.errors import InputError, MachineError
from evaluation.manifests import MANIFEST, parse_manifest
from training.cell import MODELS, differences
from training.store import Store

_ABOUT = """GRPO runs along a learning-rate ladder, with and without replay of past rollouts. Every folder has a
`MANIFEST.json` with the hashes of its files and the whole configuration of its cell."""


class HubApi(Protocol):
    """The part of `huggingface_hub.HfApi` that is used."""

    def create_repo(self, repo_id: str, *, exist_ok: bool) -> Any:
        """Create a model repository."""
        ...

    def upload_folder(
        self, *, repo_id: str, folder_path: str, path_in_repo: str, commit_message: str, delete_patterns: str
    ) -> Any:
        """Commit a folder, and the removal of what matches `delete_patterns`."""
        ...

    def upload_file(self, *, path_or_fileobj: bytes, path_in_repo: str, repo_id: str, commit_message: str) -> Any:
        """Commit a file."""
        ...

    def file_exists(self, repo_id: str, filename: str) -> bool:
        """Say whether a file is in the repository."""
        ...

    def hf_hub_download(self, repo_id: str, filename: str) -> str:
        """Download a file and return its local path."""
        ...


def publish_store(store: Store, repo: str, api: HubApi, progress: Callable[[str], None]) -> list[str]:
    """Upload every complete folder but resume states, then the model card; return their paths.

    Raises:
        InputError: the store holds nothing complete, or the Hub holds another run under a folder's name.
        MachineError: the Hub cannot be reached or refuses.
    """
    from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError, LocalTokenNotFoundError

    # The first base is the root of the client's own errors, whichever client this version of the library uses.
    client_error: Any = HfHubHTTPError.__bases__[0]
    failures = (client_error, LocalTokenNotFoundError, LocalEntryNotFoundError, ConnectionError)

    folders = [rel for rel in store.folders() if "/resume/" not in rel and store.has(rel)]
    if not folders:
        raise InputError("store", store.url, "holds no complete folder", "give the URL that a run was given")
    try:
        api.create_repo(repo, exist_ok=True)
        for rel in folders:
            progress(rel)
            _publish_folder(store, rel, repo, api)
        card = model_card(store, repo, folders)
        api.upload_file(
            path_or_fileobj=card.encode(), path_in_repo="README.md", repo_id=repo, commit_message="Model card"
        )
    except failures as e:
        reason = next(iter(str(e).splitlines()), type(e).__name__)
        raise MachineError("hub", repo, reason, "log in with `hf auth login`, or try again later") from e
    return folders


def _publish_folder(store: Store, rel: str, repo: str, api: HubApi) -> None:
    manifest = store.manifest(rel)
    assert manifest is not None
    if api.file_exists(repo, f"{rel}/{MANIFEST}"):
        there = parse_manifest(Path(api.hf_hub_download(repo, f"{rel}/{MANIFEST}")).read_bytes())
        if there is not None and there.files == manifest.files and there.fingerprint == manifest.fingerprint:
            return
        if there is not None and there.fingerprint != manifest.fingerprint:
            found = "; ".join(differences(manifest.model_dump(mode="json"), there)[:4])
            raise InputError("hub", f"{repo}/{rel}", f"holds another run ({found})", "use another repository")
    with tempfile.TemporaryDirectory() as scratch:
        local = store.fetch(rel, Path(scratch) / "folder")
        api.upload_folder(
            repo_id=repo, folder_path=str(local), path_in_repo=rel, commit_message=rel, delete_patterns="*"
        )


def model_card(store: Store, repo: str, folders: list[str]) -> str:
    """Return the README of the repository: what is in it, the findings, and how to load a checkpoint."""
    checkpoints = [rel for rel in folders if "/global_step_" in rel and "/scores/" not in rel]
    bases = sorted({MODELS[m].source for m in _models(store, checkpoints) if ":" not in MODELS[m].source})
    findings = [json.loads(store.read(f"{rel}/finding.json") or b"{}") for rel in folders if rel.startswith("reports/")]
    lines = ["---", "license: apache-2.0", "library_name: transformers", "tags: [grpo, code, learning-rate]"]
    lines += ["base_model:", *(f"- {b}" for b in bases)] if bases else []
    lines += ["---", "", f"# {repo.rpartition('/')[2]}", "", _ABOUT, ""]
    lines += [f"**{f['experiment']}**: {f['sentence']}\n" for f in findings if "sentence" in f]
    if checkpoints:
        lines += ["```python", "from transformers import AutoModelForCausalLM", ""]
        lines += [f'AutoModelForCausalLM.from_pretrained("{repo}", subfolder="{checkpoints[-1]}")', "```", ""]
    lines += ["| checkpoint |", "|---|", *(f"| `{rel}` |" for rel in checkpoints)]
    return "\n".join(lines) + "\n"


def _models(store: Store, checkpoints: list[str]) -> set[str]:
    manifests = [store.manifest(rel) for rel in checkpoints]
    return {m.cell_config["model"] for m in manifests if m is not None and m.cell_config}
