"""kill -9 of the flow, a trainer or the evaluator at any moment, then the same command: it finishes, nothing twice."""

import contextlib
import os
import re
import signal
from pathlib import Path

import pytest
from live_server import pids_of

pytestmark = pytest.mark.prefect

CELLS = ("toy_toy_hardcd_lam0p1_lr3e4", "toy_toy_nobuf_lr3e4")
STORE_OF_MICRO = 2 * (2 + 2 + 2 + 2) + 1 + 1
"""Per cell 2 checkpoints, 2 resume states, 2 scores, logs and rollouts; the base's score; the report."""
PATIENCE_S = 900


def start(server, runs, log, **env):
    return server.start("flows.cli", "run", "micro", "--runs", str(runs), "--json", log=log, **env)


def finish(process, log):
    assert process.wait(PATIENCE_S) == 0, log.read_text()


def descendants(pid):
    """Every process below `pid`, by /proc."""
    parents = {}
    for entry in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            parents[int(entry.name)] = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
    found = {pid}
    while more := {p for p, parent in parents.items() if parent in found} - found:
        found |= more
    return found - {pid}


def alive(pids):
    return [p for p in pids if Path(f"/proc/{p}/stat").exists() and " Z " not in Path(f"/proc/{p}/stat").read_text()]


def whole(runs):
    """Modification time of every published manifest but the report's."""
    store = runs / "store"
    found = {p.parent.relative_to(store).as_posix(): p.stat().st_mtime_ns for p in store.rglob("MANIFEST.json")}
    return {rel: when for rel, when in found.items() if not rel.startswith("reports/")}


def check_end(runs, before):
    """Everything is there and whole, and what was published before the kill was not touched again."""
    from training.store import open_store

    after = whole(runs)
    kept = {rel: when for rel, when in before.items() if "/resume/" not in rel}  # old resume states are rotated away
    assert kept.items() <= after.items()
    found = open_store(str(runs / "store")).verify()
    assert (found.ok, found.folders) == (True, STORE_OF_MICRO), found
    for cell in CELLS:
        steps = [int(s) for s in re.findall(r"step (\d) of 4:", (runs / cell / "train.log").read_text())]
        for step in (2, 4):
            if f"{cell}/global_step_{step}" in before:
                assert steps.count(step) == 1, steps


def test_a_killed_flow_takes_its_children_along_and_the_same_command_finishes(prefect_server, tmp_path, wait_for):
    runs, log = tmp_path / "runs", tmp_path / "log"
    first = start(prefect_server, runs, log, PREFECT_API_URL="")  # with a server of its own
    published = f"{CELLS[0]}/global_step_2"
    wait_for(lambda: published in whole(runs) or first.poll() is not None, PATIENCE_S, "a published checkpoint", 0.02)
    children = descendants(first.pid)
    os.kill(first.pid, signal.SIGKILL)
    first.wait()
    assert len(children) >= 2, log.read_text()  # its Prefect server, and a trainer or the evaluator
    wait_for(lambda: not alive(children), 60, f"the end of its children {children}")

    before = whole(runs)
    second = start(prefect_server, runs, log)
    victims: dict[str, int] = {}

    def killed_all_or_over():
        for what in {"training.run", "draw", "judge"} - victims.keys():
            if found := pids_of(what, runs):  # a cell may have ended before the kill: then none trains again
                victims[what] = found[0]
                with contextlib.suppress(ProcessLookupError):
                    os.kill(found[0], signal.SIGKILL)
        return len(victims) == 3 or second.poll() is not None

    wait_for(killed_all_or_over, PATIENCE_S, "a trainer and both halves of the evaluator", 0.02)
    finish(second, log)
    assert {"draw", "judge"} <= victims.keys(), (
        log.read_text()
    )  # what was published a moment before the kill is not scored yet
    check_end(runs, before)


def test_ctrl_c_lets_the_children_save_and_ends_with_75(prefect_server, tmp_path, wait_for):
    runs, log = tmp_path / "runs", tmp_path / "log"
    flow = start(prefect_server, runs, log)
    wait_for(lambda: pids_of("training.run", runs), PATIENCE_S, "a trainer", 0.02)
    children = descendants(flow.pid)
    os.kill(flow.pid, signal.SIGTERM)
    assert flow.wait(120) == 75, log.read_text()
    assert log.read_text().splitlines()[-1].startswith(("error: signal=", '{"schema": "error/1"'))
    assert "Traceback" not in log.read_text()
    assert not alive(children)


MOMENTS = {
    "trainer started": ("training.run", f"{CELLS[0]}/train.log"),
    "first step": ("training.run", f"{CELLS[0]}/progress.json"),
    "resume state on disk": ("training.run", f"{CELLS[0]}/resume/step_2/MANIFEST.json"),
    "checkpoint on disk": ("flow", f"{CELLS[1]}/global_step_2/MANIFEST.json"),
    "upload begun": ("flow", f"store/{CELLS[0]}/global_step_2"),
    "upload ended": ("flow", f"store/{CELLS[1]}/global_step_2/MANIFEST.json"),
    "samples drawn": ("evaluation.run", "*/scores/*/global_step_*/samples.jsonl"),
    "samples judged": ("evaluation.run", "*/scores/*/global_step_*/verdicts.jsonl"),
    "cell ended": ("flow", f"{CELLS[0]}/logs/result.json"),
    "first score stored": ("flow", "store/*/scores/*/global_step_*/MANIFEST.json"),
}


@pytest.mark.campaign
@pytest.mark.parametrize("moment", MOMENTS)
def test_ten_moments(prefect_server, tmp_path, wait_for, moment):
    victim, pattern = MOMENTS[moment]
    runs, log = tmp_path / "runs", tmp_path / "log"
    first = start(prefect_server, runs, log)
    wait_for(lambda: list(runs.glob(pattern)) or first.poll() is not None, PATIENCE_S, moment, 0.005)
    pids = [first.pid] if victim == "flow" else pids_of(victim, runs)
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    before = whole(runs)
    if victim == "flow":
        first.wait()
    else:
        finish(first, log)
    finish(start(prefect_server, runs, log), log)
    check_end(runs, before)
