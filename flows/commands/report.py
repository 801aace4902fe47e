"""`ablation report STORE`: finding and report again, from what is stored; nothing is trained, drawn or judged."""

import argparse
import tempfile
from pathlib import Path

from flows.commands.answer import Answer
from flows.stored import find_experiment, planned_cells, stored_cells
from training.store import open_store


def configure(parser: argparse.ArgumentParser) -> None:
    """Declare the flags."""
    parser.add_argument("store", help="URL or path of a store")
    parser.add_argument("--experiment", help="default: the one whose report or cells are stored")


def execute(args: argparse.Namespace) -> Answer:
    """Rebuild, store and answer with the finding; exit 1 if something planned is missing."""
    store = open_store(args.store)
    stored = stored_cells(store)
    experiment = find_experiment(store, stored, args.experiment)
    cells = planned_cells(store, experiment, stored)
    store.check_writable()
    from tasks.reports import rebuild

    with tempfile.TemporaryDirectory() as scratch:
        finding = rebuild(store, experiment, cells, Path(scratch) / "report")
    lines = [f"{r.cell}: {r.class_}" for r in finding.runs]
    lines += [f"missing: {', '.join(finding.missing)}"] if finding.missing else []
    lines += [finding.sentence, f"report: {store.url}/reports/{experiment.name}/report.md"]
    return Answer.of(finding, "\n".join(lines), 1 if finding.missing else 0)
