"""The budget of an experiment: wall time counted over attempts, and cells that do not begin once it is spent."""

import errno
import json
import os
import signal
import subprocess
import sys
import time

import pytest

from evaluation.errors import IncompleteError, InputError
from evaluation.files import write_json
from tasks.cells import runtime_of, train
from tasks.clock import Clock
from tasks.progress import Board


def test_time_within_counts_and_attempts_add_up(tmp_path):
    path = tmp_path / "wall.json"
    for _ in range(2):
        with Clock(path, 10) as clock:
            time.sleep(0.3)
        assert not clock.spent
        time.sleep(0.3)  # between the attempts nothing counts
    seconds = json.loads(path.read_text())["seconds"]
    assert seconds == pytest.approx(60 * clock.minutes, abs=0.01)
    assert 0.6 <= seconds < 0.9
    assert Clock(path, 10).end_by == pytest.approx(time.time() + 600 - seconds, abs=1)


def test_a_spent_budget_ends_at_once_and_none_never_does(tmp_path):
    path = tmp_path / "wall.json"
    path.write_text('{"schema": "wall/1", "seconds": 601}')
    assert Clock(path, 10).spent and not Clock(path, 11).spent
    assert Clock(path, None).end_by is None and not Clock(path, None).spent


def test_a_kill_loses_seconds_only(tmp_path):
    path = tmp_path / "wall.json"
    code = (
        "import time; from pathlib import Path; from tasks.clock import Clock\n"
        f"with Clock(Path({str(path)!r}), 1):\n    print(flush=True); time.sleep(60)"
    )
    child = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE)
    assert child.stdout is not None and child.stdout.readline()
    end = time.monotonic() + 30
    while _seconds(path) < 1 and time.monotonic() < end:
        time.sleep(0.05)
    os.kill(child.pid, signal.SIGKILL)
    child.wait()
    child.stdout.close()
    assert 1 < _seconds(path) < 30


def _seconds(path):
    return json.loads(path.read_text())["seconds"] if path.exists() else 0.0


def test_a_disk_that_fills_up_stops_no_clock_and_one_that_is_full_is_told_at_once(tmp_path, monkeypatch):
    def full(path, value):
        if broken:
            raise OSError(errno.ENOSPC, "No space left on device", str(path))
        write_json(path, value)

    path, broken = tmp_path / "wall.json", False
    monkeypatch.setattr("tasks.clock.EVERY_S", 0.02)
    monkeypatch.setattr("tasks.clock.write_json", full)
    with Clock(path, 10) as clock:
        broken = True
        time.sleep(0.2)
        assert clock.thread.is_alive()
        broken = False
        time.sleep(0.2)
    assert _seconds(path) == pytest.approx(60 * clock.minutes, abs=0.01)
    broken = True
    with pytest.raises(OSError, match="No space left"), Clock(path, 10):
        raise AssertionError("went on")


def test_a_damaged_note_is_named(tmp_path):
    (tmp_path / "wall.json").write_text('{"seconds": "many"}')
    with pytest.raises(InputError, match="no note of the time spent"):
        Clock(tmp_path / "wall.json", 1)


def test_no_cell_begins_after_the_end_and_one_that_trains_knows_it(make_work, monkeypatch):
    from dataclasses import replace

    work = make_work()
    late = replace(work, end_by=time.time() - 1)
    with pytest.raises(IncompleteError, match="spent before"):
        train(late, late.cells[0], Board(quiet=True))
    assert not (late.folder(late.cells[0]).root / "train.log").exists()
    soon = replace(work, end_by=123.0)
    assert runtime_of(soon, soon.cells[0]).end_by == 123.0 and runtime_of(work, work.cells[0]).end_by is None
    monkeypatch.setenv("ABLATION_WALL_TIME_S", "60")
    assert runtime_of(soon, soon.cells[0]).end_by == 123.0
