"""The experiment as it was declared, written to the store before anything of it trains.

A report of another declaration is refused by the store (its fingerprint is the experiment's hash), so a criterion that
was changed after the runs were seen needs another store, and says so.
"""

import tempfile
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Literal

from prefect import task
from pydantic import Field, ValidationError

from evaluation.errors import InputError
from evaluation.files import write_json
from evaluation.manifests import Provenance, Revisions, write_manifest
from evaluation.records import Record
from tasks.retries import ONCE_EACH
from tasks.work import Work
from training.cell import Cell
from training.experiment import Experiment
from training.store import Store

NAME = "registered.json"


class Registered(Record):
    """`registered.json`."""

    schema_: Literal["registered/1"] = Field(default="registered/1", alias="schema")
    experiment: dict[str, Any]
    sha256: str
    """Of the canonical JSON of `experiment`."""
    cells: tuple[str, ...]
    """Those asked for."""
    begun: tuple[str, ...]
    """Those of which something was in the store already."""
    registered_at: str


@task(name="register", task_run_name="register {work.experiment.name}", **ONCE_EACH)
def register(work: Work) -> str:
    """Write what is declared to the store, once; return what was done."""
    return declare(work.store, work.experiment, work.cells)


def declare(store: Store, experiment: Experiment, cells: Sequence[Cell]) -> str:
    """Write the declaration of an experiment, unless it, or a report, is there.

    Raises:
        InputError: what is there is by another declaration: no report of these runs could be stored.
    """
    rel = f"reports/{experiment.name}"
    found = store.manifest(rel)
    if found is not None and found.fingerprint != experiment.sha256:
        where, reason = f"{store.url}/{rel}", f"is by another declaration than {experiment.sha256[:12]}"
        raise InputError("store", where, reason, "use another --store: a criterion is not changed after the runs")
    if store.backend.list(rel):
        return "registered before"
    stored = set(store.backend.folders(""))
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        registered = Registered(
            experiment=experiment.model_dump(mode="json"),
            sha256=experiment.sha256,
            cells=tuple(c.name for c in cells),
            begun=tuple(c.name for c in cells if c.name in stored),
            registered_at=datetime.now(UTC).isoformat(timespec="seconds"),
        )
        write_json(folder / NAME, registered)
        model = Revisions(model=cells[0].model, datasets={})
        write_manifest(folder, "report", Provenance(fingerprint=experiment.sha256, revisions=model))
        store.publish(folder, rel)
    return f"registered as {experiment.sha256}"


def read_registered(store: Store, experiment: Experiment) -> Registered | None:
    """Return what was registered; None if nothing was, or the record is damaged and vouches for nothing."""
    raw = store.read(f"reports/{experiment.name}/{NAME}")
    try:
        return None if raw is None else Registered.model_validate_json(raw)
    except ValidationError:
        return None


def departures(store: Store, experiment: Experiment, asked: set[str]) -> tuple[str, ...]:
    """Say in what the runs depart from what was registered before them."""
    found, planned = read_registered(store, experiment), {c.name for c in experiment.cells()}
    told = list(experiment.departures)
    if asked != planned:
        told.append(f"{len(asked)} cells were asked for; the registered experiment has {len(planned)}")
    if found is None:
        told.append("no registration from before training is stored: the hash is that of the code that made the report")
    elif found.sha256 != experiment.sha256:
        told.append(f"{found.sha256} was registered at {found.registered_at}; the report is by {experiment.sha256}")
    elif found.begun:
        told.append(f"registered at {found.registered_at}, when {len(found.begun)} cells had begun")
    return tuple(told)
