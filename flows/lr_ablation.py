"""The flow `lr-ablation`: the learning-rate ladder, by name, in a form and from a command line."""

import logging
from typing import Any

from prefect import flow
from prefect.client.schemas.objects import State
from prefect.runtime import flow_run
from prefect.states import Failed

from flows.ablation import RUNNER, Outcome, run_ablation, verdict
from flows.parameters import AtLeastOne, LadderName, ModelName, Parameters, Seeds
from tasks.progress import Board
from tasks.settings import tell_from

logger = logging.getLogger(__name__)

MAX_RESTARTS = 5
"""The automation that restarts crashed runs has no cap of its own."""


@flow(
    name="lr-ablation",
    flow_run_name="lr-ablation {experiment}",
    task_runner=RUNNER,
    persist_result=False,
)
def lr_ablation(
    experiment: LadderName = "smoke",
    store: str | None = None,
    runs: str | None = None,
    model: ModelName | None = None,
    seeds: Seeds | None = None,
    cells: list[str] | None = None,
    max_parallel_cells: AtLeastOne | None = None,
    mbpp: str | None = None,
    mbpp_plus: str | None = None,
) -> State:
    """Train every cell, publish and score every checkpoint as soon as it exists, and report where runs break.

    Args:
        experiment: Which grid to run.
        store: URL of the store; default file://RUNS/store.
        runs: Local run directories, one a cell; default ./runs/EXPERIMENT.
        model: Registry token of another base model.
        seeds: How many seeds, 0 to n-1.
        cells: Names of cells; default all.
        max_parallel_cells: Cells training at a time; default what the machine serves.
        mbpp: Local mbpp.jsonl instead of the hub's.
        mbpp_plus: Local MbppPlus-v0.2.0.jsonl instead of EvalPlus's download.
    """
    return run_to_state(
        experiment=experiment,
        store=store,
        runs=runs,
        model=model,
        seeds=seeds,
        cells=tuple(cells) if cells else None,
        max_parallel_cells=max_parallel_cells,
        mbpp=mbpp,
        mbpp_plus=mbpp_plus,
    )


def run_to_state(**words: Any) -> State:
    """Run what a flow's parameters ask for; return its final state, whose message is the reason of a failure."""
    tell_from()
    if (flow_run.run_count or 0) > MAX_RESTARTS:
        return Failed(message=f"restarted {MAX_RESTARTS} times; look at the last attempt's logs")

    def body() -> Outcome:
        return run_ablation(Parameters(**words), Board())

    state = verdict(body)[0]
    if state.is_failed():
        logger.error("%s", state.message)  # the command that watches the run tells its state's name only
    return state
