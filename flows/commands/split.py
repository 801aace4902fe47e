"""`ablation split`: who trains and who evaluates, checked against the counts and hashes of the specification."""

import argparse

from evaluation.problems import load_split
from flows.commands.answer import Answer
from flows.commands.flags import add_data


def configure(parser: argparse.ArgumentParser) -> None:
    """Declare the flags."""
    add_data(parser)


def execute(args: argparse.Namespace) -> Answer:
    """Answer with the partition."""
    split = load_split(args.mbpp, args.mbpp_plus)
    c = split.counts
    return Answer.of(
        split,
        f"train {c.train}   sha256 of ids {split.sha256.train}\n"
        f"MBPP+ {c.plus}   sha256 of ids {split.sha256.plus}\n"
        f"mbpp_test276 {c.test} (canonical test problems outside MBPP+; the canonical test split has "
        f"{c.canonical_test})   sha256 of ids {split.sha256.test}",
    )
