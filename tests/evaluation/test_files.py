"""Files and folders are whole or absent, whatever dies in between."""

import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from evaluation.errors import InputError
from evaluation.files import (
    PARTIAL,
    append_jsonl,
    read_jsonl,
    sha256_file,
    whole_folder,
    write_json,
    write_jsonl,
    write_text,
)
from evaluation.records import Record


class Row(Record):
    number: int = 1


def test_write_text_replaces_and_leaves_no_scrap(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "a.txt"
    write_text(path, "one")
    write_text(path, "zwei \u2028 \N{SNOWMAN}")
    assert path.read_text(encoding="utf-8") == "zwei \u2028 \N{SNOWMAN}"
    assert [p.name for p in path.parent.iterdir()] == ["a.txt"]


@pytest.mark.parametrize("write", [write_text, append_jsonl])
def test_a_full_disk_is_told_with_the_name_of_the_file(tmp_path: Path, write: Callable[..., None]) -> None:
    path = tmp_path / "a.txt"
    partial = tmp_path / f"a.txt.{os.getpid()}-{threading.get_ident()}{PARTIAL}"
    for link in (path, partial):
        link.symlink_to("/dev/full")
    with pytest.raises(OSError, match="No space left") as told:
        write(path, "x" if write is write_text else [Row()])
    assert told.value.filename == str(path)


def test_threads_writing_one_file_leave_one_whole_text(tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    texts = [str(i) * 200_000 for i in range(8)]
    threads = [threading.Thread(target=write_text, args=(path, t)) for t in texts for _ in range(3)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert path.read_text() in texts
    assert [p.name for p in tmp_path.iterdir()] == ["a.txt"]


def test_a_writer_killed_at_any_moment_leaves_the_old_text_or_the_new(tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    write_text(path, "old" * 1_000_000)
    code = (
        "import pathlib, sys\n"
        "from evaluation.files import write_text\n"
        "p, i = pathlib.Path(sys.argv[1]), 0\n"
        "print('ready', flush=True)\n"
        "while True:\n"
        "    write_text(p, ['new', 'old'][i % 2] * 1_000_000)\n"
        "    i += 1\n"
    )
    for _ in range(3):
        child = subprocess.Popen([sys.executable, "-c", code, str(path)], stdout=subprocess.PIPE)
        assert child.stdout is not None
        child.stdout.readline()
        threading.Event().wait(0.05)
        child.send_signal(signal.SIGKILL)
        child.wait()
        child.stdout.close()
        assert path.read_text() in {"old" * 1_000_000, "new" * 1_000_000}


@pytest.mark.parametrize("number", [float("nan"), float("inf")])
def test_non_finite_json_is_refused_before_the_file_is_touched(tmp_path: Path, number: float) -> None:
    path = tmp_path / "a.json"
    write_json(path, {"x": 1})
    with pytest.raises(ValueError):
        write_json(path, {"x": number})
    assert json.loads(path.read_text()) == {"x": 1}


def test_jsonl_reads_back_whatever_a_program_may_say(tmp_path: Path) -> None:
    rows = [{"t": t} for t in ("\r\n", "\u2028\u2029\x85", "\x00", "\ud800 lone", "\N{SNOWMAN}", '"\\', "")]
    write_jsonl(tmp_path / "a.jsonl", rows)
    assert read_jsonl(tmp_path / "a.jsonl") == rows


def test_a_last_line_cut_by_a_kill_is_left_out(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    whole = '{"a": "\N{SNOWMAN}"}\n'.encode()
    for cut in range(len(whole)):
        path.write_bytes(whole * 2 + whole[:cut])
        assert len(read_jsonl(path)) == 2


@pytest.mark.parametrize("line", [b"{", b"[1]", b"3", b"\xff\xfe", b'{"a": 1} {"b": 2}'])
def test_a_damaged_line_is_named(tmp_path: Path, line: bytes) -> None:
    path = tmp_path / "samples.jsonl"
    path.write_bytes(b'{"a": 1}\n\n' + line + b'\n{"a": 2}\n')
    with pytest.raises(InputError, match="line 3"):
        read_jsonl(path)


def test_whole_folder_appears_at_once_and_replaces(tmp_path: Path) -> None:
    target = tmp_path / "global_step_2"
    with whole_folder(target) as scratch:
        (scratch / "a").write_text("1")
        assert not target.exists()
    assert (target / "a").read_text() == "1"
    with whole_folder(target) as scratch:
        (scratch / "b").write_text("2")
    assert [p.name for p in target.iterdir()] == ["b"]
    assert [p.name for p in tmp_path.iterdir()] == ["global_step_2"]


def test_an_exception_leaves_the_folder_as_it_was(tmp_path: Path) -> None:
    target = tmp_path / "f"
    with whole_folder(target) as scratch:
        (scratch / "a").write_text("1")
    with pytest.raises(RuntimeError), whole_folder(target) as scratch:
        (scratch / "a").write_text("half")
        raise RuntimeError
    assert (target / "a").read_text() == "1"
    with whole_folder(target) as scratch:  # and the scraps of the failure are not in the way, nor taken over
        assert list(scratch.iterdir()) == []
        (scratch / "b").write_text("2")
    assert [p.name for p in target.iterdir()] == ["b"]
    assert not target.with_name("f" + PARTIAL).exists()


def test_sha256_file_streams_the_bytes(tmp_path: Path) -> None:
    path = tmp_path / "a"
    path.write_bytes(b"abc")
    # FIPS 180-2, appendix B.1
    assert sha256_file(path) == "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad"
