"""Children of the flow: how they end, what they inherit, and that none outlives its flow."""

import contextlib
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from evaluation.errors import InputError, MachineError, Stopped
from tasks import launch
from tasks.launch import ChildDied, ChildFailed, error_line, locked, on_device, run_child, run_to_end, some_gpus
from tasks.settings import Settings

ROOT = Path(__file__).resolve().parents[2]


def python(code):
    return [sys.executable, "-c", code]


def alive(pid):
    with contextlib.suppress(OSError):
        return " Z " not in Path(f"/proc/{pid}/stat").read_text()
    return False


def gone(pid, seconds=20):
    end = time.monotonic() + seconds
    while alive(pid) and time.monotonic() < end:
        time.sleep(0.05)
    return not alive(pid)


def read_pid(path, seconds=60):
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        if path.is_file() and path.read_text().endswith("\n"):
            return int(path.read_text())
        time.sleep(0.02)
    raise AssertionError(f"nobody wrote {path}")


@pytest.mark.parametrize(
    ("code", "expected"), [("pass", 0), ("raise SystemExit(3)", 3), ("import os; os.kill(os.getpid(), 9)", 137)]
)
def test_exit_codes_and_output(tmp_path, code, expected):
    log = tmp_path / "deep" / "log"
    assert run_child(python(f"print('said', flush=True); {code}"), log=log, tick_s=0.02) == expected
    assert log.read_text() == "said\n"


@pytest.mark.parametrize(
    ("line", "code", "kind"),
    [
        ("error: stride=0: too small; use 1", 2, InputError),
        ("error: gpu=none: no GPU; get one", 3, MachineError),
        ("error: units=1: no verdict; run it again", 1, ChildFailed),
    ],
)
def test_a_deterministic_failure_is_told_in_the_childs_words_and_not_tried_again(tmp_path, line, code, kind):
    ran = tmp_path / "ran"
    body = f"import sys; open({str(ran)!r}, 'a').write('x'); print({line!r}, file=sys.stderr); sys.exit({code})"
    with pytest.raises(kind) as caught:
        run_to_end(python(body), log=tmp_path / "log")
    assert str(caught.value) == line.removeprefix("error: ")
    assert ran.read_text() == "x"


@pytest.mark.parametrize("death", ["os.kill(os.getpid(), 9)", "sys.exit(70)", "sys.exit(75)"])
def test_a_lost_child_is_started_again_until_it_is_hopeless(tmp_path, death):
    ran = tmp_path / "ran"
    body = f"import os, sys; open({str(ran)!r}, 'a').write('x'); {death}"
    with pytest.raises(ChildDied) as caught:
        run_to_end(python(body), log=tmp_path / "log")
    assert ran.read_text() == "x" * launch.ATTEMPTS
    assert caught.value.exit_code == 70


def test_a_child_whose_time_is_up_is_not_started_again(tmp_path):
    ran = tmp_path / "ran"
    line = "end_by=reached: stopped after step 3 of 9; with time left, the same command goes on"
    body = f"import sys; open({str(ran)!r}, 'a').write('x'); print('error: {line}'); sys.exit(75)"
    with pytest.raises(Stopped) as caught:
        run_to_end(python(body), log=tmp_path / "log")
    assert str(caught.value) == line
    assert ran.read_text() == "x"


def test_a_child_that_lives_at_its_second_try_has_done_its_work(tmp_path):
    ran = tmp_path / "ran"
    body = f"import os; p = {str(ran)!r}; old = os.path.exists(p); open(p, 'a').close(); old or os.kill(os.getpid(), 9)"
    run_to_end(python(body), log=tmp_path / "log")


def test_an_error_line_of_an_earlier_run_is_not_this_ones(tmp_path):
    log = tmp_path / "log"
    log.write_text("error: old=1: x; y\nmore\n")
    assert error_line(log) == "old=1: x; y"
    assert error_line(log, log.stat().st_size) is None
    with pytest.raises(ChildFailed, match="child=1: failed; read"):
        run_to_end(python("raise SystemExit(1)"), log=log)


def test_stopping_gives_the_child_time_to_save_and_takes_its_children_along(tmp_path):
    saved, grandchild = tmp_path / "saved", tmp_path / "grandchild"
    body = (
        "import signal, subprocess, sys, time\n"
        f"p = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)'])\n"
        f"def save(*_): time.sleep(0.3); open({str(saved)!r}, 'w').close(); sys.exit(75)\n"
        "signal.signal(signal.SIGTERM, save)\n"
        f"open({str(grandchild)!r}, 'w').write(f'{{p.pid}}\\n')\n"
        "time.sleep(600)\n"
    )
    threading.Thread(target=lambda: (read_pid(grandchild), launch.STOPPING.set())).start()
    with pytest.raises(Stopped):
        run_child(python(body), log=tmp_path / "log", tick_s=0.02)
    assert saved.exists()
    assert gone(read_pid(grandchild))


def test_a_child_that_ignores_sigterm_is_killed_after_its_grace(tmp_path):
    ready = tmp_path / "ready"
    body = (
        "import os, signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
        f"open({str(ready)!r}, 'w').write(f'{{os.getpid()}}\\n'); time.sleep(600)"
    )

    def tick():
        if ready.exists():
            raise KeyError("whatever unwinds the frame")

    with pytest.raises(KeyError):
        run_child(python(body), log=tmp_path / "log", on_tick=tick, tick_s=0.02, grace_s=0.3)
    assert gone(read_pid(ready))


def test_a_killed_parent_takes_its_child_along(tmp_path):
    pid = tmp_path / "pid"
    child = f"import os, time; open({str(pid)!r}, 'w').write(f'{{os.getpid()}}\\n'); time.sleep(600)"
    parent = (
        "import sys; from pathlib import Path; from tasks.launch import run_child\n"
        f"run_child([sys.executable, '-c', {child!r}], log=Path({str(tmp_path / 'log')!r}))"
    )
    process = subprocess.Popen(python(parent), cwd=ROOT)
    found = read_pid(pid)
    assert alive(found)
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    assert gone(found)


def test_secrets_stay_with_the_flow(tmp_path, monkeypatch):
    for name in ("AWS_SECRET_ACCESS_KEY", "PREFECT_API_KEY", "GITHUB_TOKEN"):
        monkeypatch.setenv(name, "secret")
    monkeypatch.setenv("HF_ENDPOINT", "http://hub.example")
    out = tmp_path / "env"
    body = f"import os; open({str(out)!r}, 'w').write(repr(dict(os.environ)))"
    assert run_child(python(body), log=tmp_path / "log") == 0
    assert "secret" not in out.read_text()
    assert "http://hub.example" in out.read_text()
    assert "'OMP_NUM_THREADS': '1'" in out.read_text()


def test_a_lock_is_free_when_its_last_holder_ends(tmp_path):
    path = tmp_path / "cell.lock"
    with locked(path) as held:
        child = subprocess.Popen(python("import time; time.sleep(1.5)"), pass_fds=(held,))
    began = time.monotonic()
    with locked(path):
        assert time.monotonic() - began > 0.3
    child.wait()
    with locked(path), pytest.raises(InputError, match="another run is at work"), locked(path, patience_s=0.3):
        pass


def test_two_holders_get_two_gpus_and_a_third_waits(tmp_path):
    with some_gpus(("0", "1"), tmp_path) as (first, fds), some_gpus(("0", "1"), tmp_path) as (second, _):
        assert (first, second) == ({"CUDA_VISIBLE_DEVICES": "0"}, {"CUDA_VISIBLE_DEVICES": "1"})
        assert len(fds) == 1
        launch.STOPPING.set()
        with pytest.raises(Stopped), some_gpus(("0", "1"), tmp_path):
            pass
        launch.STOPPING.clear()
    with some_gpus(("1",), tmp_path) as (third, _):
        assert third == {"CUDA_VISIBLE_DEVICES": "1"}


def test_several_gpus_are_held_all_or_none(tmp_path):
    gpus = ("0", "1", "2", "3")
    with some_gpus(gpus, tmp_path) as (first, _), some_gpus(gpus, tmp_path, 2) as (second, fds):
        assert first == {"CUDA_VISIBLE_DEVICES": "0"}
        assert second == {"CUDA_VISIBLE_DEVICES": "1,2"}
        assert len(fds) == 2
        got = []

        def wait():
            with some_gpus(gpus, tmp_path, 2) as (third, _):
                got.append(third)

        waiting = threading.Thread(target=wait)
        waiting.start()
        time.sleep(0.7)  # it has looked, and has not kept the one that was free
        with some_gpus(gpus, tmp_path) as (fourth, _):
            assert fourth == {"CUDA_VISIBLE_DEVICES": "3"}
            assert got == []
    waiting.join(20)
    assert [len(g["CUDA_VISIBLE_DEVICES"].split(",")) for g in got] == [2]


def test_many_who_want_several_all_get_their_turn(tmp_path):
    gpus, busy, most, done = ("0", "1", "2"), [], [], []

    def work(count):
        for _ in range(3):
            with some_gpus(gpus, tmp_path, count) as (env, _):
                mine = env["CUDA_VISIBLE_DEVICES"].split(",")
                assert not set(mine) & set(busy)
                busy.extend(mine)
                most.append(len(busy))
                time.sleep(0.01)
                for gpu in mine:
                    busy.remove(gpu)
            done.append(count)

    threads = [threading.Thread(target=work, args=(n,)) for n in (1, 2, 2, 3)]
    for t in threads:
        t.start()
    for t in threads:
        t.join(60)
    assert sorted(done) == [1] * 3 + [2] * 6 + [3] * 3
    assert max(most) == 3


def test_more_gpus_than_there_are_can_never_be_held(tmp_path, monkeypatch):
    monkeypatch.setattr(launch, "settings", lambda: Settings(gpus=("0",), locks=tmp_path))
    line = "gpu=1: a cell takes 2 here; lower ABLATION_GPUS_PER_CELL"
    with pytest.raises(MachineError) as caught, on_device(True, 2):
        pass
    assert str(caught.value) == line
    with on_device(True) as (env, fds):
        assert (env, len(fds)) == ({"CUDA_VISIBLE_DEVICES": "0"}, 1)
    with on_device(False, 2) as held:
        assert held == ({}, ())
