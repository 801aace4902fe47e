"""The one plan: split, audits, every cell trained, each checkpoint published and scored as it appears, report."""

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from prefect.client.schemas.objects import State
from prefect.exceptions import Abort
from prefect.runtime import flow_run
from prefect.states import Completed, Failed
from prefect.task_runners import ThreadPoolTaskRunner

from evaluation.errors import AblationError, InputError, MachineError
from evaluation.findings import Finding
from evaluation.program import as_ablation_error
from flows.loop import Future, Loop, Units, error_of
from flows.parameters import Parameters
from flows.planning import make_plan
from tasks.cells import train_cell
from tasks.checkpoints import publish_checkpoint, publish_records
from tasks.clock import Clock
from tasks.costs import Planned, show_costs
from tasks.data import audit, check_machine, check_service, resolve_model, split
from tasks.launch import STOPPING, locked
from tasks.progress import Board
from tasks.registration import register
from tasks.remote import check_workers, score_in_pool, train_in_pool
from tasks.reports import report
from tasks.retention import spare_all
from tasks.scores import evaluator_of, score_checkpoint
from tasks.settings import settings
from tasks.work import Work
from training.cell import MODELS, Cell
from training.store import Store, open_store

logger = logging.getLogger(__name__)

RUNNER: Any = ThreadPoolTaskRunner(max_workers=96)
"""Room for every task that the loop lets run at a time: cells, scores, publishing."""
REMOTE_LOOK_EVERY_S = 5.0
"""Other hosts' checkpoints are seen by listing the store."""
LOCK_PATIENCE_S = 30.0
"""A killed flow's successor may start before the kernel has freed its lock."""


@dataclass(frozen=True)
class Outcome:
    """How a flow run ended, by what the store has."""

    finding: Finding
    missing: tuple[str, ...]
    failures: tuple[str, ...]
    """Messages of tasks that failed, for the reason of what is missing."""
    exit_code: int = 0
    """1 where something is missing; 3 where this machine lacks what it takes."""
    over: str | None = None
    """That the budget is spent, where it is the reason of what is missing: running again does no more."""

    @property
    def message(self) -> str:
        """One line: what is missing and why, or the finding."""
        if self.missing and self.over:
            return f"{_missing(self.missing)}; {self.over}"
        return incomplete(self.missing, self.failures) if self.missing else self.finding.sentence


def verdict(action: Callable[[], Outcome]) -> tuple[State, Outcome | AblationError]:
    """Run a flow's body; return the flow's final state, and what it rests on.

    A failure that a person can act on is one line and no traceback; an internal error is raised.
    """
    try:
        outcome = action()
    except Exception as e:
        known = as_ablation_error(e)
        if known is None:
            raise
        return Failed(message=str(known)), known
    end = Failed if outcome.missing else Completed  # a failed task's future would not fail the flow by itself
    return end(message=outcome.message), outcome


def incomplete(missing: Sequence[str], failures: Sequence[str]) -> str:
    """Return the one line that says what is missing and why."""
    why = f"; {failures[0]}" if failures else ""
    return f"{_missing(missing)}{why}; run it again to do the rest"


def _missing(missing: Sequence[str]) -> str:
    return f"{len(missing)} missing: {', '.join(missing[:4])}" + (", ..." if len(missing) > 4 else "")


def run_ablation(parameters: Parameters, board: Board) -> Outcome:
    """Do whatever of the experiment is missing, and report.

    Raises:
        AblationError: nothing could be started, or an audit failed.
    """
    remote = settings().launcher == "deployment"
    with stopping_children():
        store, runs = places(parameters)
        with alone(runs):
            if remote:
                check_workers(parameters.experiment, parameters.grid)
            check_service(parameters.grid, settings())
            clock = Clock(runs / "wall.json", parameters.spec.budget_minutes)
            parameters = parameters.replace(end_by=clock.end_by)
            work = prepare_work(parameters, store, runs)
            board.say(f"{parameters.experiment}: {len(work.cells)} cells, store {work.store.url}")
            board.say(audit(work))
            board.say(register(work))
            show_costs(work, planned_costs(parameters), ended=False)
            with clock:
                failures = run_remote(work, parameters) if remote else run_here(work, board, parameters)
            missing = work.missing()
            show_costs(work, planned_costs(parameters), ended=True)
            code = 3 if any(isinstance(f, MachineError) for f in failures) else 1
            told = tuple(" ".join(str(f).split()) for f in failures)
            over = over_budget(clock) if missing and clock.spent else None
            finding = report(work, missing, clock.minutes, (over,) if over else ())
            return Outcome(finding, tuple(missing), told, code if missing else 0, over)


@contextmanager
def alone(runs: Path) -> Iterator[None]:
    """Hold the run directories for this flow run.

    Prefect starts a flow run twice where its worker reports a death twice, or where a server that was away believes a
    living one lost: the later process steps aside and leaves the run's state to the one that is at work.

    Raises:
        InputError: another flow run is at work there.
        Abort: this very flow run is.
    """
    lock, mine = runs / "flow.lock", flow_run.get_id() or ""
    with ExitStack() as held:
        try:
            held.enter_context(locked(lock, patience_s=LOCK_PATIENCE_S))
        except InputError:
            if mine and lock.read_text(encoding="utf-8") == mine:
                raise Abort(f"flow run {mine} goes on in another process") from None
            raise
        lock.write_text(mine, encoding="utf-8")
        yield


def over_budget(clock: Clock) -> str:
    """Return what the report and the flow's message say of a budget that is spent."""
    return f"the budget of {clock.budget_minutes:g} minutes of wall time for all runs together is spent"


def planned_costs(parameters: Parameters) -> Planned:
    """Return what the plan says that the run will cost."""
    plan = make_plan(parameters)
    return Planned(
        unit="GPU-hours" if plan.totals.gpu_hours else "core-hours",
        training_h=round(sum(c.hours for c in plan.cells), 3),
        scoring_h=round((plan.totals.checkpoints + 1) * plan.score_hours, 3),
        checkpoint_gb=plan.totals.checkpoint_gb,
        sample_gb=plan.totals.sample_gb,
    )


@contextmanager
def stopping_children() -> Iterator[None]:
    """On any way out but the regular one (cancelled, SIGTERM, Ctrl-C) tell the children to save and end, at once.

    Prefect's task runner waits for its threads, and these for their children: without a word they would train on.
    """
    STOPPING.clear()
    try:
        yield
    except BaseException:
        STOPPING.set()
        raise


def places(parameters: Parameters) -> tuple[Store, Path]:
    """Return the store and the local run directories."""
    runs = Path(parameters.runs or Path("runs") / parameters.folder).absolute()
    return open_store(parameters.store or (runs / "store").as_uri()), runs


def prepare_work(parameters: Parameters, store: Store, runs: Path, *, here: bool = False) -> Work:
    """Check the machine, write the split, resolve the model, and refuse folders of another run.

    Args:
        parameters: what was asked.
        store: where whole folders go.
        runs: local run directories.
        here: cells or scores run on this host whatever the launcher.
    """
    experiment, cells = parameters.spec, parameters.grid
    check_machine(experiment, cells, settings().replace(launcher="process") if here else settings())
    store.check_writable()
    prepared = split(experiment, runs / "data", parameters.mbpp, parameters.mbpp_plus, parameters.gsm8k)
    files, prompt = resolve_model(MODELS[cells[0].model], experiment.benchmark, runs)
    work = Work(experiment, cells, runs, store, prepared, files, prompt, end_by=parameters.end_by)
    work.refuse_others()
    return work


def slots(work: Work) -> int:
    """Return how many cells this machine serves at a time: one a core, or what GPUs there are but one that scores."""
    here = settings()
    return max(1, (len(here.gpus) - 1) // here.gpus_per_cell if work.trains_on_gpu else here.cores)


def run_here(
    work: Work, board: Board, parameters: Parameters, *, training: bool = True, scoring: bool = True
) -> list[Exception]:
    """Train and publish, score, or both, in children of this process; return why what failed did."""
    evaluator = evaluator_of(work)
    spare_all(work)

    def score(cell: Cell | None, step: int, after: Sequence[Future]) -> Future:
        return submit(score_checkpoint, work, cell, step, label(work, cell, step), evaluator, after=after)

    units = Units(
        train=(lambda cell: submit(train_cell, work, cell, board)) if training else None,
        publish=(lambda cell, step: submit(publish_checkpoint, work, cell, step)) if training else None,
        seal=(lambda cell: submit(publish_records, work, cell)) if training else None,
        score=score if scoring else None,
    )
    here = settings()
    no_spare = (
        training and scoring and work.trains_on_gpu and len(here.gpus) <= here.gpus_per_cell
    )  # beside a cell nothing is scored
    loop = Loop(work, units, parameters.max_parallel_cells or slots(work), scores_first=no_spare)
    with stopping_children(), evaluator:
        loop.run()
    return failures_of(loop)


def run_remote(work: Work, parameters: Parameters, *, training: bool = True) -> list[Exception]:
    """Train and score in child flow runs of the pools; each trainer publishes what lies on its own disk."""
    words = parameters.model_dump(mode="json")

    def score(cell: Cell | None, step: int, after: Sequence[Future]) -> Future:
        return submit(score_in_pool, work, cell, step, label(work, cell, step), words, after=after)

    train = (lambda cell: submit(train_in_pool, work, cell, words)) if training else None
    units = Units(train=train, publish=None, seal=None, score=score)
    unlimited = len(work.cells)
    loop = Loop(work, units, parameters.max_parallel_cells or unlimited, look_every_s=REMOTE_LOOK_EVERY_S)
    loop.run()
    return failures_of(loop)


def submit(task: Any, *args: object, after: Sequence[Future] = ()) -> Future:
    """Submit a Prefect task (its generic types do not survive the runner), to start when `after` have completed."""
    return task.submit(*args, wait_for=list(after))


def label(work: Work, cell: Cell | None, step: int) -> str:
    """Return the name of a score's task."""
    return f"{cell.name if cell else work.model.name} step {step}"


def failures_of(loop: Loop) -> list[Exception]:
    """Return why tasks failed; the reasons explain, and decide nothing."""
    failed = []
    for error in filter(None, map(error_of, loop.futures)):
        known = as_ablation_error(error) if isinstance(error, Exception) else None
        failed.append(known or RuntimeError(f"{type(error).__name__}: {error}"))
        logger.warning("%s", failed[-1])
    return failed


def resolve_cell(parameters: Parameters, name: str) -> Cell:
    """Return a planned cell by its name.

    Raises:
        InputError: no such cell in the experiment.
    """
    for cell in parameters.grid:
        if cell.name == name:
            return cell
    raise InputError("cell", name, f"not a cell of {parameters.experiment}", "use a name of the plan")
