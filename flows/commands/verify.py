"""`ablation verify STORE`: every stored folder against its manifest, bytes included."""

import argparse
import logging

from evaluation.errors import InputError
from flows.commands.answer import Answer
from training.store import open_store

log = logging.getLogger(__name__)


def configure(parser: argparse.ArgumentParser) -> None:
    """Declare the flags."""
    parser.add_argument("store", help="URL or path of a store")


def execute(args: argparse.Namespace) -> Answer:
    """Answer with what is wrong; exit 1 if anything is."""
    store = open_store(args.store)
    found = store.verify(lambda rel: log.info("checking %s", rel))
    if found.folders == 0:
        raise InputError("store", store.url, "holds no folder of an experiment", "give the URL that a run was given")
    lines = [f"{p.path}: {p.kind}: {p.detail}" for p in found.problems]
    lines.append(f"{found.folders} folders, {len(found.problems)} problems")
    return Answer.of(found, "\n".join(lines), 0 if found.ok else 1)
