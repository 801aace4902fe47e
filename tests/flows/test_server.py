"""The flow on a real Prefect server with a real worker: `micro` from the command line, and a failed run retried."""

import contextlib
import json
import os
import re
import shutil
import signal
import time
import urllib.request
from pathlib import Path

import pytest
from conftest import SECRETS

pytestmark = pytest.mark.prefect

CELLS = ("toy_toy_hardcd_lam0p1_lr3e4", "toy_toy_nobuf_lr3e4")
WATCH_S = 900


def ask(server, path, body=None):
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(f"{server.url}{path}", data, {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=60) as answer:
        return json.load(answer)


def run_deployment(server, name, *parameters):
    argv = [x for p in parameters for x in ("-p", p)]
    return server.run("prefect", "deployment", "run", name, *argv, "--watch", timeout=WATCH_S)


def manifests(store):
    return {p.parent.relative_to(store).as_posix(): p.stat().st_mtime_ns for p in store.rglob("MANIFEST.json")}


def newest_run(server):
    started = {"start_time": {"is_null_": False}}  # not the runs that a schedule foresees
    return ask(server, "/flow_runs/filter", {"sort": "START_TIME_DESC", "limit": 1, "flow_runs": started})[0]


def task_names(server, run, attempt):
    found = ask(server, "/task_runs/filter", {"flow_runs": {"id": {"any_": [run["id"]]}}})
    return {t["name"] for t in found if t["flow_run_run_count"] == attempt}


@pytest.fixture(scope="module")
def finished(control_worker, tmp_path_factory):
    """The run directories of a `micro` that a worker has finished."""
    runs = tmp_path_factory.mktemp("micro")
    done = run_deployment(control_worker, "lr-ablation/micro", f"runs={runs}")
    assert done.returncode == 0, done.stdout + done.stderr
    return runs


def test_micro_leaves_everything_that_the_plan_wants(control_worker, finished):
    store = finished / "store"
    scores = "scores/toy_plus-*/global_step_"
    for cell in CELLS:
        for step in (2, 4):
            assert (store / cell / f"global_step_{step}" / "MANIFEST.json").is_file()
            assert len(list((store / cell).glob(f"{scores}{step}/MANIFEST.json"))) == 1
    assert len(list((store / "toy").glob(f"{scores}0/MANIFEST.json"))) == 1
    run = newest_run(control_worker)
    assert (run["name"], run["state_type"]) == ("lr-ablation micro", "COMPLETED")
    wanted = {f"train {c}" for c in CELLS} | {f"publish {c} logs and rollouts" for c in CELLS}
    wanted |= {f"{what} {c} step {s}" for what in ("publish", "score") for c in CELLS for s in (2, 4)}
    assert wanted | {"score toy step 0"} <= task_names(control_worker, run, 1)
    artifacts = {a["key"]: a["type"] for a in ask(control_worker, "/artifacts/latest/filter", {})}
    assert artifacts["micro-report"] == "markdown"
    assert artifacts["micro-cells"] == "table"
    assert artifacts["micro-costs"] == "table"
    assert artifacts["progress-toy-toy-nobuf-lr3e4"] == "progress"
    assert artifacts["scoring-toy-toy-nobuf-lr3e4-step-4"] == "progress"
    assert artifacts["folder-toy-toy-nobuf-lr3e4"] == "markdown"


def test_a_run_shows_what_it_does(control_worker, finished):
    run = newest_run(control_worker)
    assert set(run["tags"]) == {"ablation", "micro"}
    asked = {"flow_runs": {"id": {"any_": [run["id"]]}}}
    tasks = ask(control_worker, "/task_runs/filter", asked)
    assert {t["name"]: t["tags"] for t in tasks if t["tags"]}[f"publish {CELLS[0]} step 2"] == ["publish"]
    assert not [t["name"] for t in tasks if re.search(r"-[0-9a-f]{3}$", t["name"])]  # none of Prefect's own making
    found = {a["key"]: a for a in ask(control_worker, "/artifacts/latest/filter", {})}
    assert f"{finished}/store/{CELLS[1]}" in found["folder-toy-toy-nobuf-lr3e4"]["data"]
    assert "data:image/png;base64," in found["micro-report"]["data"]
    assert {r["cell"] for r in json.loads(found["micro-cells"]["data"])} == set(CELLS)
    costs = {r["what"]: r for r in json.loads(found["micro-costs"]["data"])}
    sizes = [p.stat().st_size for p in (finished / "store").glob("*/global_step_*/*")]
    assert costs["checkpoints"]["actual"] == pytest.approx(sum(sizes) / 1e9, abs=1e-6)
    assert costs["training"]["planned"] > 0 < costs["training"]["actual"]
    logs = ask(control_worker, "/logs/filter", {"logs": {"flow_run_id": {"any_": [run["id"]]}}, "limit": 200})
    said = "\n".join(e["message"] for e in logs)
    assert f"{CELLS[0]}: " in said and "step 4 of 4: reward" in said  # the trainer's own words
    assert "toy/global_step_0: 32 of 32 samples" in said  # the evaluation's


def told_of(server, run):
    """All that Prefect's API tells of a run, by kind."""
    mine = {"any_": [run["id"]]}
    tasks = ask(server, "/task_runs/filter", {"flow_runs": {"id": mine}})
    states = [
        f"/flow_run_states/?flow_run_id={run['id']}",
        *(f"/task_run_states/?task_run_id={t['id']}" for t in tasks),
    ]
    logs, page = [], [None]
    while page:
        page = ask(
            server, "/logs/filter", {"logs": {"flow_run_id": mine}, "offset": len(logs), "sort": "TIMESTAMP_ASC"}
        )
        logs += page
    artifacts = ask(server, "/artifacts/filter", {"artifacts": {"flow_run_id": mine}})
    found = {
        "run": run,
        "tasks": tasks,
        "states": [ask(server, s) for s in states],
        "logs": logs,
        "artifacts": artifacts,
    }
    return {kind: json.dumps(what) for kind, what in found.items()}


def test_no_secret_of_the_environment_is_told_or_written(control_worker, finished):
    started = {"sort": "START_TIME_DESC", "flow_runs": {"start_time": {"is_null_": False}}}
    run = next(r for r in ask(control_worker, "/flow_runs/filter", started) if r["parameters"]["runs"] == str(finished))
    told = told_of(control_worker, run)
    expected = {
        "run": str(finished),
        "tasks": "train toy",
        "states": "COMPLETED",
        "logs": "reward",
        "artifacts": "progress-",
    }
    assert not {kind for kind, text in expected.items() if text not in told[kind]}  # so it would be seen
    folders = (finished, Path(control_worker.env["PREFECT_HOME"]))
    files = {str(p): p.read_bytes() for folder in folders for p in folder.rglob("*") if p.is_file()}
    assert {p.rpartition("/")[2] for p in files} >= {
        "prefect.db",
        "server.log",
        "worker.log",
        "train.log",
        "MANIFEST.json",
    }
    written = files | {kind: text.encode() for kind, text in told.items()}
    assert not [
        (name, what) for name, secret in SECRETS.items() for what in written if secret.encode() in written[what]
    ]


def test_a_failed_run_retried_redoes_only_what_is_missing(control_worker, finished, tmp_path, wait_for):
    runs = tmp_path / "runs"
    shutil.copytree(finished, runs)
    lost = next((runs / "store" / CELLS[1]).glob("scores/*/global_step_4"))
    obstacle = runs / lost.relative_to(runs / "store")
    shutil.rmtree(lost)
    shutil.rmtree(obstacle)
    obstacle.touch()  # a file where the score's folder belongs
    before = manifests(runs / "store")

    done = run_deployment(control_worker, "lr-ablation/micro", f"runs={runs}")
    assert done.returncode == 1
    run = newest_run(control_worker)
    assert run["state_type"] == "FAILED"
    assert f"{CELLS[1]}/global_step_4 (score)" in run["state"]["message"]
    assert task_names(control_worker, run, 1) & {f"train {c}" for c in CELLS} == set()

    obstacle.unlink()
    trained = (runs / CELLS[1] / "train.log").read_text()
    retry = {"state": {"type": "SCHEDULED", "name": "AwaitingRetry"}}  # what the Retry button of the UI does
    assert ask(control_worker, f"/flow_runs/{run['id']}/set_state", retry)["status"] == "ACCEPT"

    def ended():
        state = ask(control_worker, f"/flow_runs/{run['id']}")
        return state if state["state_type"] in {"COMPLETED", "FAILED", "CRASHED"} and state["run_count"] == 2 else None

    again = wait_for(ended, 600, "the retried run")
    assert again["state_type"] == "COMPLETED", again["state"]
    redone = {n for n in task_names(control_worker, run, 2) if n.split()[0] in {"train", "publish", "score"}}
    assert redone == {f"score {CELLS[1]} step 4"}
    after = manifests(runs / "store")
    rel = lost.relative_to(runs / "store").as_posix()
    assert after.keys() - before.keys() == {rel}
    assert {k: v for k, v in before.items() if not k.startswith("reports/")}.items() <= after.items()
    assert (runs / CELLS[1] / "train.log").read_text() == trained


@pytest.mark.skipif(shutil.which("nvidia-smi") is not None, reason="there is a GPU here")
def test_without_a_gpu_full_fails_within_seconds_with_one_line(control_worker, wait_for, tmp_path):
    began = time.monotonic()
    done = run_deployment(control_worker, "lr-ablation/full", f"runs={tmp_path}")
    assert done.returncode == 1
    run = newest_run(control_worker)
    assert run["state_type"] == "FAILED"
    message = run["state"]["message"]
    assert message.startswith("gpu=none: full needs a GPU")
    assert "6 cells of 500 steps, 17 checkpoints each" in message
    assert "\n" not in message
    assert not Path(tmp_path / "store").exists()
    assert run["total_run_time"] < 60 < WATCH_S, time.monotonic() - began
    asked = {"logs": {"flow_run_id": {"any_": [run["id"]]}}}
    logs = wait_for(
        lambda: [e for e in ask(control_worker, "/logs/filter", asked) if e["message"] == message], 60, "logs"
    )
    assert len(logs) == 1


def start_run(server, **parameters):
    micro = next(d for d in ask(server, "/deployments/filter", {}) if d["name"] == "micro")
    return ask(server, f"/deployments/{micro['id']}/create_flow_run", {"parameters": parameters})


def state_of(server, run, *wanted, count=0):
    found = ask(server, f"/flow_runs/{run['id']}")
    return found if found["state_type"] in wanted and found["run_count"] >= count else None


def trainers(runs):
    found = []
    for entry in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            words = (entry / "cmdline").read_bytes().decode(errors="replace").split("\0")
            if "training.run" in words and any(w.startswith(str(runs)) for w in words):
                found.append(int(entry.name))
    return found


def parent_of(pid):
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


@pytest.mark.campaign
def test_a_cancelled_run_stops_its_trainers_and_its_retry_goes_on(control_worker, tmp_path, wait_for):
    run = start_run(control_worker, experiment="micro", runs=str(tmp_path))
    wait_for(lambda: trainers(tmp_path), WATCH_S, "a trainer", 0.05)
    cancelling = {"state": {"type": "CANCELLING"}}
    assert ask(control_worker, f"/flow_runs/{run['id']}/set_state", cancelling)["status"] == "ACCEPT"
    wait_for(lambda: state_of(control_worker, run, "CANCELLED"), 120, "the cancelled run")
    wait_for(lambda: not trainers(tmp_path), 30, "the end of its trainers")
    retry = {"state": {"type": "SCHEDULED", "name": "AwaitingRetry"}}
    ask(control_worker, f"/flow_runs/{run['id']}/set_state", retry)
    wait_for(lambda: state_of(control_worker, run, "COMPLETED"), WATCH_S, "the retried run")


@pytest.mark.campaign
def test_a_killed_flow_is_restarted_by_the_automation(control_worker, tmp_path, wait_for):
    run = start_run(control_worker, experiment="micro", runs=str(tmp_path))
    pids = wait_for(lambda: trainers(tmp_path), WATCH_S, "a trainer", 0.05)
    os.kill(parent_of(pids[0]), signal.SIGKILL)
    end = wait_for(lambda: state_of(control_worker, run, "COMPLETED", count=2), WATCH_S, "the restarted run")
    assert end["run_count"] == 2  # once, though the worker tells of the death twice
