"""The store: complete folders or none, whatever dies, is stale, or belongs to somebody else."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from evaluation.errors import InputError, MachineError
from evaluation.files import write_json
from evaluation.manifests import MANIFEST, Provenance, Revisions, is_complete, write_manifest
from training.cell import Cell, Identity
from training.store import Store, open_store

CELL = Cell(model="toy", benchmark="toy", arm="nobuf", lr=3e-4, steps=4, stride=2)
IDENTITY = Identity(
    cell_config=CELL, split_sha256="s", prompt_sha256="p", revisions=Revisions(model="m", datasets={"toy": "d"})
)
OTHER = IDENTITY.replace(cell_config=CELL.replace(lr=1e-3))
REL = f"{CELL.name}/global_step_2"


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return open_store(str(tmp_path / "store"))


def made(folder: Path, files: dict[str, str], identity: Identity = IDENTITY, kind: str = "checkpoint") -> Path:
    """Make a whole local folder with these files."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    for name, text in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    write_manifest(folder, kind, identity.provenance(CELL.name, 2))
    return folder


def root(store: Store) -> Path:
    """The directory behind a file:// store."""
    return Path(store.url.removeprefix("file://"))


FILES = {"config.json": "{}", "model.safetensors": "weights", "sub/tokenizer.json": "[]"}


def test_publish_and_fetch_bring_the_same_bytes(store: Store, tmp_path: Path) -> None:
    local = made(tmp_path / "f", FILES)
    assert not store.has(REL)
    assert store.publish(local, REL) is True
    assert store.has(REL)
    back = store.fetch(REL, tmp_path / "back")
    assert {p.relative_to(back).as_posix(): p.read_text() for p in back.rglob("*") if p.is_file()} == {
        p.relative_to(local).as_posix(): p.read_text() for p in local.rglob("*") if p.is_file()
    }
    assert is_complete(back)


@pytest.mark.parametrize("suffix", ["", "/"])
def test_publishing_twice_changes_nothing_and_nests_nothing(store: Store, tmp_path: Path, suffix: str) -> None:
    """UPLOAD-104, UPLOAD-105: the second recursive put of s3fs nests the folder; a slash changes the layout."""
    local = made(tmp_path / "f", FILES)
    store.publish(Path(f"{local}{suffix}"), REL)
    before = {p: p.stat().st_mtime_ns for p in root(store).rglob("*")}
    assert store.publish(Path(f"{local}{suffix}"), REL) is False
    assert {p: p.stat().st_mtime_ns for p in root(store).rglob("*")} == before
    assert store.backend.list(REL).keys() == {*FILES, MANIFEST}


def test_files_of_an_earlier_upload_do_not_stay(store: Store, tmp_path: Path) -> None:
    """UPLOAD-108: shards and their index, then a single-file save under the same name."""
    store.publish(made(tmp_path / "a", {"m-1": "1", "m-2": "2", "index.json": "{}"}), REL)
    store.publish(made(tmp_path / "b", {"model.safetensors": "w"}), REL)
    assert store.backend.list(REL).keys() == {"model.safetensors", MANIFEST}
    assert store.verify().ok


def test_stale_files_of_an_earlier_fetch_do_not_stay_either(store: Store, tmp_path: Path) -> None:
    store.publish(made(tmp_path / "a", {"m-1": "1", "index.json": "{}"}), REL)
    local = store.fetch(REL, tmp_path / "cache")
    store.publish(made(tmp_path / "b", {"model.safetensors": "w"}), REL)
    store.fetch(REL, local)
    assert {p.name for p in local.iterdir()} == {"model.safetensors", MANIFEST}


def test_fetching_over_a_person_s_files_is_refused(store: Store, tmp_path: Path) -> None:
    store.publish(made(tmp_path / "a", FILES), REL)
    mine = tmp_path / "home"
    mine.mkdir()
    (mine / "thesis.tex").write_text("years of work")
    with pytest.raises(InputError, match=r"thesis\.tex"):
        store.fetch(REL, mine)
    assert (mine / "thesis.tex").read_text() == "years of work"


def test_step_30_is_not_step_300(store: Store, tmp_path: Path) -> None:
    """UPLOAD-109: a raw prefix listing confuses them."""
    store.publish(made(tmp_path / "f", FILES), f"{CELL.name}/global_step_300")
    assert not store.has(f"{CELL.name}/global_step_30")
    assert store.backend.list(f"{CELL.name}/global_step_30") == {}
    assert store.numbered(CELL.name, "global_step_") == [300]
    store.publish(made(tmp_path / "g", {"x": "y"}), f"{CELL.name}/global_step_30")
    assert store.backend.list(f"{CELL.name}/global_step_300").keys() == {*FILES, MANIFEST}


def test_steps_are_ordered_by_number_not_text_or_time(store: Store, tmp_path: Path) -> None:
    """CHECKPOINT-089."""
    local = made(tmp_path / "f", {"x": "y"})
    for step in (1000, 30, 120, 90, 300, 60):
        store.publish(local, f"{CELL.name}/global_step_{step}")
    for odd in ("global_step_030", "global_step_-1", "global_step_30.partial", "global_step_x", "global_step_"):
        shutil.copytree(local, root(store) / CELL.name / odd)
    shutil.copytree(local, root(store) / CELL.name / "global_step_150")
    (root(store) / CELL.name / "global_step_150" / MANIFEST).unlink()
    assert store.numbered(CELL.name, "global_step_") == [30, 60, 90, 120, 300, 1000]
    assert store.numbered("nobody", "global_step_") == []


def test_a_folder_of_another_run_is_refused_with_the_difference_and_not_touched(store: Store, tmp_path: Path) -> None:
    """CHECKPOINT-090: run A's folders stay what they are."""
    store.publish(made(tmp_path / "a", FILES), REL)
    before = {p: p.read_bytes() for p in root(store).rglob("*") if p.is_file()}
    with pytest.raises(InputError, match=r"cell_config\.lr: 0\.001 -> 0\.0003"):
        store.publish(made(tmp_path / "b", {"other": "weights"}, OTHER), REL)
    with pytest.raises(InputError, match=r"cell_config\.lr: 0\.001 -> 0\.0003"):
        store.refuse_other(REL, OTHER)
    assert {p: p.read_bytes() for p in root(store).rglob("*") if p.is_file()} == before
    store.refuse_other(REL, IDENTITY)
    store.refuse_other(f"{CELL.name}/global_step_4", OTHER)


def test_another_run_s_folder_is_refused_even_when_it_is_damaged(store: Store, tmp_path: Path) -> None:
    store.publish(made(tmp_path / "a", FILES), REL)
    (root(store) / REL / "config.json").unlink()
    assert not store.has(REL)
    with pytest.raises(InputError):
        store.publish(made(tmp_path / "b", FILES, OTHER), REL)
    with pytest.raises(InputError):
        store.refuse_other(REL, OTHER)
    assert store.publish(made(tmp_path / "c", FILES), REL) is True  # its own run mends it
    assert store.has(REL)


def test_a_local_folder_that_is_not_whole_is_never_published(store: Store, tmp_path: Path) -> None:
    local = made(tmp_path / "f", FILES)
    (local / "late.txt").write_text("written after the manifest")
    with pytest.raises(ValueError, match="not a whole folder"):
        store.publish(local, REL)
    (local / "late.txt").unlink()
    (local / MANIFEST).unlink()
    with pytest.raises(ValueError, match="not a whole folder"):
        store.publish(local, REL)
    assert store.backend.list("") == {}


def test_bytes_that_changed_under_an_unchanged_size_are_not_passed_on(store: Store, tmp_path: Path) -> None:
    local = made(tmp_path / "f", FILES)
    (local / "model.safetensors").write_text("wEights")
    with pytest.raises(ValueError, match="safetensors has other bytes than its manifest says"):
        store.publish(local, REL)
    assert not store.has(REL)


def test_linked_files_are_published_by_content(store: Store, tmp_path: Path) -> None:
    """UPLOAD-110."""
    blob = tmp_path / "blob"
    blob.write_text("weights")
    local = tmp_path / "f"
    local.mkdir()
    (local / "model.safetensors").symlink_to(blob)
    write_manifest(local, "checkpoint", Provenance())
    store.publish(local, REL)
    stored = root(store) / REL / "model.safetensors"
    assert stored.read_text() == "weights" and not stored.is_symlink()


KILLED = """
import os, sys
from pathlib import Path
from training import backends
from training.store import open_store
url, local, rel, after = sys.argv[1:]
real, count = backends.LocalBackend.put, int(after)
def put(self, source, key):
    global count
    if count == 0:
        target = self.root / (key + ".partial")
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes(source.read_bytes()[:1])
        os.kill(os.getpid(), 9)
    count -= 1
    real(self, source, key)
backends.LocalBackend.put = put
open_store(url).publish(Path(local), rel)
"""


@pytest.mark.parametrize("after", range(4))
def test_a_publisher_killed_before_any_file_leaves_no_complete_folder_and_is_resumed(
    store: Store, tmp_path: Path, after: int
) -> None:
    local = made(tmp_path / "f", FILES)
    child = subprocess.run([sys.executable, "-c", KILLED, store.url, str(local), REL, str(after)], check=False)
    assert child.returncode == -9
    assert not store.has(REL)
    assert store.numbered(CELL.name, "global_step_") == []
    with pytest.raises(FileNotFoundError):
        store.fetch(REL, tmp_path / "back")
    assert store.publish(local, REL) is True
    assert store.has(REL)
    assert store.verify().ok


@pytest.mark.parametrize("after", range(4))
def test_a_kill_while_replacing_never_leaves_a_mixture_that_looks_complete(
    store: Store, tmp_path: Path, after: int
) -> None:
    """Old and new files have the same names and sizes: only the order of the steps protects a reader."""
    store.publish(made(tmp_path / "old", FILES), REL)
    local = made(tmp_path / "new", {"config.json": "[]", "model.safetensors": "WEIGHTS", "sub/tokenizer.json": "{}"})
    child = subprocess.run([sys.executable, "-c", KILLED, store.url, str(local), REL, str(after)], check=False)
    if child.returncode == 0:  # fewer files to send than `after`: it was done before the kill
        assert store.verify().ok
        return
    assert not store.has(REL)


def test_verify_names_each_kind_of_fault(store: Store, tmp_path: Path) -> None:
    local = made(tmp_path / "f", {"a": "aa", "b": "bb", "c": "cc"})
    for step in (2, 4, 6, 8, 10, 12):
        store.publish(local, f"{CELL.name}/global_step_{step}")
    top = root(store) / CELL.name
    (top / "global_step_2" / "a").unlink()
    (top / "global_step_4" / "new").write_text("?")
    (top / "global_step_6" / "b").write_text("bB")
    (top / "global_step_8" / "c").write_text("ccc")
    (top / "global_step_10" / MANIFEST).unlink()
    (top / "global_step_12" / MANIFEST).write_text("{")
    found = store.verify()
    assert not found.ok and found.folders == 6
    assert {(p.path.removeprefix(CELL.name + "/"), p.kind) for p in found.problems} == {
        ("global_step_2/a", "missing"),
        ("global_step_4/new", "extra"),
        ("global_step_6/b", "hash"),
        ("global_step_8/c", "size"),
        ("global_step_10", "no_manifest"),
        ("global_step_12", "no_manifest"),
    }


def test_verify_looks_into_every_kind_of_folder(store: Store, tmp_path: Path) -> None:
    local = made(tmp_path / "f", {"a": "aa"})
    kinds = [
        f"{CELL.name}/global_step_2",
        f"{CELL.name}/resume/step_2",
        f"{CELL.name}/logs",
        f"{CELL.name}/rollouts",
        f"{CELL.name}/scores/toy_plus-12345678/global_step_2",
        "toy/scores/toy_plus-12345678/global_step_0",
        "reports/micro",
    ]
    for rel in kinds:
        store.publish(local, rel)
    assert store.verify().folders == len(kinds)
    for rel in kinds:
        (root(store) / rel / "a").write_text("ab")
    assert sorted(p.path for p in store.verify().problems) == sorted(f"{rel}/a" for rel in kinds)


def test_open_logs_and_rollouts_are_no_fault_until_the_cell_has_ended(store: Store, tmp_path: Path) -> None:
    row = tmp_path / "steps.jsonl"
    row.write_text("{}\n")
    store.publish_file(row, f"{CELL.name}/logs/steps.jsonl")
    store.publish_file(row, f"{CELL.name}/rollouts/step_000001.parquet")
    assert store.verify().ok
    store.publish(made(tmp_path / "logs", {"steps.jsonl": "{}\n"}, kind="logs"), f"{CELL.name}/logs")
    assert [(p.path, p.kind) for p in store.verify().problems] == [(f"{CELL.name}/rollouts", "no_manifest")]


def test_a_corrupted_byte_is_refused_at_fetch(store: Store, tmp_path: Path) -> None:
    store.publish(made(tmp_path / "f", FILES), REL)
    (root(store) / REL / "model.safetensors").write_text("weighTs")
    with pytest.raises(OSError, match="hash differs"):
        store.fetch(REL, tmp_path / "back")
    assert not is_complete(tmp_path / "back")


def test_a_fetch_mends_what_is_damaged_locally(store: Store, tmp_path: Path) -> None:
    store.publish(made(tmp_path / "f", FILES), REL)
    back = store.fetch(REL, tmp_path / "back")
    (back / "config.json").write_text("[]")
    assert (store.fetch(REL, back) / "config.json").read_text() == "{}"


def test_a_manifest_that_points_outside_is_not_followed(store: Store, tmp_path: Path) -> None:
    store.publish(made(tmp_path / "f", {"a": "aa"}), REL)
    path = root(store) / REL / MANIFEST
    path.write_text(path.read_text().replace('"path": "a"', '"path": "../../../a"'))
    assert not store.has(REL)
    with pytest.raises(FileNotFoundError):
        store.fetch(REL, tmp_path / "deep" / "back")
    assert not (tmp_path / "a").exists()


@pytest.mark.parametrize("where", ["/proc/ablation", "{tmp}/file/store"])
def test_a_store_that_cannot_be_written_is_this_machine_s_lack(tmp_path: Path, where: str) -> None:
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(MachineError, match="cannot be written"):
        open_store(where.format(tmp=tmp_path)).check_writable()


def test_a_writable_store_is_left_as_it_was(store: Store) -> None:
    store.check_writable()
    assert store.backend.list("") == {}


@pytest.mark.parametrize("name", ["plain", "with space", "per%20cent", "hash#mark", "quest?ion", "\N{SNOWMAN}"])
def test_paths_and_urls_name_one_place(tmp_path: Path, name: str) -> None:
    store = open_store(str(tmp_path / name))
    assert store.url.startswith("file:///")
    (tmp_path / "a").write_text("a")
    store.publish_file(tmp_path / "a", "x/a")
    assert (tmp_path / name / "x" / "a").read_text() == "a"
    assert open_store(store.url).read("x/a") == b"a"
    assert open_store(store.url).url == store.url


@pytest.mark.parametrize("url", ["", "ftp://host/x", "file://relative/path", "file://"])
def test_other_urls_are_refused(url: str) -> None:
    with pytest.raises(InputError):
        open_store(url)


def test_reading_says_none_where_there_is_nothing(store: Store, tmp_path: Path) -> None:
    assert store.read("reports/micro/finding.json") is None
    write_json(tmp_path / "finding.json", {"a": 1})
    store.publish_file(tmp_path / "finding.json", "reports/micro/finding.json")
    assert store.read("reports/micro/finding.json") == b'{\n "a": 1\n}\n'
    assert store.read("reports/micro") is None
