"""`ablation report STORE`: finding and report again, from what is stored; nothing is trained or drawn."""

import argparse

from flows.commands.answer import Answer


def configure(parser: argparse.ArgumentParser) -> None:
    """Declare the flags."""
    parser.add_argument("store", help="URL or path of a store")
    parser.add_argument("--experiment", help="default: the one whose report is stored, else the one whose cells are")


def execute(args: argparse.Namespace) -> Answer:
    """Answer with the finding."""
    raise NotImplementedError
