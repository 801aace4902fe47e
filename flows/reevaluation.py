"""The flow `re-evaluation`: score what is published and lacks a score under the current protocols; report again.

Nothing is trained. A checkpoint that another protocol has scored keeps its samples where this one would draw the same.
"""

import logging

from prefect import flow
from prefect.client.schemas.objects import State
from prefect.states import Completed, Failed

from flows.ablation import (
    RUNNER,
    alone,
    incomplete,
    places,
    prepare_work,
    run_here,
    run_remote,
)
from flows.hosts import told
from flows.parameters import ExperimentName, Parameters
from flows.stored import planned_cells, stored_cells
from tasks.data import audit
from tasks.progress import Board
from tasks.remote import check_workers
from tasks.reports import report
from tasks.settings import settings, tell_from
from training.store import Store

logger = logging.getLogger(__name__)


@flow(
    name="re-evaluation",
    flow_run_name="re-evaluation {experiment}",
    task_runner=RUNNER,
    persist_result=False,
)
def re_evaluation(
    experiment: ExperimentName = "full",
    store: str | None = None,
    runs: str | None = None,
    mbpp: str | None = None,
    mbpp_plus: str | None = None,
    gsm8k: str | None = None,
) -> State:
    """Score every published checkpoint that lacks a score under the experiment's protocols, and report again.

    Args:
        experiment: Whose protocols and cells.
        store: URL of the store; default file://RUNS/store.
        runs: Local folders; default ./runs/EXPERIMENT.
        mbpp: Local mbpp.jsonl instead of the hub's.
        mbpp_plus: Local MbppPlus-v0.2.0.jsonl instead of EvalPlus's download.
        gsm8k: Local folder of GSM8K's files instead of the hub's.
    """
    tell_from()

    def body() -> State:
        parameters = Parameters(
            experiment=experiment, store=store, runs=runs, mbpp=mbpp, mbpp_plus=mbpp_plus, gsm8k=gsm8k
        )
        return reevaluate(parameters, Board())

    state = told(body)
    if state.is_failed():
        logger.error("%s", state.message)
    return state


def reevaluate(parameters: Parameters, board: Board) -> State:
    """Do what is missing; the state says how many checkpoints are scored now that were not.

    Raises:
        AblationError: nothing could be started, or an audit failed.
    """
    store, runs = places(parameters)
    with alone(runs):
        asked = of_store(parameters, store)
        if asked is None:
            return Completed(message=f"{store.url}: no cell of {parameters.experiment} is published; nothing to do")
        remote = settings().launcher == "deployment"
        if remote:
            check_workers(asked.experiment, asked.grid, ("eval",))
        work = prepare_work(asked, store, runs)
        before = work.unscored()
        board.say(f"{asked.experiment}: {len(before)} checkpoints lack a score in {store.url}")
        failures: list[Exception] = []
        if before:
            board.say(audit(work))
            run = run_remote if remote else lambda *given, **how: run_here(given[0], board, given[1], **how)
            failures = run(work, asked, training=False)
        finding, after = report(work, work.missing()), work.unscored()
    if after:
        return Failed(message=incomplete(after, [str(f) for f in failures]))
    return Completed(message=f"{len(before)} checkpoints scored. {finding.sentence}")


def of_store(parameters: Parameters, store: Store) -> Parameters | None:
    """Return the parameters with the cells, seeds and model that the store has; None if it has no cell of them."""
    if not any(store.manifest(rel) for rel in store.folders()):
        return None
    stored = [c for c in stored_cells(store) if c.benchmark == parameters.spec.benchmark]
    if not stored:
        return None
    cells = planned_cells(store, parameters.spec, stored)
    seeds = max(c.seed for c in cells) + 1
    return parameters.replace(model=cells[0].model, seeds=seeds, cells=tuple(c.name for c in cells))
