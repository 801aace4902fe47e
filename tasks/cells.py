"""Training one cell: write its folder, run its child, seal its logs in the store."""

import logging
import sys
from collections.abc import Callable

from prefect import task
from prefect.cache_policies import NO_CACHE

from evaluation.errors import InputError
from evaluation.files import write_json
from evaluation.manifests import is_complete
from tasks.checkpoints import publish_open_files
from tasks.launch import locked, one_gpu, run_to_end
from tasks.progress import Board
from tasks.settings import child_environment, settings
from tasks.work import Work
from training.cell import Cell
from training.folder import CellFile, Runtime

logger = logging.getLogger(__name__)


@task(name="train", task_run_name="train {cell.name}", cache_policy=NO_CACHE, persist_result=False)
def train_cell(work: Work, cell: Cell, board: Board) -> None:
    """Train a cell to its end, from wherever it is, and seal its logs and rollouts in the store."""
    train(work, cell, board)


def train(work: Work, cell: Cell, board: Board) -> None:
    """Hold the cell's folder, run the trainer, publish what it closed.

    Raises:
        InputError: the folder holds another configuration.
        ChildFailed, ChildDied: the trainer did not get there.
    """
    folder = work.folder(cell)
    with locked(folder.root / "cell.lock") as held:
        write_folder(work, cell)
        fetch_resume(work, cell)
        log = folder.root / "train.log"
        argv = [sys.executable, "-m", "training.run", str(folder.root)]

        def tick() -> None:
            board.show(cell.name, folder.root / "progress.json")

        def start(env: dict[str, str], fds: tuple[int, ...]) -> None:
            threads = child_environment(1) | env
            run_to_end(argv, log=log, env=threads, keep_fds=(held, *fds), on_tick=tick)

        _on_device(work, start)
        board.finish(cell.name)
        publish_open_files(work, cell)
        for part in (folder.logs, folder.rollouts):
            work.store.publish(part, f"{cell.name}/{part.name}")


def _on_device(work: Work, start: Callable[[dict[str, str], tuple[int, ...]], None]) -> None:
    if not work.model.needs_gpu:
        start({}, ())
        return
    with one_gpu(settings().gpus, work.runs / ".gpus") as (env, fds):
        start(env, fds)


def write_folder(work: Work, cell: Cell) -> None:
    """Write cell.json (refusing another one) and runtime.json.

    Raises:
        InputError: with the fields that differ.
    """
    folder = work.folder(cell)
    mine = CellFile(
        cell=cell,
        prompt=work.prompt,
        split_sha256=work.prepared.split_sha256,
        revisions=work.identity(cell).revisions,
    )
    if folder.cell_json.is_file():
        found = CellFile.model_validate_json(folder.cell_json.read_text(encoding="utf-8"))
        if found.identity.fingerprint != mine.identity.fingerprint:
            raise InputError("runs", folder.root, "holds another configuration", "use another --runs folder")
    else:
        write_json(folder.cell_json, mine)
    gpu = work.model.needs_gpu
    runtime = Runtime(
        model_path=work.files.path,
        model_revision=work.files.revision,
        problems_path=work.prepared.train,
        device="cuda" if gpu else "cpu",
        num_threads=1 if not gpu else 4,
        micro_batch=8 if gpu else 64 if work.model.num_parameters < 10_000_000 else 4,
        sampler="vllm" if gpu else "transformers",
    )
    write_json(folder.runtime_json, runtime)


def fetch_resume(work: Work, cell: Cell) -> None:
    """Take up another host's cell: where this disk has no resume state and the store has, fetch the newest."""
    folder = work.folder(cell)
    stored = work.store.numbered(f"{cell.name}/resume", "step_")
    here = [s for s in folder.resumes() if is_complete(folder.resume(s))]
    if not stored or (here and max(here) >= max(stored)):
        return
    step = max(stored)
    work.store.fetch(f"{cell.name}/resume/step_{step}", folder.resume(step))
    steps = folder.resume(step) / "steps.jsonl"
    if steps.is_file() and not folder.steps_jsonl.exists():
        folder.logs.mkdir(parents=True, exist_ok=True)
        folder.steps_jsonl.write_bytes(steps.read_bytes())
    for name in work.store.backend.list(f"{cell.name}/rollouts"):
        if not (folder.rollouts / name).exists():
            work.store.backend.get(f"{cell.name}/rollouts/{name}", folder.rollouts / name)
    logger.info("%s: goes on from step %d, fetched from the store", cell.name, step)
