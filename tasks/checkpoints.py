"""Publishing: a checkpoint, its resume state and the records so far while the cell trains on; the sealed records last.

The order makes a kill at any moment harmless: a stored checkpoint has the resume state to go on from beside it, and a
cell that the store calls ended has every checkpoint there.
"""

import logging
import shutil
from pathlib import Path

from prefect import task

from evaluation.manifests import is_complete
from tasks.retention import spare
from tasks.retries import ONCE_EACH, retriable
from tasks.work import Work
from training.cell import Cell

logger = logging.getLogger(__name__)

KEPT_RESUMES = 2
RETRIES = {"retries": 3, "retry_delay_seconds": [1, 5, 20], "retry_condition_fn": retriable}


@task(name="publish", tags=["publish"], task_run_name="publish {cell.name} step {step}", **ONCE_EACH, **RETRIES)
def publish_checkpoint(work: Work, cell: Cell, step: int) -> None:
    """Send one checkpoint to the store, the manifest last."""
    publish(work, cell, step)


@task(name="seal", tags=["publish"], task_run_name="publish {cell.name} logs and rollouts", **ONCE_EACH, **RETRIES)
def publish_records(work: Work, cell: Cell) -> None:
    """Send the sealed logs and rollouts of a cell that has ended; from here on the store calls it ended."""
    seal(work, cell)


def publish(work: Work, cell: Cell, step: int) -> None:
    """Publish what belongs to a checkpoint, the checkpoint last."""
    work.fence.claim(cell.name, work.folder(cell).root)
    publish_open_files(work, cell)
    publish_resume(work, cell, step)
    _send(work, cell, work.folder(cell).checkpoint(step), f"global_step_{step}")
    if work.result(cell) is not None:  # a checkpoint that was lost after the end
        work.fence.release(cell.name)
    spare(work, cell, step)


def _send(work: Work, cell: Cell, local: Path, name: str) -> None:
    """Publish a folder of a cell, unless another host has taken the cell over by the time of its manifest."""
    work.store.publish(local, f"{cell.name}/{name}", before_manifest=lambda: work.fence.check(cell.name))


def seal(work: Work, cell: Cell) -> None:
    """Publish rollouts, then logs; both were sealed by the trainer."""
    folder = work.folder(cell)
    work.fence.claim(cell.name, folder.root)
    for part in (folder.rollouts, folder.logs):
        if part.is_dir():
            _send(work, cell, part, part.name)
    work.fence.release(cell.name)


def publish_resume(work: Work, cell: Cell, step: int) -> None:
    """Publish a resume state and drop all but the newest two, unless the trainer has rotated it away by now."""
    local, rel = work.folder(cell).resume(step), f"{cell.name}/resume/step_{step}"
    try:
        _send(work, cell, local, f"resume/step_{step}")
    except (FileNotFoundError, ValueError):
        if is_complete(local):
            raise
        logger.info("%s: resume state %d is gone, a later one will be published", cell.name, step)
        _remove(work, rel)
    drop_old_resumes(work, cell)


def drop_old_resumes(work: Work, cell: Cell) -> None:
    """Remove every stored resume state older than the newest two whole ones, halves of killed uploads included."""
    kept = work.store.numbered(f"{cell.name}/resume", "step_")[-KEPT_RESUMES:]
    for name in work.store.backend.folders(f"{cell.name}/resume"):
        number = name.removeprefix("step_")
        if kept and number.isdecimal() and int(number) < kept[0]:
            _remove(work, f"{cell.name}/resume/{name}")


def _remove(work: Work, rel: str) -> None:
    for name in sorted(work.store.backend.list(rel), key=lambda n: n != "MANIFEST.json"):
        work.store.backend.remove(f"{rel}/{name}")


def publish_open_files(work: Work, cell: Cell) -> None:
    """Add the rollouts and the log lines that the store lacks; their manifests come when the cell has ended."""
    folder = work.folder(cell)
    if work.store.has(f"{cell.name}/logs") or work.store.has(f"{cell.name}/rollouts"):
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
