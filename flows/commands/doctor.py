"""`ablation doctor`: what this machine can do, before anything is spent on finding out."""

import argparse

from flows.commands.answer import Answer
from flows.experiments import EXPERIMENTS
from flows.parameters import Parameters


def configure(parser: argparse.ArgumentParser) -> None:
    """Declare the flags."""
    parser.add_argument("--experiment", default="smoke", help="whose needs decide; default smoke")
    parser.add_argument("--store", metavar="URL", help="store to try; default: where this experiment would put it")
    parser.add_argument("--resume", action="store_true", help="prove here that a resumed cell equals an unbroken one")


def execute(args: argparse.Namespace) -> Answer:
    """Answer with every check; exit 3 when a needed one fails."""
    parameters = Parameters(experiment=args.experiment, store=args.store)
    from flows.commands.checks import examine

    checks = examine(parameters)
    if args.resume:
        from flows.commands.proof import prove_resume

        checks += prove_resume()
    ok = all(c.ok for c in checks if c.needed)
    document = {"schema": "doctor/1", "ok": ok, "checks": [c.model_dump(mode="json") for c in checks]}
    lines = [f"{'ok  ' if c.ok else 'FAIL' if c.needed else 'no  '} {c.name}: {c.detail}" for c in checks]
    lines.append(f"{EXPERIMENTS[args.experiment].name} {'can run here' if ok else 'cannot run here'}")
    return Answer(document, "\n".join(lines), 0 if ok else 3)
