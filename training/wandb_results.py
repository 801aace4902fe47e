"""Add what scoring and the criterion found to the cells' W&B runs: `python -m training.wandb_results FILE`.

FILE is a list of what to tell, one entry a cell: `run` (what names it), `dir`, `steps` (rows with `train/global_step`),
`summary`, and `done`, a file that gets a copy of the entry once it is told.
"""

import argparse
import importlib
import json
import sys
from pathlib import Path
from typing import Any

from evaluation.errors import MachineError
from evaluation.files import write_json
from evaluation.program import run_program


def main(argv: list[str] | None = None) -> int:
    """Tell every entry, and return the exit code."""
    parser = argparse.ArgumentParser(prog="python -m training.wandb_results", description="Add results to W&B runs.")
    parser.add_argument("file", type=Path)
    args = parser.parse_args(argv)
    return run_program(lambda: tell(json.loads(args.file.read_text(encoding="utf-8"))))


def tell(entries: list[dict[str, Any]]) -> int:
    """Resume each cell's run by its id, add the rows and the summary, and end it.

    Raises:
        MachineError: W&B refuses, or cannot be reached.
    """
    wandb = importlib.import_module("wandb")
    for entry in entries:
        try:
            run = wandb.init(**entry["run"], dir=entry["dir"])
        except wandb.Error as e:
            fix = "set WANDB_API_KEY, or WANDB_MODE=offline"
            raise MachineError("report_to", "wandb", " ".join(str(e).split())[:300], fix) from e
        run.define_metric("eval/*", step_metric="train/global_step")
        for row in entry["steps"]:
            run.log(row)
        run.summary.update(entry["summary"])
        run.finish()
        write_json(Path(entry["done"]), entry)
    return 0


if __name__ == "__main__":
    sys.exit(main())
