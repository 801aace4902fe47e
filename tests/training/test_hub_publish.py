"""Publishing to the Hub: the store's layout, whole folders, once; a hand-made hub keeps what it is given."""

import fnmatch
import shutil
from pathlib import Path

import pytest

from evaluation.errors import InputError, MachineError
from evaluation.files import write_json
from evaluation.manifests import MANIFEST, Revisions, write_manifest
from training.cell import Cell, Identity
from training.hub import publish_store
from training.store import Store, open_store

CELL = Cell(model="qwen3_1p7b_base", benchmark="mbpp", arm="nobuf", lr=6e-6, steps=60, stride=30)
IDENTITY = Identity(cell_config=CELL, split_sha256="s", prompt_sha256="p", revisions=Revisions(model="m", datasets={}))


class FolderHub:
    """A hub that is a folder: commits are counted, downloads are paths."""

    def __init__(self, root: Path) -> None:
        self.root, self.commits = root, []

    def create_repo(self, repo_id: str, *, exist_ok: bool) -> None:
        (self.root / repo_id).mkdir(parents=True, exist_ok=exist_ok)

    def upload_folder(
        self, *, repo_id: str, folder_path: str, path_in_repo: str, commit_message: str, delete_patterns: str
    ) -> None:
        target = self.root / repo_id / path_in_repo
        for old in list(target.rglob("*")):
            if old.is_file() and fnmatch.fnmatch(old.name, delete_patterns):
                old.unlink()
        shutil.copytree(folder_path, target, dirs_exist_ok=True)
        self.commits.append(commit_message)

    def upload_file(self, *, path_or_fileobj: bytes, path_in_repo: str, repo_id: str, commit_message: str) -> None:
        (self.root / repo_id / path_in_repo).write_bytes(path_or_fileobj)

    def file_exists(self, repo_id: str, filename: str) -> bool:
        return (self.root / repo_id / filename).is_file()

    def hf_hub_download(self, repo_id: str, filename: str) -> str:
        return str(self.root / repo_id / filename)


def publish_made(store: Store, scratch: Path, rel: str, files: dict[str, str], identity: Identity = IDENTITY) -> None:
    shutil.rmtree(scratch, ignore_errors=True)
    scratch.mkdir()
    for file, text in files.items():
        (scratch / file).write_text(text)
    write_manifest(scratch, "checkpoint", identity.provenance(CELL.name, 30))
    store.publish(scratch, rel)


@pytest.fixture
def store(tmp_path: Path) -> Store:
    store = open_store(str(tmp_path / "store"))
    for rel in (f"{CELL.name}/global_step_30", f"{CELL.name}/resume/step_30", f"{CELL.name}/logs"):
        publish_made(store, tmp_path / "f", rel, {"a": rel})
    scratch = tmp_path / "report"
    scratch.mkdir()
    write_json(scratch / "finding.json", {"experiment": "full", "sentence": "Nothing broke."})
    write_manifest(scratch, "report", IDENTITY.provenance(None))
    store.publish(scratch, "reports/full")
    return store


def test_the_same_layout_without_resume_states_and_with_a_card(store: Store, tmp_path: Path) -> None:
    hub = FolderHub(tmp_path / "hub")
    folders = publish_store(store, "me/runs", hub, lambda rel: None)
    repo = tmp_path / "hub" / "me" / "runs"
    expected = {f"{CELL.name}/global_step_30", f"{CELL.name}/logs", "reports/full"}
    assert set(folders) == set(hub.commits) == expected
    assert {p.parent.relative_to(repo).as_posix() for p in repo.rglob(MANIFEST)} == expected
    card = (repo / "README.md").read_text()
    assert 'subfolder="qwen3_1p7b_base_mbpp_nobuf_lr6e6/global_step_30"' in card
    assert "- Qwen/Qwen3-1.7B-Base" in card and "Nothing broke." in card


def test_what_is_there_is_not_sent_again_and_what_changed_replaces(store: Store, tmp_path: Path) -> None:
    hub = FolderHub(tmp_path / "hub")
    publish_store(store, "me/runs", hub, lambda rel: None)
    hub.commits.clear()
    publish_store(store, "me/runs", hub, lambda rel: None)
    assert hub.commits == []
    publish_made(store, tmp_path / "f", f"{CELL.name}/global_step_30", {"b": "new"})
    publish_store(store, "me/runs", hub, lambda rel: None)
    assert hub.commits == [f"{CELL.name}/global_step_30"]
    found = tmp_path / "hub" / "me" / "runs" / CELL.name / "global_step_30"
    assert {p.name for p in found.iterdir()} == {"b", MANIFEST}


def test_another_run_on_the_hub_is_refused(store: Store, tmp_path: Path) -> None:
    hub = FolderHub(tmp_path / "hub")
    publish_store(store, "me/runs", hub, lambda rel: None)
    other = open_store(str(tmp_path / "other"))
    publish_made(
        other, tmp_path / "f", f"{CELL.name}/global_step_30", {"a": "x"}, IDENTITY.replace(split_sha256="other")
    )
    with pytest.raises(InputError, match="split_sha256: other -> s"):
        publish_store(other, "me/runs", hub, lambda rel: None)


def test_an_empty_store_and_an_unreachable_hub_are_told_apart(store: Store, tmp_path: Path) -> None:
    class Down(FolderHub):
        def create_repo(self, repo_id: str, *, exist_ok: bool) -> None:
            raise ConnectionError("no route")

    with pytest.raises(InputError, match="no complete folder"):
        publish_store(open_store(str(tmp_path / "none")), "me/runs", Down(tmp_path), lambda rel: None)
    with pytest.raises(MachineError, match="no route"):
        publish_store(store, "me/runs", Down(tmp_path), lambda rel: None)
