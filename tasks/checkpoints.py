"""Publishing: a checkpoint, its resume state, and the logs and rollouts so far, while the cell trains on."""

import logging
import shutil

from prefect import task
from prefect.cache_policies import NO_CACHE

from tasks.work import Work
from training.cell import Cell

logger = logging.getLogger(__name__)

KEPT_RESUMES = 2


@task(
    name="publish",
    task_run_name="publish {cell.name} step {step}",
    cache_policy=NO_CACHE,
    persist_result=False,
    retries=3,
    retry_delay_seconds=[1, 5, 20],
    retry_condition_fn=lambda task, run, state: not _stopping(),
)
def publish_checkpoint(work: Work, cell: Cell, step: int) -> None:
    """Send one checkpoint to the store, the manifest last."""
    publish(work, cell, step)


def _stopping() -> bool:
    from tasks.launch import STOPPING

    return STOPPING.is_set()


def publish(work: Work, cell: Cell, step: int) -> None:
    """Publish what belongs to a checkpoint, in the order that makes a kill at any moment harmless."""
    publish_open_files(work, cell)
    publish_resume(work, cell, step)
    work.store.publish(work.folder(cell).checkpoint(step), f"{cell.name}/global_step_{step}")


def publish_resume(work: Work, cell: Cell, step: int) -> None:
    """Publish a resume state, unless the trainer has rotated it away by now, and drop all but the newest two."""
    folder = work.folder(cell)
    try:
        work.store.publish(folder.resume(step), f"{cell.name}/resume/step_{step}")
    except (FileNotFoundError, ValueError):
        if folder.resume(step).exists() and step == max(folder.resumes(), default=step):
            raise
        logger.info("%s: resume state %d is gone, a later one will be published", cell.name, step)
    for old in work.store.numbered(f"{cell.name}/resume", "step_")[:-KEPT_RESUMES]:
        rel = f"{cell.name}/resume/step_{old}"
        work.store.backend.remove(f"{rel}/MANIFEST.json")
        for name in work.store.backend.list(rel):
            work.store.backend.remove(f"{rel}/{name}")


def publish_open_files(work: Work, cell: Cell) -> None:
    """Add the rollouts and the log lines that the store lacks; their manifests come when the cell has ended."""
    folder = work.folder(cell)
    if work.store.has(f"{cell.name}/logs"):
        return
    there = work.store.backend.list(f"{cell.name}/rollouts")
    for path in sorted(folder.rollouts.glob("step_*.parquet")):
        if there.get(path.name) != path.stat().st_size:
            work.store.publish_file(path, f"{cell.name}/rollouts/{path.name}")
    if folder.steps_jsonl.is_file():
        copy = folder.root / "steps.publish"
        shutil.copyfile(folder.steps_jsonl, copy)  # the trainer may append while we read
        work.store.publish_file(copy, f"{cell.name}/logs/steps.jsonl")
        copy.unlink()
