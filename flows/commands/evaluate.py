"""`ablation evaluate PATH_OR_REPO[:SUBFOLDER]`: draws and judges samples of any checkpoint, ours or not."""

import argparse

from flows.commands.answer import Answer


def configure(parser: argparse.ArgumentParser) -> None:
    """Declare the flags."""
    parser.add_argument("checkpoint", help="PATH_OR_REPO[:SUBFOLDER]")


def execute(args: argparse.Namespace) -> Answer:
    """Draw, judge and answer with the score."""
    raise NotImplementedError
