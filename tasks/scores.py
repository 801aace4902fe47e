"""Scoring: one Prefect task a checkpoint; the evaluation child behind them is shared, so that start-up is paid once."""

import contextlib
import importlib.util
import logging
import shutil
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from prefect import task

from evaluation.errors import AblationError, Stopped
from evaluation.manifests import damaged, is_complete
from evaluation.request import FAILURE, Request, Unit, write_request
from tasks.launch import STOPPING, ChildDied, ChildFailed, locked, on_device, run_to_end
from tasks.progress import Drawing
from tasks.retention import reading, spare
from tasks.retries import ONCE_EACH, retriable
from tasks.settings import child_environment, settings
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
def score_checkpoint(work: Work, cell: Cell | None, step: int, label: str, child: "EvaluationChild") -> None:
    """Draw and judge one checkpoint under every protocol, and publish its scores."""
    score(work, cell, step, child)


def score(work: Work, cell: Cell | None, step: int, child: "EvaluationChild") -> None:
    """Score what the store lacks of one checkpoint.

    Raises:
        ChildFailed: the evaluation ended without this score.
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
        held = [reuse_samples(work, cell, step, p, out) for p, out in outs.items()]
        unused = contextlib.nullcontext(("every sample is stored", None))
        with unused if all(held) else model_of(work, cell, step) as (path, revision):
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
            drawing = Drawing(f"{name} step {step}", units, child.log)
            child.score(units, drawing.tick)
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


class EvaluationChild:
    """One `python -m evaluation.run`, started when there is something to score, fed through its request file."""

    def __init__(self, work: Work, name: str = "evaluation") -> None:
        gpu = self.needs_gpu = work.needs_gpu
        self.folder = work.runs / name
        here = settings()
        # With a GPU of its own the child may keep it; one that a cell needs goes back as soon as nothing is to do.
        linger_s = 0.0 if gpu and len(here.gpus) <= here.gpus_per_cell else LINGER_S
        self.request = Request(
            prompt=work.prompt,
            problems=work.prepared.benchmarks,
            units=(),
            engine="vllm" if gpu and importlib.util.find_spec("vllm") else "transformers",
            device="cuda" if gpu else "cpu",
            num_threads=1,
            judge_workers=max(1, settings().cores - 1) if gpu else 1,
            caged=settings().caged,
            cache=str(work.runs / "data" / "references"),
            linger_s=linger_s,
            closed=False,
        )
        self.lock = threading.Lock()
        self.thread: threading.Thread | None = None
        self.error: AblationError | None = None

    @property
    def log(self) -> Path:
        """What the child writes."""
        return self.folder / "evaluation.log"

    def score(self, units: list[Unit], on_tick: Callable[[], None] = lambda: None) -> None:
        """Wait until every unit's folder is complete, calling `on_tick` as long.

        Raises:
            ChildFailed: the child gave a unit up.
            ChildDied: the child was killed again and again.
            Stopped: the flow is being torn down.
        """
        for unit in units:
            (Path(unit.out) / FAILURE).unlink(missing_ok=True)
        with self.lock:
            self.error = None
            kept = [u for u in self.request.units if u.out not in {x.out for x in units}]
            self._write(units=(*kept, *units))
        while waiting := [u for u in units if not is_complete(Path(u.out))]:
            for unit in waiting:
                failure = Path(unit.out) / FAILURE
                if failure.is_file():
                    raise ChildFailed(failure.read_text(encoding="utf-8").strip())
            if STOPPING.is_set():
                raise Stopped("signal=TERM: stopped while scoring; the same command goes on")
            self._ensure_running()
            on_tick()
            time.sleep(0.2)

    def close(self) -> None:
        """Tell the child that nothing more will come, and wait for it."""
        with self.lock:
            if self.request.units:
                self._write(closed=True)
            thread = self.thread
        if thread is not None:
            thread.join()

    def _write(self, **changes: object) -> None:
        self.request = self.request.replace(**changes)
        write_request(self.folder, self.request)

    def _ensure_running(self) -> None:
        with self.lock:
            if self.error is not None:
                raise self.error
            if self.thread is None or not self.thread.is_alive():
                # The leash ends a child with the thread that started it, so this one stays until the child has ended.
                self.thread = threading.Thread(target=self._run, name="evaluation", daemon=True)
                self.thread.start()

    def _run(self) -> None:
        """Run the child once to its end; `error` holds why if it did not end by its own decision."""
        units = len(self.request.units)
        try:
            # The child inherits the lock: a killed flow's child may still be writing into the same folders.
            with locked(self.folder / "evaluation.lock") as held, on_device(self.needs_gpu) as (env, fds):
                run_to_end(
                    [sys.executable, "-m", "evaluation.run", str(self.folder)],
                    log=self.log,
                    env=child_environment(1) | env,
                    keep_fds=(held, *fds),
                )
        except ChildFailed as e:
            given_up = [u for u in self.request.units if (Path(u.out) / FAILURE).is_file()]
            if not given_up:
                self.error = e  # no unit's fault, and starting it again would end the same way
        except AblationError as e:
            self.error = e
        except OSError as e:
            self.error = ChildDied(f"evaluation={units} units: could not be started ({e}); read {self.folder}")
