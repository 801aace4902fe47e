"""The subcommands of `ablation`, a module each: `configure` declares the flags, `execute` does the work.

Whatever is slow to import (Prefect, pandas, scipy) is imported inside `execute`, so that `ablation --help`, `plan` and
every refusal answer at once.
"""

from flows.commands import doctor, evaluate, plan, publish, report, run, score, split, verify
from flows.commands.answer import Answer, Command

COMMANDS: dict[str, Command] = {
    "run": Command(run.configure, run.execute, "train, score and report an experiment here, no server needed"),
    "plan": Command(plan.configure, plan.execute, "what an experiment will train, draw, store and cost"),
    "split": Command(split.configure, split.execute, "the partition of MBPP and MBPP+"),
    "score": Command(score.configure, score.execute, "judge samples in EvalPlus's format"),
    "evaluate": Command(evaluate.configure, evaluate.execute, "draw and judge samples of any checkpoint"),
    "report": Command(report.configure, report.execute, "rebuild finding and report from what is stored"),
    "verify": Command(verify.configure, verify.execute, "check every stored folder against its manifest"),
    "publish": Command(publish.configure, publish.execute, "put a store on the Hugging Face Hub"),
    "doctor": Command(doctor.configure, doctor.execute, "what this machine can do, before anything is spent"),
}

__all__ = ["COMMANDS", "Answer", "Command"]
