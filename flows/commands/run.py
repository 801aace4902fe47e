"""`ablation run EXPERIMENT`: the whole flow in this process; the same command goes on where it was stopped."""

import argparse
import importlib
import logging

from evaluation.errors import AblationError
from flows.commands.answer import Answer
from flows.commands.flags import add_parameters, parameters_of


def configure(parser: argparse.ArgumentParser) -> None:
    """Declare the flags."""
    add_parameters(parser)
    parser.add_argument("--runs", metavar="DIR", help="run directories, one a cell; default ./runs/EXPERIMENT")
    parser.add_argument("--store", metavar="URL", help="where whole folders go; default file://RUNS/store")


def execute(args: argparse.Namespace) -> Answer:
    """Run it and answer with the classes, the finding and where the report is."""
    parameters = parameters_of(args)
    from flows import embedded
    from tasks.settings import prepare_prefect

    if "debug" not in args:
        prepare_prefect()
        importlib.import_module("prefect.main")  # configures the logging that the filter goes on top of
        for handler in logging.getLogger().handlers:
            handler.addFilter(without_tracebacks)
    outcome = embedded.run(parameters)
    document = {
        "schema": "run/1",
        "experiment": parameters.experiment,
        "store": outcome.store,
        "report": outcome.report,
        "finding": outcome.finding,
        "cells": outcome.classes,
        "completed": outcome.completed,
        "message": outcome.message,
    }
    lines = [f"{name}: {word}" for name, word in outcome.classes.items()]
    lines += [outcome.message, f"report: {outcome.report}" if outcome.report else f"store: {outcome.store}"]
    return Answer(document, "\n".join(lines), outcome.exit_code)


def without_tracebacks(record: logging.LogRecord) -> bool:
    """Keep Prefect from telling a failure twice on the console: the answer, or the error line, says it once."""
    if not record.name.startswith("prefect."):
        return True
    error = record.exc_info[1] if record.exc_info else None
    if isinstance(error, AblationError | KeyboardInterrupt) or "Finished in state" in record.getMessage():
        return False
    record.exc_info = None
    return True
