"""scores.csv: one row per cell, checkpoint, benchmark, suite, subset and k, every planned one."""

import csv
import io
from collections.abc import Iterator
from typing import Any

from evaluation.curves import RunEvidence
from evaluation.given import ReportInput
from evaluation.protocol import Protocol
from evaluation.scores import Estimate, Score, Suite
from evaluation.tables import absence

COLUMNS: tuple[str, ...] = (
    "folder", "cell", "model", "arm", "lr", "seed", "global_step", "benchmark", "suite", "subset", "k", "n",
    "num_problems", "value", "low", "high", "num_harness_errors", "protocol", "status",
)  # fmt: skip


def scores_csv(given: ReportInput) -> str:
    """Return the file; values are there exactly where the status is `done`."""
    out = io.StringIO()
    writer = csv.DictWriter(out, COLUMNS, lineterminator="\n")
    writer.writeheader()
    for protocol in given.protocols:
        base = given.base.get(protocol.benchmark)
        writer.writerows(_csv_rows(given, protocol, None, 0, base))
        for run in given.runs:
            for step in run.checkpoints:
                score = run.scores.get(protocol.benchmark, {}).get(step)
                writer.writerows(_csv_rows(given, protocol, run, step, score))
    return out.getvalue()


def _csv_rows(
    given: ReportInput, protocol: Protocol, run: RunEvidence | None, step: int, score: Score | None
) -> Iterator[dict[str, Any]]:
    clean = given.clean.get(protocol.benchmark)
    subsets: list[tuple[str, frozenset[str] | None]] = [("all", None)]
    if clean:
        subsets.append(("clean", clean))
    for suite in _suites(given, protocol):
        for subset, ids in subsets:
            found = given.estimates(protocol, score, suite, ids) if score else {}
            errors = _errors(score, ids) if score else ""
            for k in protocol.reported_ks:
                e = found.get(k)
                yield {
                    "folder": f"{run.label if run else given.model}/global_step_{step}",
                    "cell": run.label if run else "",
                    "model": given.model,
                    "arm": run.arm if run else "",
                    "lr": f"{run.lr!r}" if run else "",
                    "seed": run.seed if run else "",
                    "global_step": step,
                    "benchmark": protocol.benchmark,
                    "suite": suite,
                    "subset": subset,
                    "k": k,
                    "n": protocol.n,
                    "num_problems": e.num_problems if e else "",
                    "value": e.value if e and e.value is not None else "",
                    "low": e.low if e and e.low is not None else "",
                    "high": e.high if e and e.high is not None else "",
                    "num_harness_errors": errors,
                    "protocol": protocol.folder,
                    "status": _status(score, e, run, step),
                }


def _status(score: Score | None, estimate: Estimate | None, run: RunEvidence | None, step: int) -> str:
    """Return the row's status; failed: a problem has fewer than k judged samples, so that there is no value."""
    if score is None or estimate is None:
        return absence(run, step)
    return "failed" if estimate.value is None else "done"


def _errors(score: Score, subset: frozenset[str] | None) -> int:
    """Return the unjudged samples of the rows that the estimate rests on."""
    return sum(c.errors for p, c in score.problems.items() if subset is None or p in subset)


def _suites(given: ReportInput, protocol: Protocol) -> tuple[Suite, ...]:
    """Return the benchmark's suites as any of its scores shows them; both when nothing is scored yet."""
    scores = [s for run in given.runs for s in run.scores.get(protocol.benchmark, {}).values()]
    known = given.base.get(protocol.benchmark) or next(iter(scores), None)
    return ("base",) if known is not None and known.suite == "base" else ("base", "plus")
