"""`ablation doctor`: what this machine can do, before anything is spent on finding out."""

import argparse

from flows.commands.answer import Answer
from flows.commands.flags import add_data
from flows.parameters import Parameters


def configure(parser: argparse.ArgumentParser) -> None:
    """Declare the flags."""
    parser.add_argument("--experiment", default="smoke", help="whose needs decide; default smoke")
    parser.add_argument("--model", help="registry token of another base model")
    parser.add_argument("--runs", metavar="DIR", help="run directories; default ./runs/EXPERIMENT")
    parser.add_argument("--store", metavar="URL", help="store to try; default: where this experiment would put it")
    parser.add_argument("--resume", action="store_true", help="prove here that a resumed cell equals an unbroken one")
    add_data(parser)


def execute(args: argparse.Namespace) -> Answer:
    """Answer with every check; exit 3 when this machine lacks what is needed, 1 when a proof fails on it."""
    words = ("experiment", "model", "runs", "store", "mbpp", "mbpp_plus")
    parameters = Parameters(**{word: getattr(args, word) for word in words})
    from flows.commands.checks import examine_machine
    from flows.commands.places import examine_places

    checks = [*examine_machine(parameters), *examine_places(parameters)]
    if args.resume:
        from flows.commands.proof import prove_resume

        checks += prove_resume()
    failed = {c.kind for c in checks if c.needed and not c.ok}
    document = {"schema": "doctor/1", "ok": not failed, "checks": [c.model_dump(mode="json") for c in checks]}
    lines = [f"{'ok  ' if c.ok else 'FAIL' if c.needed else 'no  '} {c.name}: {c.detail}" for c in checks]
    lines.append(f"{parameters.experiment} {'cannot' if failed else 'can'} run here")
    return Answer(document, "\n".join(lines), 3 if "machine" in failed else 1 if failed else 0)
