"""Training one cell: write its folder, take up another host's state if there is one, and run its child to the end."""

import importlib.util
import logging
import sys
import time

from prefect import task

from evaluation.errors import IncompleteError, InputError
from evaluation.files import write_json
from evaluation.manifests import is_complete
from tasks.children import Tail
from tasks.launch import locked, on_device, run_to_end
from tasks.progress import Board
from tasks.retries import ONCE_EACH
from tasks.settings import child_environment, settings
from tasks.shown import link
from tasks.work import Work
from training.cell import Cell
from training.folder import CellFile, RunFolder, Runtime

logger = logging.getLogger(__name__)

SMALL = 10_000_000
"""Parameters below which a step takes a second, and a resume state between two checkpoints is not worth its time."""


@task(name="train", tags=["train"], task_run_name="train {cell.name}", **ONCE_EACH)
def train_cell(work: Work, cell: Cell, board: Board) -> None:
    """Train a cell to its end, from wherever it is; it publishes nothing itself."""
    train(work, cell, board)


def train(work: Work, cell: Cell, board: Board) -> None:
    """Hold the cell's folder and run the trainer until the cell has ended on this disk.

    Raises:
        InputError: the folder holds another configuration.
        IncompleteError: the experiment's budget is spent.
        ChildFailed, ChildDied: the trainer did not get there.
        Fenced: another host has taken the cell over.
        Stopped: the flow is being torn down; the trainer has saved.
    """
    folder = work.folder(cell)
    # The child inherits the lock: a killed flow's trainer may still be saving.
    with locked(folder.root / "cell.lock") as held:
        write_folder(work, cell)
        if work.ended_here(cell):
            return
        if work.end_by is not None and time.time() >= work.end_by:
            raise IncompleteError(
                f"budget_minutes={work.experiment.budget_minutes}: spent before {cell.name} has ended"
            )
        work.fence.claim(cell.name, folder.root)
        fetch_resume(work, cell)
        runtime, tail = runtime_of(work, cell), Tail(cell.name, folder.root / "train.log")
        link("folder", cell.name, f"{work.store.url}/{cell.name}", "checkpoints, logs, rollouts and scores of the cell")
        with on_device(runtime.device == "cuda", runtime.num_processes) as (env, fds):
            run_to_end(
                command(runtime, folder),
                log=folder.root / "train.log",
                env=child_environment(threads(work), settings().report_to, cell.backend) | env,
                keep_fds=(held, *fds),
                on_tick=lambda: tick(work, cell, board, tail),
            )
        tail.tell(at_once=True)
    board.finish(cell.name)


def tick(work: Work, cell: Cell, board: Board, tail: Tail) -> None:
    """Show how far the trainer is and what it says, and end it (it saves) where another host has taken its cell over.

    Raises:
        Fenced: it has.
    """
    work.fence.look(cell.name)
    board.show(cell.name, work.folder(cell).root / "progress.json")
    tail.tell()


def command(runtime: Runtime, folder: RunFolder) -> list[str]:
    """Return what trains the cell in `folder`: one process, or the launcher of several."""
    module = "training.run" if runtime.num_processes == 1 else "training.launch"
    return [sys.executable, "-m", module, str(folder.root)]


def threads(work: Work) -> int:
    """CPU threads of a child: small cells run side by side, one a core."""
    return 4 if work.needs_gpu else 1


def write_folder(work: Work, cell: Cell) -> None:
    """Write cell.json (refusing another one) and runtime.json.

    Raises:
        InputError: with the fields that differ; or the cell's steps cannot be dealt out among that many GPUs.
    """
    folder, runtime = work.folder(cell), runtime_of(work, cell)
    runtime.share(cell.grpo)
    identity = work.identity(cell)
    mine = CellFile(cell=cell, prompt=work.prompt, split_sha256=identity.split_sha256, revisions=identity.revisions)
    if difference := work.difference_here(cell):
        raise InputError(
            "runs", folder.root, f"holds another configuration ({difference})", "use another --runs folder"
        )
    if not folder.cell_json.is_file():
        write_json(folder.cell_json, mine)
    write_json(folder.runtime_json, runtime)


def runtime_of(work: Work, cell: Cell) -> Runtime:
    """Return where and how a cell runs on this host; none of it changes a number."""
    here = settings()
    far = cell.backend != "local"  # a service keeps the states, as often as there are checkpoints
    gpu, small = work.trains_on_gpu, far or work.model.num_parameters < SMALL
    return Runtime(
        model_path=work.files.path,
        model_revision=work.files.revision,
        problems_path=work.prepared.train,
        device="cuda" if gpu else "cpu",
        num_processes=settings().gpus_per_cell if gpu else 1,
        num_threads=threads(work),
        micro_batch=None if gpu else 64 if small else 4,
        sampler="vllm" if gpu and importlib.util.find_spec("vllm") else "transformers",
        caged=here.caged,
        resume_every=None if small else 10 if gpu else 1,
        end_by=min((t for t in (here.end_by, work.end_by) if t is not None), default=None),
        report_to=here.report_to,
        experiment=work.experiment.name,
    )


def fetch_resume(work: Work, cell: Cell) -> None:
    """Take up another host's cell, where the store has a later resume state than this disk; and rollouts lost here."""
    folder = work.folder(cell)
    step = max(work.store.numbered(f"{cell.name}/resume", "step_"), default=0)
    here = max((s for s in folder.resumes() if is_complete(folder.resume(s))), default=0)
    if step > here:
        work.store.fetch(f"{cell.name}/resume/step_{step}", folder.resume(step))
        folder.logs.mkdir(parents=True, exist_ok=True)
        folder.steps_jsonl.write_bytes((folder.resume(step) / "steps.jsonl").read_bytes())
        logger.info("%s: goes on from step %d, fetched from the store", cell.name, step)
    if not max(step, here):
        return
    for name in work.store.backend.list(f"{cell.name}/rollouts"):
        if not (folder.rollouts / name).exists():
            work.store.backend.get(f"{cell.name}/rollouts/{name}", folder.rollouts / name)
