"""Which failures of a task are worth another try, and what every task says to Prefect."""

from typing import Any

from prefect.cache_policies import NO_CACHE
from prefect.client.schemas.objects import State, TaskRun
from prefect.tasks import Task

from evaluation.program import as_ablation_error
from tasks.launch import INTERNAL, STOPPING

ONCE_EACH: dict[str, Any] = {"cache_policy": NO_CACHE, "persist_result": False}
"""Prefect's cache keys know neither files nor settings; what is done is read from the store instead."""


def retriable(task: Task[Any, Any], run: TaskRun, state: State[Any]) -> bool:
    """True for what may pass (a lost child, a store out of reach) unless the flow is being torn down."""
    if STOPPING.is_set():
        return False
    error = state.result(raise_on_failure=False)
    known = as_ablation_error(error) if isinstance(error, Exception) else None  # a full disk, not only our own errors
    return known is None or known.exit_code >= INTERNAL
