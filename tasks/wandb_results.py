"""W&B, where it is chosen: pass@k of every checkpoint, and the class, in the run that has the cell's training curve."""

import json
import logging
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from evaluation.curves import RunEvidence
from evaluation.errors import MachineError
from evaluation.files import write_json
from evaluation.findings import Finding
from evaluation.report import ReportInput
from evaluation.scores import Score
from tasks.launch import ChildFailed, error_line, run_child
from tasks.settings import child_environment, settings
from tasks.work import Work
from training.reporters import refuse_absent, wandb_run

logger = logging.getLogger(__name__)

PATIENCE_S = 300.0
"""The report is stored by then; an unreachable service may not keep the flow."""


def tell_wandb(work: Work, given: ReportInput, finding: Finding) -> None:
    """Tell what was found of every cell that has ended; whatever goes wrong costs these curves only."""
    if "wandb" not in settings().report_to:
        return
    entries = [e for e in entries_of(work, given, finding) if not _told(e)]
    if not entries:
        return
    file, log, end = work.runs / "wandb.json", work.runs / "wandb.log", time.monotonic() + PATIENCE_S

    def look() -> None:
        if time.monotonic() > end:
            raise ChildFailed(f"wandb=silent: nothing ended within {PATIENCE_S:.0f} s; read {log}")

    write_json(file, entries)
    start = log.stat().st_size if log.is_file() else 0
    try:
        refuse_absent(["wandb"])
        argv = [sys.executable, "-m", "training.wandb_results", str(file)]
        if run_child(argv, log=log, env=child_environment(1, ["wandb"]), on_tick=look):
            raise ChildFailed(error_line(log, start) or f"wandb=died: read {log}")
    except (ChildFailed, MachineError) as e:
        logger.warning("pass@k and class were not told to W&B: %s", e)


def entries_of(work: Work, given: ReportInput, finding: Finding) -> Iterator[dict[str, Any]]:
    """Yield what `training.wandb_results` is to say of each cell that has ended."""
    classes = {r.cell: r for r in finding.runs}
    cells = {c.name: c for c in work.cells}
    for run in given.runs:
        if run.end is None:
            continue
        found, folder = classes[run.label], work.folder(cells[run.label]).root
        steps = sorted({0, *(s for scores in run.scores.values() for s in scores)})
        yield {
            "run": wandb_run(work.identity(cells[run.label]), given.experiment),
            "dir": str(folder),
            "done": str(folder / "wandb_told.json"),
            "steps": [{"train/global_step": s, **_figures(given, run, s)} for s in steps],
            "summary": {
                "class": found.class_,
                "onset_step": found.onset_step,
                "why": found.why,
                "signs": list(run.signs),
            },
        }


def _figures(given: ReportInput, run: RunEvidence, step: int) -> dict[str, float]:
    """Return pass@k of one checkpoint, or of the base model at step 0, by benchmark and k."""
    figures = {}
    for protocol in given.protocols:
        scores = run.scores.get(protocol.benchmark, {})
        score: Score | None = given.base.get(protocol.benchmark) if step == 0 else scores.get(step)
        for k in protocol.reported_ks if score else ():
            value = score.estimate(score.suite, k).value if score else None
            if value is not None:
                figures[f"eval/{protocol.benchmark}/pass@{k}"] = value
    return figures


def _told(entry: dict[str, Any]) -> bool:
    """Whether the same was told before: a report that is made again would only repeat it."""
    done = Path(entry["done"])
    return done.is_file() and json.loads(done.read_text(encoding="utf-8")) == entry
