"""Whatever dies, at any moment, on a real server: the same end, reached by itself or by one rerun.

`ABLATION_TEST_KILLS` is the number of random kills (30 by default).
"""

import contextlib
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from conftest import ROOT
from faulty_s3 import Endpoint, FaultyProxy, settings
from live_server import Live, flow_of, pids_of

pytestmark = [pytest.mark.prefect, pytest.mark.campaign]

FOLDERS = 2 * (2 + 2 + 2 + 2) + 1 + 1
VICTIMS = ("flow", "worker", "trainer", "evaluator", "server", "flow while it uploads")
KILLS = int(os.environ.get("ABLATION_TEST_KILLS", "30"))
PATIENCE_S = 900
AWAY_S = 60.0
HOST = "TESTS_HOST"
"""In the environment of a host's workers: its folder."""


@pytest.fixture(scope="module")
def live(tmp_path_factory):
    live = Live(tmp_path_factory.mktemp("home"))
    yield live
    live.close()


def answers(store):
    """What a run has found, but for times: each score's counts, each checkpoint's bytes, the finding."""
    found = {}
    for path in sorted(store.rglob("score.json")):
        found[path.relative_to(store).as_posix()] = json.loads(path.read_text())["problems"]
    for path in sorted(store.glob("*/global_step_*/MANIFEST.json")):
        found[path.relative_to(store).as_posix()] = [f["sha256"] for f in json.loads(path.read_text())["files"]]
    finding = json.loads((store / "reports/micro/finding.json").read_text())
    return {**found, "finding": {k: v for k, v in finding.items() if k != "departures"}}


def check(store, undisturbed):
    from training.store import open_store

    found = open_store(str(store)).verify()
    assert (found.ok, found.folders) == (True, FOLDERS), found
    assert answers(store) == undisturbed


@pytest.fixture(scope="module")
def undisturbed(live, tmp_path_factory):
    """Answers of a run that nothing happened to, and the seconds that it ran."""
    runs = tmp_path_factory.mktemp("undisturbed") / "runs"
    end = live.end_of(live.start_run(runs=str(runs)), PATIENCE_S)
    assert end["state_type"] == "COMPLETED", end["state"]
    return answers(runs / "store"), end["total_run_time"]


def kill(live, chance, victim, run, flow, runs):
    """Kill a part of a run that goes on, if it is there; say what was killed."""
    if victim in {"server", "worker"}:
        if _over(live, run):
            return None
        (live.kill_server if victim == "server" else live.kill_worker)()
        (live.start_server if victim == "server" else live.start_worker)()
        return victim
    words = {"trainer": "training.run", "evaluator": chance.choice(("draw", "judge"))}
    pid = next(iter(pids_of(words[victim], runs)), None) if victim in words else flow
    with contextlib.suppress(ProcessLookupError):
        if pid is not None:
            os.kill(pid, signal.SIGKILL)
            return None if _over(live, run) else victim  # a flow's process outlives its Completed by seconds
    return None


def run_and_kill(live, chance, victim, runs, seconds, wait_for):
    """Start a run and kill a part of it at a random moment; return its id, or None if it was over by then."""
    run = live.start_run(runs=str(runs))
    flow = wait_for(lambda: flow_of(run), PATIENCE_S, "the flow's process", 0.05)
    if victim == "flow while it uploads":
        cell = chance.choice(("toy_toy_hardcd_lam0p1_lr3e4", "toy_toy_nobuf_lr3e4"))
        begun = runs / "store" / cell / f"global_step_{chance.choice((2, 4))}"
        wait_for(begun.exists, PATIENCE_S, "an upload", 0.002)
        time.sleep(chance.uniform(0, 0.03))
    else:
        time.sleep(chance.uniform(0, seconds))
    done = wait_for(lambda: kill(live, chance, victim, run, flow, runs) or _over(live, run), PATIENCE_S, victim, 0.05)
    return run if done == victim else None


@pytest.mark.parametrize("number", range(KILLS))
def test_killed_at_a_random_moment(live, undisturbed, tmp_path, wait_for, record_property, number):
    chance, victim = random.Random(number), VICTIMS[number % len(VICTIMS)]
    for missed in range(5):
        runs = tmp_path / f"runs{missed}"
        seconds = 0.9 * undisturbed[1] / 2**missed  # other work on the machine may have made that run a long one
        if run := run_and_kill(live, chance, victim, runs, seconds, wait_for):
            break
    assert run, "every kill came too late"
    end, reruns = end_of(live, run, runs)
    record_property("figures", f"{victim}: {reruns} reruns, {end['run_count']} starts")
    check(runs / "store", undisturbed[0])
    shutil.rmtree(tmp_path)


def end_of(live, run, runs):
    """Wait for the end of a run, or of one rerun of what stays unfinished; return the run, and how many reruns."""
    end, reruns = live.end_of(run, PATIENCE_S), 0
    if end["state_type"] != "COMPLETED":
        end, reruns = live.end_of(live.start_run(runs=str(runs)), PATIENCE_S), 1
    assert end["state_type"] == "COMPLETED", end["state"]
    return end, reruns


def _over(live, run):
    return live.ask(f"/flow_runs/{run}")["state_type"] == "COMPLETED"


@pytest.mark.parametrize("what", ["server down", "SQLite locked"])
def test_the_server_is_away_for_a_minute(live, undisturbed, tmp_path, wait_for, record_property, what):
    runs = tmp_path / "runs"
    run = live.start_run(runs=str(runs))
    wait_for(lambda: pids_of("training.run", runs), PATIENCE_S, "a trainer", 0.05)
    if what == "server down":
        live.kill_server()
        time.sleep(AWAY_S)
        live.start_server()
    else:
        with live.locked_database():
            time.sleep(AWAY_S)
    end, reruns = end_of(live, run, runs)
    record_property("figures", f"{reruns} reruns, {end['run_count']} starts")
    check(runs / "store", undisturbed[0])
    for log in runs.glob("*/train.log"):  # it trained on: no step was taken twice
        assert [log.read_text().count(f"step {s} of 4:") for s in range(1, 5)] == [1, 1, 1, 1]


def test_the_store_is_away_for_a_minute(live, undisturbed, tmp_path, wait_for, monkeypatch):
    endpoint = Endpoint(tmp_path / "s3.log")
    proxy = FaultyProxy(endpoint)
    for name, value in settings(proxy.url).items():
        monkeypatch.setenv(name, value)
    from training.s3 import S3Backend

    runs, log = tmp_path / "runs", tmp_path / "log"
    argv = ("flows.cli", "run", "micro", "--runs", str(runs), "--store", "s3://micro-bucket/x", "--json")
    try:
        S3Backend("micro-bucket").fs.mkdir("micro-bucket")
        flow = live.server.start(*argv, log=log, **settings(proxy.url))
        wait_for(lambda: pids_of("training.run", runs), PATIENCE_S, "a trainer", 0.05)
        proxy.down = True
        time.sleep(AWAY_S)
        assert flow.poll() is None, log.read_text()
        proxy.down = False
        assert flow.wait(PATIENCE_S) == 0, log.read_text()
        for train in runs.glob("*/train.log"):
            assert [train.read_text().count(f"step {s} of 4:") for s in range(1, 5)] == [1, 1, 1, 1]
        S3Backend("micro-bucket").fs.get("micro-bucket/x", str(tmp_path / "store"), recursive=True)
        check(tmp_path / "store", undisturbed[0])
    finally:
        proxy.close()
        endpoint.close()


@pytest.mark.skipif(os.geteuid() != 0, reason="mounts a small disk")
def test_a_full_disk_stops_it_with_one_line_and_more_room_lets_it_go_on(live, undisturbed, tmp_path):
    disk = tmp_path / "disk"
    disk.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=12m", "tmpfs", disk], check=False).returncode:
        pytest.skip("no disk can be mounted here")
    try:
        argv = ("flows.cli", "run", "micro", "--runs", str(disk / "runs"))
        full = live.server.run(*argv, timeout=PATIENCE_S)
        assert full.returncode == 3, full.stdout + full.stderr
        last = full.stderr.strip().splitlines()[-1]
        assert last.startswith("error: ") and "space" in last.lower()
        assert "Traceback" not in full.stderr
        subprocess.run(["mount", "-o", "remount,size=500m", disk], check=True)
        done = live.server.run(*argv, timeout=PATIENCE_S)
        assert done.returncode == 0, done.stderr
        check(disk / "runs/store", undisturbed[0])
    finally:
        subprocess.run(["umount", "-l", disk], check=True)


@pytest.mark.skipif(os.geteuid() != 0, reason="mounts a disk for each host")
def test_two_hosts_share_only_the_store_and_one_dies(live, undisturbed, tmp_path, wait_for, record_property):
    """Each host has a worker in `gpu` and one in `eval`, and under the same path a disk that no other sees."""
    if subprocess.run(["unshare", "--mount", "true"], check=False).returncode:
        pytest.skip("no disk can be mounted here")
    store, disk, hosts, workers = tmp_path / "store", tmp_path / "disk", {}, []
    disk.mkdir()
    for name in ("a", "b"):
        hosts[name] = tmp_path / f"host-{name}"
        hosts[name].mkdir()
        for pool in ("gpu", "eval"):
            worker = ("prefect", "worker", "start", "--pool", pool, "--name", f"{name}-{pool}", "--limit", "1")
            log, env = tmp_path / f"{name}-{pool}.log", {"PREFECT_WORKER_QUERY_SECONDS": "1"}
            workers.append(start_on(live.server, hosts[name], disk, worker, log, env))
    try:
        log = tmp_path / "parent.log"
        argv = ("flows.cli", "run", "micro", "--runs", str(disk), "--store", store.as_uri(), "--json")
        wait_for(lambda: _workers(live) >= {"a-gpu", "b-gpu", "a-eval", "b-eval"}, 300, "four workers", 1)
        parent = live.server.start(*argv, log=log, ABLATION_LAUNCHER="deployment")
        first = wait_for(
            lambda: _published(hosts, store) or parent.poll() is not None, PATIENCE_S, "a checkpoint", 0.02
        )
        assert first is not True, log.read_text()
        host, cell = first
        for pid in _of_host(hosts[host]):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        assert parent.wait(PATIENCE_S) == 0, log.read_text()
        other = hosts["b" if host == "a" else "a"]
        assert (other / cell / "train.log").is_file(), "its cell did not go on at the other host"
        record_property("figures", f"{cell} of host {host} ended on the other")
        check(store, undisturbed[0])
    finally:
        for host in hosts.values():
            for pid in _of_host(host):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
        for worker in workers:
            worker.wait(30)


def start_on(server, host, disk, module, log, env):
    """Start a Python module on a host: in a mount namespace of its own, its folder lies at the path `disk`."""
    script = 'mount --bind "$0" "$1" && shift && exec "$@"'
    argv = ["unshare", "--mount", "sh", "-c", script, str(host), str(disk), sys.executable, "-m", *module]
    with log.open("ab") as out:
        return subprocess.Popen(
            argv, cwd=ROOT, env={**server.env, **env, HOST: str(host)}, stdout=out, stderr=out, start_new_session=True
        )


def _workers(live):
    found = (live.ask(f"/work_pools/{pool}/workers/filter", {}) for pool in ("gpu", "eval"))
    return {w["name"] for workers in found for w in workers if w["status"] == "ONLINE"}


def _published(hosts, store):
    """A host and the cell that it trains, whose first checkpoint is in the store and whose last is not."""
    for name, folder in hosts.items():
        for path in folder.glob("*/cell.json"):
            cell = path.parent.name
            first, last = (store / cell / f"global_step_{s}" / "MANIFEST.json" for s in (2, 4))
            if first.is_file() and not last.is_file():
                return name, cell
    return None


def _of_host(folder):
    """Every process of a host: its workers, their flow runs, and these's children, which share their mounts."""
    found, mounts, ours = {}, set(), Path("/proc/self/ns/mnt").readlink()
    for entry in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            space = (entry / "ns/mnt").readlink()
            if space != ours:
                found[int(entry.name)] = space
                if f"{HOST}={folder}".encode() in (entry / "environ").read_bytes():
                    mounts.add(space)
    return {pid for pid, space in found.items() if space in mounts}
