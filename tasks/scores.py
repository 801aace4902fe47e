"""Scoring: one Prefect task a checkpoint; the evaluation child behind them is shared, so that start-up is paid once."""

import logging
import sys
import threading
import time
from pathlib import Path

from prefect import task
from prefect.cache_policies import NO_CACHE

from evaluation.errors import AblationError, Stopped
from evaluation.manifests import is_complete
from evaluation.requests import Request, Unit, write_request
from tasks.launch import STOPPING, ChildFailed, run_to_end
from tasks.settings import child_environment, settings
from tasks.work import Work
from training.cell import Cell

logger = logging.getLogger(__name__)

LINGER_S = 600.0


@task(name="score", task_run_name="score {label}", cache_policy=NO_CACHE, persist_result=False)
def score_checkpoint(work: Work, cell: Cell | None, step: int, label: str, child: "EvaluationChild") -> None:
    """Draw and judge one checkpoint under every protocol, and publish its scores."""
    score(work, cell, step, child)


def score(work: Work, cell: Cell | None, step: int, child: "EvaluationChild") -> None:
    """Score what the store lacks of one checkpoint.

    Raises:
        ChildFailed: the evaluation ended without this score.
    """
    lacking = [p for p in work.experiment.protocols if not work.store.has(work.score_rel(cell, p, step))]
    if not lacking:
        return
    path, revision = _model_of(work, cell, step)
    name = cell.name if cell else work.model.name
    units = [
        Unit(
            label=f"{name}/global_step_{step}",
            cell=cell.name if cell else None,
            global_step=step,
            model_path=path,
            model_revision=revision,
            protocol=p,
            provenance=work.identity(cell).provenance(cell.name if cell else None, step),
            out=str(work.runs / "scores" / name / p.folder / f"global_step_{step}"),
        )
        for p in lacking
    ]
    child.score(units)
    for unit, protocol in zip(units, lacking, strict=True):
        work.store.publish(Path(unit.out), work.score_rel(cell, protocol, step))


def _model_of(work: Work, cell: Cell | None, step: int) -> tuple[str, str | None]:
    """Return where the weights are: the base model, this disk, or a copy fetched from the store."""
    if cell is None:
        return work.files.path, work.files.revision
    here = work.folder(cell).checkpoint(step)
    if is_complete(here):
        return str(here), None
    fetched = work.runs / "fetched" / cell.name / f"global_step_{step}"
    return str(work.store.fetch(f"{cell.name}/global_step_{step}", fetched)), None


class EvaluationChild:
    """One `python -m evaluation.run`, started when there is something to score, fed through its request file."""

    def __init__(self, work: Work) -> None:
        self.folder = work.runs / "evaluation"
        gpu = work.model.needs_gpu
        self.request = Request(
            prompt=work.prompt,
            problems=work.prepared.benchmarks,
            units=(),
            engine="vllm" if gpu else "transformers",
            device="cuda" if gpu else "cpu",
            num_threads=1,
            judge_workers=max(1, settings().cores - 1) if gpu else 1,
            cache=str(work.runs / "data" / "references"),
            linger_s=LINGER_S,
            closed=False,
        )
        self.lock = threading.Lock()
        self.thread: threading.Thread | None = None
        self.error: AblationError | None = None

    def score(self, units: list[Unit]) -> None:
        """Wait until every unit's folder is complete.

        Raises:
            ChildFailed: the child gave a unit up.
            Stopped: the flow is being torn down.
        """
        for unit in units:
            (Path(unit.out) / "failure.txt").unlink(missing_ok=True)
        with self.lock:
            self.error = None
            kept = [u for u in self.request.units if u.out not in {x.out for x in units}]
            self._write(units=(*kept, *units))
        while True:
            open_units = [u for u in units if not is_complete(Path(u.out))]
            if not open_units:
                return
            for unit in open_units:
                failure = Path(unit.out) / "failure.txt"
                if failure.is_file():
                    raise ChildFailed(failure.read_text(encoding="utf-8").strip())
            if STOPPING.is_set():
                raise Stopped("signal=TERM: stopped while scoring; the same command goes on")
            self._ensure_running()
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
        argv = [sys.executable, "-m", "evaluation.run", str(self.folder)]
        try:
            run_to_end(argv, log=self.folder / "evaluation.log", env=child_environment(1))
        except ChildFailed as e:
            logger.info("evaluation: %s", e)  # told to the task of the unit by its failure.txt
        except AblationError as e:
            self.error = e
