"""The one plan: split, audits, every cell trained, each checkpoint published and scored as soon as it exists, report.

The body is a level-triggered loop: what the plan wants, minus what the store has, is submitted as tasks, each once.
Task states decide nothing. So a retry, a rerun and a second host all do the same: whatever is missing.
"""

import time
from dataclasses import dataclass, field
from pathlib import Path

from prefect.futures import PrefectConcurrentFuture

from evaluation.findings import Finding
from flows.parameters import Parameters
from tasks.cells import train_cell
from tasks.checkpoints import publish_checkpoint
from tasks.data import audit, check_machine, resolve_model, split
from tasks.launch import STOPPING
from tasks.progress import Board
from tasks.reports import report
from tasks.scores import EvaluationChild, score_checkpoint
from tasks.settings import settings
from tasks.work import Work
from training.cell import MODELS, Cell
from training.store import Store, open_store

LOOK_EVERY_S = 0.5


@dataclass(frozen=True)
class Outcome:
    """How a flow run ended, by what the store has."""

    finding: Finding
    missing: tuple[str, ...]
    failures: tuple[str, ...]
    """Messages of tasks that failed, for the reason of what is missing."""

    @property
    def message(self) -> str:
        """One line: what is missing and why, or the finding."""
        if not self.missing:
            return self.finding.sentence
        why = f"; {self.failures[0]}" if self.failures else ""
        return f"{len(self.missing)} missing: {', '.join(self.missing[:4])}{why}; run it again to do the rest"


def run_ablation(parameters: Parameters, board: Board) -> Outcome:
    """Do whatever of the experiment is missing, and report.

    Raises:
        AblationError: nothing could be started, or an audit failed.
    """
    STOPPING.clear()
    try:
        work = prepare_work(parameters)
        board.say(f"{parameters.experiment}: {len(work.cells)} cells, store {work.store.url}")
        board.say(audit(work))
        failures = reconcile(work, board, parameters.max_parallel_cells or slots(work))
        missing = work.missing()
        finding = report(work, missing)
    except BaseException:  # cancelled, SIGTERM, Ctrl-C: the children save and end at once
        STOPPING.set()
        raise
    return Outcome(finding, tuple(missing), tuple(failures))


def prepare_work(parameters: Parameters) -> Work:
    """Check the machine, write the split, resolve the model, and refuse folders of another run."""
    experiment, cells = parameters.spec, parameters.grid
    store, runs = places(parameters)
    check_machine(experiment, cells, store, settings())
    prepared = split(experiment, runs / "data", parameters.mbpp, parameters.mbpp_plus)
    files, prompt = resolve_model(MODELS[cells[0].model], experiment.benchmark, runs)
    work = Work(experiment, cells, runs, store, prepared, files, prompt)
    work.refuse_others()
    return work


def places(parameters: Parameters) -> tuple[Store, Path]:
    """Return the store and the local run directories."""
    runs = Path(parameters.runs or Path("runs") / parameters.experiment).absolute()
    return open_store(parameters.store or (runs / "store").as_uri()), runs


def slots(work: Work) -> int:
    """Return how many cells this machine serves at a time: one a GPU, or one a core."""
    here = settings()
    return max(1, len(here.gpus) if work.model.needs_gpu else here.cores)


@dataclass
class _Round:
    """What has been submitted so far."""

    training: dict[str, PrefectConcurrentFuture] = field(default_factory=dict)
    publishing: dict[tuple[str, int], PrefectConcurrentFuture] = field(default_factory=dict)
    scoring: dict[tuple[str, int], PrefectConcurrentFuture] = field(default_factory=dict)

    @property
    def futures(self) -> list[PrefectConcurrentFuture]:
        return [*self.training.values(), *self.publishing.values(), *self.scoring.values()]

    def training_now(self) -> int:
        # Never `future.state` in a loop: until the end it asks the API, and an outage would end the flow.
        return sum(not f.wrapped_future.done() for f in self.training.values())


def reconcile(work: Work, board: Board, max_training: int) -> list[str]:
    """Submit what is missing until nothing is; return the messages of what failed."""
    now, child = _Round(), EvaluationChild(work)
    try:
        while True:
            # Read before the look: what ends after it is seen by the next one.
            over = all(f.wrapped_future.done() for f in now.futures)
            submitted = _submit(work, board, child, now, max_training)
            if over and not submitted:
                break
            time.sleep(LOOK_EVERY_S)
        for future in now.futures:
            future.wait()
    finally:
        child.close()
    return [str(f.state.message) for f in now.futures if not f.state.is_completed()]


def _submit(work: Work, board: Board, child: EvaluationChild, now: _Round, max_training: int) -> int:
    """Submit a task for each difference between plan and store, once; return how many."""
    before = len(now.futures)
    _score_once(work, None, 0, child, now, [])
    for cell in work.cells:
        if cell.name not in now.training and now.training_now() < max_training and work.result(cell) is None:
            now.training[cell.name] = train_cell.submit(work, cell, board)
        for step in cell.checkpoints:
            _submit_step(work, cell, step, child, now)
    return len(now.futures) - before


def _submit_step(work: Work, cell: Cell, step: int, child: EvaluationChild, now: _Round) -> None:
    key = (cell.name, step)
    if key in now.scoring:
        return
    published = work.published(cell, step)
    if not published and key not in now.publishing and work.ready(cell, step):
        now.publishing[key] = publish_checkpoint.submit(work, cell, step)
    if published or key in now.publishing:
        after = [now.publishing[key]] if key in now.publishing else []
        _score_once(work, cell, step, child, now, after)


def _score_once(
    work: Work,
    cell: Cell | None,
    step: int,
    child: EvaluationChild,
    now: _Round,
    after: list[PrefectConcurrentFuture],
) -> None:
    name = cell.name if cell else work.model.name
    if (name, step) not in now.scoring and not work.scored(cell, step):
        label = f"{name} step {step}"
        now.scoring[name, step] = score_checkpoint.submit(work, cell, step, label, child, wait_for=after)
