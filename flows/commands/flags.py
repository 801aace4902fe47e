"""Flags that several subcommands share, and the flow parameters that they make."""

import argparse

from flows.experiments import EXPERIMENTS
from flows.parameters import Parameters


def add_parameters(parser: argparse.ArgumentParser) -> None:
    """Declare the flow parameters: the same words as in the Prefect form."""
    parser.add_argument("experiment", help=", ".join(EXPERIMENTS))
    parser.add_argument("--model", help="registry token of another base model")
    parser.add_argument("--seeds", type=int, metavar="N", help="how many: 0 .. N-1")
    parser.add_argument("--cells", action="append", metavar="NAME[,NAME]", help="only these cells; repeatable")
    parser.add_argument("--max-parallel-cells", type=int, metavar="N", help="cells training at a time")
    parser.add_argument("--backend", choices=("local", "tinker"), default="local", help="who trains the cells")
    add_data(parser)
    add_gsm8k(parser)


def add_data(parser: argparse.ArgumentParser) -> None:
    """Declare the local files that stand in for MBPP on the hub and EvalPlus's download."""
    parser.add_argument("--mbpp", metavar="FILE", help="mbpp.jsonl; default: from the hub")
    parser.add_argument("--mbpp-plus", metavar="FILE", help="MbppPlus-v0.2.0.jsonl; default: EvalPlus's download")


def add_gsm8k(parser: argparse.ArgumentParser) -> None:
    """Declare the local folder that stands in for GSM8K on the hub."""
    parser.add_argument("--gsm8k", metavar="FOLDER", help="has gsm8k_train.jsonl, gsm8k_test.jsonl; default: the hub")


def parameters_of(args: argparse.Namespace) -> Parameters:
    """Return the checked flow parameters of a command line."""
    names = [name.strip() for value in args.cells or () for name in value.split(",")]
    return Parameters(
        experiment=args.experiment,
        model=args.model,
        seeds=args.seeds,
        cells=tuple(names) if names else None,
        max_parallel_cells=args.max_parallel_cells,
        mbpp=args.mbpp,
        mbpp_plus=args.mbpp_plus,
        gsm8k=args.gsm8k,
        backend=args.backend,
        store=getattr(args, "store", None),
        runs=getattr(args, "runs", None),
    )
