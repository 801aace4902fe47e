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
import time
from pathlib import Path

import pytest
from faulty_s3 import Endpoint, FaultyProxy, settings
from live_server import Live, flow_of, pids_of

pytestmark = [pytest.mark.prefect, pytest.mark.campaign]

FOLDERS = 2 * (2 + 2 + 2 + 2) + 1 + 1
VICTIMS = ("flow", "worker", "trainer", "evaluator", "server", "flow while it uploads")
KILLS = int(os.environ.get("ABLATION_TEST_KILLS", "30"))
PATIENCE_S = 900
AWAY_S = 60.0


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
    """Answers of a run that nothing happened to, and its seconds."""
    runs, started = tmp_path_factory.mktemp("undisturbed") / "runs", time.monotonic()
    end = live.end_of(live.start_run(runs=str(runs)), PATIENCE_S)
    assert end["state_type"] == "COMPLETED", end["state"]
    return answers(runs / "store"), time.monotonic() - started


def kill(live, victim, run, runs):
    """Kill a part if it is there; say what was killed."""
    if victim == "server":
        live.kill_server()
        live.start_server()
    elif victim == "worker":
        live.kill_worker()
        live.start_worker()
    else:
        modules = {"trainer": "training.run", "evaluator": "evaluation.run"}
        pid = next(iter(pids_of(modules[victim], runs)), None) if victim in modules else flow_of(run)
        if pid is None:
            return None
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    return victim


@pytest.mark.parametrize("number", range(KILLS))
def test_killed_at_a_random_moment(live, undisturbed, tmp_path, wait_for, record_property, number):
    chance = random.Random(number)
    victim, runs = VICTIMS[number % len(VICTIMS)], tmp_path / "runs"
    run = live.start_run(runs=str(runs))
    wait_for(lambda: flow_of(run), PATIENCE_S, "the flow's process", 0.05)
    if victim == "flow while it uploads":
        cell = chance.choice(("toy_toy_hardcd_lam0p1_lr3e4", "toy_toy_nobuf_lr3e4"))
        begun = runs / "store" / cell / f"global_step_{chance.choice((2, 4))}"
        wait_for(begun.exists, PATIENCE_S, "an upload", 0.002)
        time.sleep(chance.uniform(0, 0.03))
    else:
        time.sleep(chance.uniform(0, 0.9 * undisturbed[1]))
    wait_for(lambda: kill(live, victim, run, runs) or _over(live, run), PATIENCE_S, victim, 0.05)
    end = live.end_of(run, PATIENCE_S)
    reruns = 0
    if end["state_type"] != "COMPLETED":
        reruns, again = 1, live.start_run(runs=str(runs))
        end = live.end_of(again, PATIENCE_S)
    record_property("figures", f"{victim}: {reruns} reruns, {end['run_count']} starts")
    assert end["state_type"] == "COMPLETED", end["state"]
    check(runs / "store", undisturbed[0])
    shutil.rmtree(runs)


def _over(live, run):
    return live.ask(f"/flow_runs/{run}")["state_type"] == "COMPLETED"


@pytest.mark.parametrize("what", ["server down", "SQLite locked"])
def test_the_server_is_away_for_a_minute(live, undisturbed, tmp_path, wait_for, what):
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
    end = live.end_of(run, PATIENCE_S)
    if end["state_type"] != "COMPLETED":
        end = live.end_of(live.start_run(runs=str(runs)), PATIENCE_S)
    assert end["state_type"] == "COMPLETED", end["state"]
    check(runs / "store", undisturbed[0])
    for log in runs.glob("*/train.log"):  # it trained on: no step was taken twice
        assert [log.read_text().count(f"step {s} of 4:") for s in range(1, 5)] == [1, 1, 1, 1]


def test_the_store_is_away_for_a_minute(live, undisturbed, tmp_path, wait_for, monkeypatch):
    endpoint = Endpoint(tmp_path / "s3.log")
    proxy = FaultyProxy(endpoint)
    for name, value in settings(proxy.url).items():
        monkeypatch.setenv(name, value)
    from training.s3 import S3Backend
    from training.store import open_store

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
        open_store("s3://micro-bucket/x").fetch("reports/micro", tmp_path / "report")
        assert open_store("s3://micro-bucket/x").verify().ok
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


def test_two_hosts_share_only_the_store_and_one_dies(live, undisturbed, tmp_path, wait_for, record_property):
    """Each host has a worker in `gpu` and one in `eval`, and a folder of its own that nobody else looks into."""
    store, hosts, workers = tmp_path / "store", {}, []
    for host in ("a", "b"):
        hosts[host] = tmp_path / f"host-{host}"
        hosts[host].mkdir()
        for pool in ("gpu", "eval"):
            argv = ("prefect", "worker", "start", "--pool", pool, "--name", f"{host}-{pool}", "--limit", "1")
            env = {"PREFECT_WORKER_QUERY_SECONDS": "1", "ABLATION_HOME": str(hosts[host])}
            workers.append(live.server.start(*argv, log=tmp_path / f"{host}-{pool}.log", **env))
    try:
        log = tmp_path / "parent.log"
        argv = ("flows.cli", "run", "micro", "--runs", str(tmp_path / "parent"), "--store", store.as_uri(), "--json")
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
        assert list(other.rglob(f"{cell}/train.log")), "its cell did not go on at the other host"
        record_property("figures", f"{cell} of host {host} ended on the other")
        check(store, undisturbed[0])
    finally:
        for host in hosts.values():
            for pid in _of_host(host):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
        for worker in workers:
            worker.wait(30)


def _workers(live):
    found = (live.ask(f"/work_pools/{pool}/workers/filter", {}) for pool in ("gpu", "eval"))
    return {w["name"] for workers in found for w in workers if w["status"] == "ONLINE"}


def _published(hosts, store):
    """A host and the cell that it trains, whose first checkpoint is in the store and whose last is not."""
    for name, folder in hosts.items():
        for path in folder.rglob("cell.json"):
            cell = path.parent.name
            first, last = (store / cell / f"global_step_{s}" / "MANIFEST.json" for s in (2, 4))
            if first.is_file() and not last.is_file():
                return name, cell
    return None


def _of_host(folder):
    """Every process that was started on a host: its workers, their flow runs, and these's children."""
    found = set()
    for entry in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            told = (entry / "environ").read_bytes() + (entry / "cmdline").read_bytes()
            if str(folder).encode() in told:
                found.add(int(entry.name))
    return found - {os.getpid()}
