"""Units as child flow runs in the work pools: adopt the live one of an earlier parent, else start one, and poll it.

The links between runs that Prefect draws are not dependable; a unit is found again by its tag alone.
"""

import random
from collections.abc import Sequence
from typing import Any
from uuid import UUID

import httpx
from prefect import get_run_logger, task
from prefect.client.orchestration import SyncPrefectClient, get_client
from prefect.client.schemas.filters import FlowRunFilter, FlowRunFilterTags
from prefect.client.schemas.objects import FlowRun, State, WorkerStatus
from prefect.deployments import run_deployment
from prefect.exceptions import ObjectNotFound, PrefectHTTPStatusError
from prefect.runtime import flow_run as this_flow_run
from prefect.states import Cancelling
from prefect.utilities.urls import url_for

from evaluation.errors import MachineError, Stopped
from tasks.launch import ATTEMPTS, STOPPING, ChildDied, ChildFailed
from tasks.retries import ONCE_EACH
from tasks.work import Work
from training.cell import Cell

TRAIN, SCORE = "train-cell/gpu", "score-checkpoint/eval"
POOLS = ("gpu", "eval")
UNREACHABLE = (httpx.TransportError, PrefectHTTPStatusError)


def check_workers(experiment: str, cells: Sequence[Cell], pools: Sequence[str] = POOLS) -> None:
    """Refuse at once to wait for workers that are not there.

    Raises:
        MachineError: no online worker in a pool, or no such pool.
    """
    with get_client(sync_client=True) as client:
        lacking = [pool for pool in pools if not _online(client, pool)]
    if lacking:
        would = f"{len(cells)} cells of {cells[0].steps} steps, {len(cells[0].checkpoints)} checkpoints each, would run"
        named = f"{'pools' if len(pools) > 1 else 'pool'} {' and '.join(pools)}"
        raise MachineError(
            "workers",
            "none",
            f"{experiment} needs an online worker in the {named}, and {' and '.join(lacking)} has none ({would})",
            f"run `make deploy`, then `prefect worker start --pool {lacking[0]}`",
        )


def _online(client: SyncPrefectClient, pool: str) -> bool:
    try:
        workers = client.read_workers_for_work_pool(pool)
    except ObjectNotFound:
        return False
    return any(w.status == WorkerStatus.ONLINE for w in workers)


@task(name="train", tags=["train"], task_run_name="train {cell.name}", **ONCE_EACH)
def train_in_pool(work: Work, cell: Cell, words: dict[str, Any]) -> None:
    """Train a cell on a host of the pool `gpu`; it publishes its checkpoints from there."""
    unit = f"{cell.name}:{work.identity(cell).fingerprint[:16]}"
    run_unit(TRAIN, unit, f"train {cell.name}", {"cell": cell.name, "words": words}, (work.experiment.name, cell.name))


@task(name="score", tags=["score"], task_run_name="score {label}", **ONCE_EACH)
def score_in_pool(work: Work, cell: Cell | None, step: int, label: str, words: dict[str, Any]) -> None:
    """Score a checkpoint on a host of the pool `eval`."""
    protocols = "-".join(p.sha256[:8] for p in work.experiment.protocols)
    unit = f"{label.replace(' ', '-')}:{work.identity(cell).fingerprint[:16]}:{protocols}"
    parameters = {"label": label, "cell": cell.name if cell else None, "step": step, "words": words}
    run_unit(SCORE, unit, f"score {label}", parameters, (work.experiment.name, cell.name if cell else work.model.name))


def run_unit(deployment: str, unit: str, name: str, parameters: dict[str, Any], tags: Sequence[str] = ()) -> None:
    """Bring a unit's child flow run to its end; a crashed one is started again, a failed one is not.

    Args:
        deployment: what runs it.
        unit: what it is found again by, whoever started it.
        name: of the flow run.
        parameters: of the flow run.
        tags: for people who look for it.

    Raises:
        ChildFailed: the child ended without having done its work.
        ChildDied: it crashed every time.
        Stopped: this flow is being torn down; the child goes on unless the flow was cancelled.
    """
    tag = f"unit:{deployment}:{unit}"
    with get_client(sync_client=True) as client:
        for _ in range(ATTEMPTS):
            run = _adopt(client, tag) or _start(client, deployment, name, parameters, (tag, *tags))
            state = _follow(client, run, name)
            if state.is_completed():
                return
            if not state.is_crashed():
                raise ChildFailed(f"{name}: its flow run {state.name}: {state.message}")
    raise ChildDied(f"{name}: its flow run crashed {ATTEMPTS} times: {state.message}")


def _earlier(client: SyncPrefectClient, tag: str) -> list[FlowRun]:
    return client.read_flow_runs(flow_run_filter=FlowRunFilter(tags=FlowRunFilterTags(all_=[tag])))


def _adopt(client: SyncPrefectClient, tag: str) -> FlowRun | None:
    live = [r for r in _earlier(client, tag) if r.state is None or not r.state.is_final()]
    if live:
        get_run_logger().info("adopted the flow run %s of an earlier attempt", live[0].name)
    return live[0] if live else None


def _start(
    client: SyncPrefectClient, deployment: str, name: str, parameters: dict[str, Any], tags: Sequence[str]
) -> FlowRun:
    # The key alone would return an ended run for ever; with the count, racing parents still compute the same one.
    key = f"{tags[0]}:{len(_earlier(client, tags[0]))}"
    run = run_deployment(
        deployment, parameters=parameters, flow_run_name=name, timeout=0, tags=[*tags], idempotency_key=key
    )
    assert isinstance(run, FlowRun)
    get_run_logger().info("started the flow run %s: %s", name, url_for(run) or run.id)
    return run


def _follow(client: SyncPrefectClient, run: FlowRun, name: str) -> State[Any]:
    log = get_run_logger()
    while True:
        try:
            state = client.read_flow_run(run.id).state
            if state is not None and state.is_final():
                return state
        except UNREACHABLE as e:  # the child runs on without the server, and so do we
            log.warning("%s: the server is out of reach (%s)", name, type(e).__name__)
        if STOPPING.wait(random.uniform(1, 3)):
            _take_along(client, run)
            raise Stopped(f"signal=TERM: stopped while {name} ran; run it again to go on")


def _take_along(client: SyncPrefectClient, run: FlowRun) -> None:
    """Cancel the child of a cancelled flow; that of one that was only stopped goes on, and is adopted later."""
    try:
        mine = client.read_flow_run(UUID(this_flow_run.get_id())).state
        if mine is not None and (mine.is_cancelling() or mine.is_cancelled()):
            client.set_flow_run_state(run.id, Cancelling(message="its parent was cancelled"))
    except UNREACHABLE:
        return  # without a server nobody can be cancelled; the server does it itself when it is back
