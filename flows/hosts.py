"""The flows that run on other hosts: one cell in the pool `gpu`, one checkpoint's scores in the pool `eval`.

They are started by `lr-ablation` and `score-centering` when ABLATION_LAUNCHER=deployment, share nothing with it but the
store and the Prefect server, and do the same when started twice: whatever the store lacks.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from prefect import flow
from prefect.client.schemas.objects import State
from prefect.states import Completed, Failed

from evaluation.program import as_ablation_error
from flows.ablation import RUNNER, incomplete, places, prepare_work, resolve_cell, run_here, stopping_children
from flows.parameters import Parameters
from tasks.data import audit
from tasks.progress import Board
from tasks.scores import evaluator_of, score
from tasks.settings import tell_from


@flow(
    name="train-cell",
    flow_run_name="train {cell}",
    task_runner=RUNNER,
    persist_result=False,
)
def train_cell(cell: str, words: dict[str, Any]) -> State:
    """Train one cell and publish its checkpoints as they appear: the disk that holds them is this host's.

    Args:
        cell: Name of the cell.
        words: Parameters of the run that wants it.
    """
    tell_from()
    return told(lambda: _train(cell, Parameters.model_validate(words)))


@flow(name="score-checkpoint", flow_run_name="score {label}", persist_result=False)
def score_checkpoint(label: str, cell: str | None, step: int, words: dict[str, Any]) -> State:
    """Score one published checkpoint under every protocol of the experiment.

    Args:
        label: What tables call it.
        cell: Name of the cell; none is the base model.
        step: Its global step; 0 for the base model.
        words: Parameters of the run that wants it.
    """
    tell_from()
    return told(lambda: _score(label, cell, step, Parameters.model_validate(words)))


def told(action: Callable[[], State]) -> State:
    """Run a flow's body; a failure that a person can act on is one line and no traceback."""
    try:
        with stopping_children():
            return action()
    except Exception as e:
        known = as_ablation_error(e)
        if known is None:
            raise
        return Failed(message=str(known))


def _train(name: str, parameters: Parameters) -> State:
    cell = resolve_cell(parameters, name)
    alone = parameters.replace(cells=(name,), max_parallel_cells=1)
    work = replace(prepare_work(alone, *places(parameters), here=True), scores_here=False)
    audit(work)
    failures = [str(f) for f in run_here(work, Board(quiet=True), alone, scoring=False)]
    missing = work.unpublished(cell)
    return Failed(message=incomplete(missing, failures)) if missing else Completed(message=f"{name}: published")


def _score(label: str, name: str | None, step: int, parameters: Parameters) -> State:
    cell = resolve_cell(parameters, name) if name is not None else None
    work = prepare_work(parameters, *places(parameters), here=True)
    audit(work)
    with evaluator_of(work, f"evaluations/{label.replace(' ', '-')}", units_come=False) as evaluator:
        score(work, cell, step, evaluator)
    return Completed(message=f"{label}: scored")
