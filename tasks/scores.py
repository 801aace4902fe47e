"""Scoring: one Prefect task a checkpoint; the evaluation behind them is shared, so that start-up is paid once."""

import contextlib
import importlib.util
import logging
import shutil
from collections.abc import Iterator

from prefect import task

from evaluation.manifests import damaged, is_complete
from evaluation.request import DRAWN, Request, Unit
from tasks.evaluator import Evaluator
from tasks.progress import Drawing
from tasks.retention import reading, spare
from tasks.retries import ONCE_EACH, retriable
from tasks.settings import settings
from tasks.stored import reuse_samples
from tasks.work import Work
from training.cell import Cell

logger = logging.getLogger(__name__)

LINGER_S = 600.0


@task(
    name="score",
    tags=["score"],
    task_run_name="score {label}",
    retries=2,
    retry_delay_seconds=[1, 5],
    retry_condition_fn=retriable,
    **ONCE_EACH,
)
def score_checkpoint(work: Work, cell: Cell | None, step: int, label: str, evaluator: Evaluator) -> None:
    """Draw and judge one checkpoint under every protocol, and publish its scores."""
    score(work, cell, step, evaluator)


def score(work: Work, cell: Cell | None, step: int, evaluator: Evaluator) -> None:
    """Score what the store lacks of one checkpoint.

    Raises:
        ChildFailed: the evaluation gave this score up.
        ChildDied: the evaluation was killed again and again.
        Stopped: the flow is being torn down; what was drawn is kept.
    """
    lacking = [p for p in work.experiment.protocols if not work.store.has(work.score_rel(cell, p, step))]
    if not lacking:
        return
    name = cell.name if cell else work.model.name
    provenance = work.identity(cell).provenance(cell.name if cell else None, step)
    outs = {p: work.runs / work.score_rel(cell, p, step) for p in lacking}
    if not all(is_complete(out) for out in outs.values()):
        held = [out for p, out in outs.items() if reuse_samples(work, cell, step, p, out)]
        for out in held:
            (out / DRAWN).touch()
        unused = contextlib.nullcontext(("every sample is stored", None))
        with unused if len(held) == len(outs) else model_of(work, cell, step) as (path, revision):
            units = [
                Unit(
                    label=f"{name}/global_step_{step}",
                    cell=provenance.cell,
                    global_step=step,
                    model_path=path,
                    model_revision=revision,
                    protocol=p,
                    provenance=provenance,
                    out=str(out),
                )
                for p, out in outs.items()
            ]
            drawing = Drawing(f"{name} step {step}", units, evaluator.log("draw"))
            evaluator.score(units, drawing.tick)
            drawing.finish()
    for protocol, out in outs.items():
        work.store.publish(out, work.score_rel(cell, protocol, step))
    if cell is not None:
        spare(work, cell, step)


@contextlib.contextmanager
def model_of(work: Work, cell: Cell | None, step: int) -> Iterator[tuple[str, str | None]]:
    """Yield where the weights are: the base model, this disk, or a copy fetched from the store and removed again."""
    if cell is None:
        yield work.files.path, work.files.revision
        return
    here = work.folder(cell).checkpoint(step)
    with reading(here) as held:
        if held and is_complete(here):
            difference = damaged(here)
            if difference is None:
                yield str(here), None
                return
            logger.warning("%s: %s; the store's copy is scored", here, difference)
    fetched = work.runs / "fetched" / cell.name / f"global_step_{step}"
    yield str(work.store.fetch(f"{cell.name}/global_step_{step}", fetched)), None
    shutil.rmtree(fetched)


def evaluator_of(work: Work, name: str = "evaluation", *, units_come: bool = True) -> Evaluator:
    """Return what scores the checkpoints of a piece of work.

    Args:
        work: whose checkpoints.
        name: of its folder below the run directories.
        units_come: False where the first units are all there will be: the GPU goes back when they are drawn.
    """
    gpu, here = work.needs_gpu, settings()
    # With a GPU of its own it may keep it; one that a cell needs goes back as soon as nothing is to be drawn.
    linger_s = 0.0 if gpu and len(here.gpus) <= here.gpus_per_cell else LINGER_S
    request = Request(
        prompt=work.prompt,
        problems=work.prepared.benchmarks,
        units=(),
        engine="vllm" if gpu and importlib.util.find_spec("vllm") else "transformers",
        device="cuda" if gpu else "cpu",
        num_threads=1,
        judge_workers=max(1, here.cores - 1) if gpu else 1,
        caged=here.caged,
        cache=str(work.runs / "data" / "references"),
        linger_s=linger_s,
        closed=not units_come,
    )
    return Evaluator(work.runs / name, request, needs_gpu=gpu)
