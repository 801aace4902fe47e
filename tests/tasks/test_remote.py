"""Units as child flow runs on a real server: adopted, never started twice, crashed ones started again."""

import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import pytest
from prefect import flow
from prefect.client.orchestration import get_client
from prefect.client.schemas.filters import FlowRunFilter, FlowRunFilterTags
from prefect.settings import PREFECT_API_URL, temporary_settings
from prefect.states import Cancelling, Completed, Crashed, Failed

from evaluation.errors import MachineError, Stopped
from flows.experiments import EXPERIMENTS
from tasks import launch
from tasks.launch import ChildFailed
from tasks.remote import TRAIN, check_workers, run_unit

pytestmark = pytest.mark.prefect

CELL = "toy_toy_nobuf_lr3e4"


@pytest.fixture
def client(deployed):
    with temporary_settings({PREFECT_API_URL: deployed.url}), get_client(sync_client=True) as found:
        yield found


def runs_of(client, unit):
    tag = f"unit:{TRAIN}:{unit}"
    return client.read_flow_runs(flow_run_filter=FlowRunFilter(tags=FlowRunFilterTags(all_=[tag])))


@flow(name="parent", flow_run_name="parent-{unit}", persist_result=False)
def parent(unit):
    run_unit(TRAIN, unit, f"train {unit}", {"cell": CELL, "words": {"experiment": "micro"}})


@contextmanager
def running(unit):
    """Run the parent flow in a thread of its own; yields its future."""
    url = PREFECT_API_URL.value()

    def body():
        with temporary_settings({PREFECT_API_URL: url}):
            return parent(unit, return_state=True)

    with ThreadPoolExecutor(1) as pool:
        yield pool.submit(body)


def child_of(client, unit, wait_for, count=1):
    def look():
        found = runs_of(client, unit)
        return sorted(found, key=lambda r: r.created)[-1] if len(found) >= count else None

    return wait_for(look, 120, f"child {count} of {unit}", 0.3)


def end(client, run, state):
    client.set_flow_run_state(run.id, state, force=True)


def test_nobody_waits_for_workers_that_are_not_there(client):
    cells = EXPERIMENTS["full"].cells()
    with pytest.raises(MachineError) as caught:
        check_workers("full", cells)
    assert str(caught.value).startswith("workers=none: full needs an online worker in the pools gpu and eval")
    assert "6 cells of 500 steps, 17 checkpoints each, would run" in str(caught.value)


def test_a_stopped_parent_leaves_its_child_and_the_next_one_adopts_it(client, wait_for):
    with running("adopt") as first:
        child = child_of(client, "adopt", wait_for)
        launch.STOPPING.set()
        assert isinstance(first.result().result(raise_on_failure=False), Stopped)
    launch.STOPPING.clear()
    with running("adopt") as second:
        time.sleep(3)
        assert [r.id for r in runs_of(client, "adopt")] == [child.id]
        end(client, child, Completed())
        assert second.result().is_completed()
    assert not client.read_flow_run(child.id).state.is_cancelled()


def test_a_crashed_child_is_started_again_and_a_failed_one_is_not(client, wait_for):
    with running("crash") as future:
        end(client, child_of(client, "crash", wait_for), Crashed(message="host lost"))
        end(client, child_of(client, "crash", wait_for, 2), Failed(message="gpu=none: this host has no GPU"))
        error = future.result().result(raise_on_failure=False)
    assert isinstance(error, ChildFailed)
    assert "this host has no GPU" in str(error)
    assert len(runs_of(client, "crash")) == 2


def test_a_cancelled_parent_takes_its_child_along(client, wait_for):
    with running("cancel") as future:
        child = child_of(client, "cancel", wait_for)
        mine = client.read_flow_runs(flow_run_filter=FlowRunFilter(name={"any_": ["parent-cancel"]}))
        client.set_flow_run_state(mine[0].id, Cancelling())
        threading.Timer(0.5, launch.STOPPING.set).start()
        future.result()
    assert client.read_flow_run(child.id).state.type.value in {"CANCELLING", "CANCELLED"}
