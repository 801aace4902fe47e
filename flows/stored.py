"""What a store says it holds: cells, their experiment, and which cells of it were asked for."""

import json
from collections.abc import Sequence

from evaluation.errors import InputError
from flows.experiments import EXPERIMENTS
from training.cell import Cell
from training.experiment import Experiment
from training.store import Store


def stored_cells(store: Store) -> list[Cell]:
    """Return the cells of which a whole folder is stored, as its manifest configures them.

    Raises:
        InputError: there is none.
    """
    found: dict[str, Cell] = {}
    for rel in store.folders():
        name = rel.partition("/")[0]
        manifest = store.manifest(rel) if name not in found and name != "reports" else None
        if manifest is not None and manifest.cell_config is not None:
            found[name] = Cell.model_validate(manifest.cell_config)
    if not found:
        raise InputError("store", store.url, "holds no cell of an experiment", "give the URL that a run was given")
    return list(found.values())


def find_experiment(store: Store, stored: Sequence[Cell], asked: str | None) -> Experiment:
    """Return the experiment to report on.

    Raises:
        InputError: an unknown one, or no single one fits what is stored.
    """
    if asked is not None and asked not in EXPERIMENTS:
        raise InputError("experiment", asked, "unknown experiment", f"use one of {', '.join(sorted(EXPERIMENTS))}")
    reported = [name for name in EXPERIMENTS if store.read(f"reports/{name}/finding.json") is not None]
    fitting = reported or _smallest([e for e in EXPERIMENTS.values() if set(stored) <= set(_grid(e, stored))])
    if asked is None and len(fitting) != 1:
        known = ", ".join(fitting) or "none of the registered ones"
        raise InputError("store", store.url, f"fits {known}", "name one with --experiment")
    return EXPERIMENTS[asked or fitting[0]]


def planned_cells(store: Store, experiment: Experiment, stored: Sequence[Cell]) -> tuple[Cell, ...]:
    """Return the cells that were asked for: of the stored finding, else as registered, else the stored seeds' grid.

    Raises:
        InputError: the stored cells are not this experiment's.
    """
    grid = _grid(experiment, stored)
    if not set(stored) & set(grid):
        raise InputError("experiment", experiment.name, f"no cell of it is in {store.url}", "name another experiment")
    rel = f"reports/{experiment.name}"
    asked = _reported(store.read(f"{rel}/finding.json")) or _registered(store.read(f"{rel}/registered.json"))
    return tuple(cell for cell in grid if asked is None or cell.name in asked)


def _reported(raw: bytes | None) -> set[str] | None:
    """Return the cells of a stored finding; None if there is none, or it is damaged (it is about to be rebuilt)."""
    try:
        return None if raw is None else {run["cell"] for run in json.loads(raw)["runs"]}
    except (ValueError, KeyError, TypeError):
        return None


def _registered(raw: bytes | None) -> set[str] | None:
    """Return the cells that were asked for before training; None if that is not stored, or damaged."""
    try:
        return None if raw is None else set(json.loads(raw)["cells"])
    except (ValueError, KeyError, TypeError):
        return None


def _smallest(fitting: Sequence[Experiment]) -> list[str]:
    """Return the names of the smallest grids: what is stored of `full` would also fit `ladder`."""
    sizes = {e.name: len(e.cells()) for e in fitting}
    return [name for name, size in sizes.items() if size == min(sizes.values())]


def _grid(experiment: Experiment, stored: Sequence[Cell]) -> tuple[Cell, ...]:
    """Return an experiment's cells for the model and the seeds that are stored; none if it cannot have that model."""
    models = {cell.model for cell in stored if cell.benchmark == experiment.benchmark}
    num_seeds = max(experiment.num_seeds, *(cell.seed + 1 for cell in stored))
    return experiment.cells(models.pop(), num_seeds) if len(models) == 1 else ()
