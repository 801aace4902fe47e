"""`ablation plan EXPERIMENT`: the grid and its cost; needs no GPU, network, server or data."""

import argparse

from evaluation.errors import InputError
from flows.commands.answer import Answer, rate, table
from flows.commands.flags import add_parameters, parameters_of
from flows.planning import Plan, make_plan


def configure(parser: argparse.ArgumentParser) -> None:
    """Declare the flags."""
    add_parameters(parser)
    parser.add_argument("--hosts", type=int, metavar="N", help="also how long it takes on N hosts")
    parser.add_argument("--slots", type=int, metavar="M", help="of M slots (GPUs, or cores) each; default 1")


def execute(args: argparse.Namespace) -> Answer:
    """Answer with the plan."""
    for field in ("hosts", "slots"):
        value = getattr(args, field)
        if value is not None and value < 1:
            raise InputError(field, value, "nothing runs on fewer than one", "use 1 or more")
    if args.slots is not None and args.hosts is None:
        raise InputError("slots", args.slots, "of how many hosts", "add --hosts N")
    parameters = parameters_of(args)
    plan = make_plan(parameters, args.hosts, args.slots)
    return Answer.of(plan, render(plan, on_service=parameters.backend != "local"))


def render(plan: Plan, *, on_service: bool = False) -> str:
    """Return the plan as a person reads it."""
    rows = [("cell", "lr", "seed", "steps", "epochs", "checkpoints", "hours")]
    rows += [
        (
            c.name,
            rate(c.lr),
            str(c.seed),
            str(c.steps),
            f"{c.epochs:g}",
            f"{len(c.checkpoints)} ({c.checkpoints[0]}..{c.checkpoints[-1]})",
            f"{c.hours:.3g}",
        )
        for c in plan.cells
    ]
    t = plan.totals
    parts = ", ".join(f"{name} {count:,}" for name, count in plan.samples_by_benchmark.items())
    hours = f"{t.gpu_hours:,.1f} GPU-hours" if t.gpu_hours else f"{t.core_hours:,.2f} core-hours, no GPU"
    lines = [
        table(rows),
        "",
        f"{t.cells} cells, {t.checkpoints} checkpoints and the base; {plan.samples_per_checkpoint:,} samples a "
        f"checkpoint ({parts}), {t.samples:,} in all, {plan.score_hours:.3g} hours a checkpoint",
        f"{hours}; stored: {t.checkpoint_gb:,.3g} GB of checkpoints, {t.sample_gb:,.3g} GB of samples; "
        f"on local disks {t.resume_gb:,.3g} GB of resume states",
    ]
    if on_service:
        lines.append("trained by the service: the cells' hours are those of a GPU here; its own are not known before")
    if plan.against:
        groups = (("below", plan.against.below), ("at", plan.against.equal), ("above", plan.against.above))
        told = "; ".join(f"{len(g)} {word} ({', '.join(map(rate, g))})" for word, g in groups if g)
        lines.append(f"rates against the headline runs' {rate(plan.against.headline_lr)}: {told}")
    if plan.budget_minutes:
        lines.append(f"budget: {plan.budget_minutes} minutes of wall time for all runs together")
    if plan.schedule:
        s = plan.schedule
        lines.append(
            f"on {s.slots} slots: {s.makespan_h:,.3g} hours; no number of slots beats {s.critical_path_h:,.3g}"
        )
    lines += ["", "assumed:"]
    lines += [f"  {name} = {a.value:g} {a.unit}: {a.source}" for name, a in plan.assumptions.items()]
    return "\n".join(lines)
