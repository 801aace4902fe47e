"""A folder with a manifest is whole; anything else is not, and nothing crashes on the way to that word."""

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from evaluation import manifests
from evaluation.errors import InputError
from evaluation.files import sha256_file
from evaluation.manifests import (
    MANIFEST,
    FileEntry,
    Provenance,
    is_complete,
    list_files,
    read_manifest,
    versions,
    write_manifest,
)


def whole(folder: Path) -> Path:
    (folder / "sub").mkdir(parents=True)
    (folder / "b.bin").write_bytes(b"\x00\x01")
    (folder / "a.txt").write_text("a")
    (folder / "sub" / "c.txt").write_text("ccc")
    write_manifest(folder, "checkpoint", Provenance(cell="x", global_step=2))
    return folder


def test_manifest_lists_every_file_ascending_without_itself(tmp_path: Path) -> None:
    manifest = read_manifest(whole(tmp_path / "f"))
    assert manifest is not None
    assert [(f.path, f.size_bytes) for f in manifest.files] == [("a.txt", 1), ("b.bin", 2), ("sub/c.txt", 3)]
    assert all(f.sha256 == sha256_file(tmp_path / "f" / f.path) for f in manifest.files)
    assert manifest.versions["trl"] and manifest.split_sha256 is None
    assert '"schema": "manifest/1"' in (tmp_path / "f" / MANIFEST).read_text()


def test_a_folder_is_whole_only_while_names_and_sizes_agree(tmp_path: Path) -> None:
    folder = whole(tmp_path / "f")
    assert is_complete(folder)
    (folder / "new").write_text("")
    assert not is_complete(folder)
    (folder / "new").unlink()
    assert is_complete(folder)
    (folder / "b.bin").write_bytes(b"")
    assert not is_complete(folder)
    (folder / "b.bin").unlink()
    assert not is_complete(folder)


def test_half_written_names_do_not_count(tmp_path: Path) -> None:
    folder = whole(tmp_path / "f")
    (folder / "x.123.partial").write_text("half")
    (folder / "y.partial").mkdir()
    (folder / "y.partial" / "inside").write_text("half")
    assert is_complete(folder)


@pytest.mark.parametrize("text", ["", "{", "[]", "null", '{"schema": "manifest/2"}', "\x00" * 40])
def test_a_damaged_manifest_vouches_for_nothing(tmp_path: Path, text: str) -> None:
    folder = whole(tmp_path / "f")
    (folder / MANIFEST).write_text(text)
    assert read_manifest(folder) is None
    assert not is_complete(folder)


def test_a_nested_manifest_is_a_file_like_any_other(tmp_path: Path) -> None:
    folder = tmp_path / "f"
    whole(folder / "inner")
    manifest = write_manifest(folder, "report", Provenance())
    assert "inner/MANIFEST.json" in {f.path for f in manifest.files}
    assert is_complete(folder)


def test_linked_files_are_listed_by_content_linked_folders_and_broken_links_refused(tmp_path: Path) -> None:
    """UPLOAD-110: hub caches are made of links; a linked folder must not be dropped without a word."""
    outside = whole(tmp_path / "outside")
    folder = tmp_path / "f"
    folder.mkdir()
    (folder / "weights").symlink_to(outside / "sub" / "c.txt")
    manifest = write_manifest(folder, "checkpoint", Provenance())
    assert [(f.path, f.size_bytes) for f in manifest.files] == [("weights", 3)]
    (folder / "linked").symlink_to(outside)
    with pytest.raises(InputError, match="linked"):
        list(list_files(folder))
    (folder / "linked").unlink()
    (folder / "gone").symlink_to(tmp_path / "nowhere")
    with pytest.raises(InputError, match="gone"):
        write_manifest(folder, "checkpoint", Provenance())


@pytest.mark.parametrize("path", ["", "/etc/passwd", "../x", "a/../../x", "a//b", "./a", "a\\..\\b", ".."])
def test_paths_that_lead_out_of_the_folder_are_refused(path: str) -> None:
    with pytest.raises(ValidationError, match="leads out"):
        FileEntry(path=path, sha256="0" * 64, size_bytes=0)


@given(st.lists(st.from_regex(r"[a-zA-Z0-9_.-]{1,8}", fullmatch=True), min_size=1, max_size=4))
def test_ordinary_relative_paths_are_accepted(parts: list[str]) -> None:
    if not {".", ".."} & set(parts):
        assert FileEntry(path="/".join(parts), sha256="0" * 64, size_bytes=0).path == "/".join(parts)


def test_versions_names_the_python_and_the_trainer() -> None:
    assert {"python", "torch", "trl", "evalplus"} <= versions().keys()


@pytest.mark.parametrize(("note", "commit"), [(None, None), ("", None), ("f" * 40 + "\n", "f" * 40)])
def test_an_image_records_the_commit_that_it_was_built_from(tmp_path, note, commit):
    if note is not None:
        (tmp_path / ".git_commit").write_text(note)
    assert manifests._commit_of_image(tmp_path / ".git_commit") == commit
