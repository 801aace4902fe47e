"""deployments/worker.py on a real server: told to stop, it lets its runs save, and they go on elsewhere."""

import contextlib
import json
import signal
import subprocess
import sys
import urllib.request
from pathlib import Path

import pytest

pytestmark = [pytest.mark.prefect, pytest.mark.campaign]

ROOT = Path(__file__).resolve().parents[2]
CELL = "toy_toy_nobuf_lr3e4"


def ask(server, path, body=None):
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(f"{server.url}{path}", data, {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=60) as answer:
        return json.load(answer)


def start_cell(server, runs):
    gpu = next(d for d in ask(server, "/deployments/filter", {}) if d["name"] == "gpu")
    words = {"experiment": "micro", "runs": str(runs)}
    return ask(server, f"/deployments/{gpu['id']}/create_flow_run", {"parameters": {"cell": CELL, "words": words}})


def trainers(runs):
    found = []
    for entry in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            words = (entry / "cmdline").read_bytes().decode(errors="replace").split("\0")
            if "training.run" in words and any(w.startswith(str(runs)) for w in words):
                found.append(int(entry.name))
    return found


@pytest.fixture
def start_worker(deployed, tmp_path):
    started = []

    def start():
        argv = [sys.executable, str(ROOT / "deployments/worker.py"), "--pool", "gpu", "--limit", "1"]
        env = {**deployed.env, "PREFECT_WORKER_QUERY_SECONDS": "1"}
        with (tmp_path / "worker.log").open("ab") as log:
            started.append(subprocess.Popen(argv, cwd=ROOT, env=env, stdout=log, stderr=log, start_new_session=True))
        return started[-1]

    yield start
    for worker in started:
        worker.terminate()
        worker.wait(90)


def test_a_host_that_is_taken_back_hands_its_cell_on(deployed, start_worker, tmp_path, wait_for):
    runs = tmp_path / "runs"
    run, worker = start_cell(deployed, runs), start_worker()
    wait_for(lambda: trainers(runs), 600, "a trainer", 0.5)
    worker.send_signal(signal.SIGTERM)
    assert worker.wait(90) == 75
    assert trainers(runs) == []
    state = wait_for(lambda: ask(deployed, f"/flow_runs/{run['id']}")["state_type"] == "CRASHED", 30, "the crashed run")
    assert state
    again = start_cell(deployed, runs)
    start_worker()
    wait_for(lambda: ask(deployed, f"/flow_runs/{again['id']}")["state_type"] == "COMPLETED", 600, "the cell's end")
    assert (runs / "store" / CELL / "logs" / "MANIFEST.json").is_file()
