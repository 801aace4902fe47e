"""`ablation run EXPERIMENT`: the whole flow in this process; the same command goes on where it was stopped."""

import argparse

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
