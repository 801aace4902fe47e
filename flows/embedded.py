"""The whole flow in this process, with Prefect's temporary server or the configured one: `ablation run`."""

from evaluation.records import Record
from flows.parameters import Parameters
from tasks.settings import prepare_prefect, settings


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
        KeyboardInterrupt: a signal; the children have saved.
    """
    prepare_prefect()
    from flows.ablation import Outcome, places, run_ablation
    from tasks.data import check_machine
    from tasks.progress import Board

    store, _ = places(parameters)
    check_machine(parameters.spec, parameters.grid, store, settings())  # before the seconds that Prefect takes to start
    from prefect import flow
    from prefect.task_runners import ThreadPoolTaskRunner

    @flow(
        name="lr-ablation",
        flow_run_name=f"lr-ablation {parameters.experiment}",
        task_runner=ThreadPoolTaskRunner(max_workers=64),
        persist_result=False,
    )
    def embedded() -> Outcome:
        return run_ablation(parameters, Board(quiet))

    outcome = embedded()
    rel = f"{store.url}/reports/{parameters.experiment}"
    return RunOutcome(
        completed=not outcome.missing,
        message=outcome.message,
        store=store.url,
        report=f"{rel}/report.md",
        finding=f"{rel}/finding.json",
        classes={r.cell: r.class_ for r in outcome.finding.runs},
        exit_code=1 if outcome.missing else 0,
    )
