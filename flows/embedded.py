"""The whole flow in this process, with a Prefect server of its own or the configured one: `ablation run`."""

import logging

from evaluation.errors import AblationError, Stopped
from evaluation.files import check_writable
from evaluation.records import Record
from flows.experiments import FLOWS
from flows.parameters import Parameters
from tasks.settings import prepare_prefect, settings

logger = logging.getLogger(__name__)


class RunOutcome(Record):
    """What `ablation run` answers."""

    completed: bool
    message: str
    store: str
    report: str | None
    finding: str | None
    classes: dict[str, str]
    exit_code: int


def run(parameters: Parameters, *, quiet: bool = False) -> RunOutcome:
    """Run the flow here and say how it ended.

    Raises:
        AblationError: nothing could be started, or an audit failed.
        Stopped: a signal; the children have saved.
    """
    prepare_prefect()
    from prefect import flow, tags
    from prefect.client.schemas.objects import State
    from prefect.exceptions import TerminationSignal

    from flows.ablation import RUNNER, Outcome, places, run_ablation, verdict
    from tasks.data import check_machine, check_service
    from tasks.progress import Board
    from tasks.server import ensure_server

    if not logger.isEnabledFor(logging.DEBUG):
        logging.getLogger("prefect").propagate = False  # what we tell in a line, it tells in tracebacks
        logging.getLogger("tasks.children").setLevel(logging.WARNING)  # on a terminal there are the bars
    store, runs = places(parameters)
    # Also the first thing that the flow does; but it takes seconds to get there.
    check_service(parameters.grid, settings())
    check_machine(parameters.spec, parameters.grid, settings())
    check_writable("runs", runs)  # before the store, which is in there unless another is named
    store.check_writable()
    board = Board(quiet)
    board.say("starting")
    ensure_server()
    ended: list[Outcome | AblationError] = []

    @flow(
        name=FLOWS[parameters.spec.criterion.rule],
        flow_run_name=f"{FLOWS[parameters.spec.criterion.rule]} {parameters.experiment}",
        task_runner=RUNNER,
        persist_result=False,
    )
    def embedded() -> State:
        state, result = verdict(lambda: run_ablation(parameters, board))
        ended.append(result)
        return state

    try:
        with tags("ablation", parameters.experiment):
            state = embedded(return_state=True)
    except TerminationSignal as e:
        raise Stopped("signal=TERM: stopped, what was running has saved; the same command goes on") from e
    if not ended:
        raise RuntimeError(f"the flow ended without a result: {state.message}")
    if isinstance(ended[0], AblationError):
        raise ended[0]
    outcome = ended[0]
    rel = f"{store.url}/reports/{parameters.experiment}"
    return RunOutcome(
        completed=not outcome.missing,
        message=outcome.message,
        store=store.url,
        report=f"{rel}/report.md",
        finding=f"{rel}/finding.json",
        classes={r.cell: r.class_ for r in outcome.finding.runs},
        exit_code=outcome.exit_code,
    )
