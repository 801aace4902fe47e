"""What a run costs, planned and actual, as a table in the Prefect UI: hours of slots and bytes of the store."""

import logging

from prefect.artifacts import create_table_artifact

from evaluation.records import Record
from tasks.logs import parse_steps
from tasks.shown import key_of, try_to_show
from tasks.work import Work

logger = logging.getLogger(__name__)


class Planned(Record):
    """The plan's sums; a slot is a GPU where the experiment needs one, else a core."""

    unit: str
    """`GPU-hours` or `core-hours`."""
    training_h: float
    scoring_h: float
    checkpoint_gb: float
    sample_gb: float


def show_costs(work: Work, planned: Planned, *, ended: bool) -> None:
    """Show the plan's costs; once the run has ended, beside what the store says was spent."""
    try:
        training_h, checkpoint_gb, sample_gb = spent(work) if ended else (None, None, None)
    except OSError as e:
        logger.warning("what the run has cost could not be read from the store: %s", e)
        return
    rows = [
        {"what": "training", "unit": planned.unit, "planned": planned.training_h, "actual": training_h},
        {"what": "scoring", "unit": planned.unit, "planned": planned.scoring_h, "actual": None},
        {"what": "checkpoints", "unit": "GB", "planned": planned.checkpoint_gb, "actual": checkpoint_gb},
        {"what": "samples and verdicts", "unit": "GB", "planned": planned.sample_gb, "actual": sample_gb},
    ]
    told = "actual: seconds of the logged steps, bytes in the store; the time of scoring is not on record"
    key = key_of(work.experiment.name, "costs")
    try_to_show("the costs", lambda: create_table_artifact(rows, key=key, description=told))


def spent(work: Work) -> tuple[float, float, float]:
    """Return the hours of training, and the GB (10^9 bytes) of checkpoints and of samples, that the store tells of.

    Raises:
        OSError: the store is out of reach.
    """
    seconds, checkpoints, samples = 0.0, 0, 0
    for name in (*(cell.name for cell in work.cells), work.model.name):
        for path, size in work.store.backend.list(name).items():
            checkpoints += size if path.startswith("global_step_") else 0
            samples += size if path.startswith("scores/") else 0
        log = parse_steps(work.store, name, work.store.read(f"{name}/logs/steps.jsonl"))
        seconds += sum(line["seconds"] for line in log)
    return round(seconds / 3600, 3), round(checkpoints / 1e9, 6), round(samples / 1e9, 6)
