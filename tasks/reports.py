"""From the store to the finding: evidence of every planned cell, the report, and its Prefect artifacts."""

import json
import logging
import math
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
from prefect import task
from prefect.artifacts import create_markdown_artifact, create_table_artifact
from prefect.exceptions import PrefectException

from evaluation.contamination import Contamination
from evaluation.curves import RunEvidence
from evaluation.findings import Finding
from evaluation.manifests import Provenance, Revisions, versions, write_manifest
from evaluation.report import ReportInput, draw_pictures, inline, report_markdown, write_report
from tasks.retries import ONCE_EACH
from tasks.stored import stored_score
from tasks.wandb_results import tell_wandb
from tasks.work import Work
from training.arms import ARMS, Center
from training.cell import Cell
from training.experiment import Experiment
from training.folder import Result
from training.store import Store

logger = logging.getLogger(__name__)


@task(name="report", **ONCE_EACH)
def report(
    work: Work, missing: list[str], wall_minutes: float | None = None, departures: tuple[str, ...] = ()
) -> Finding:
    """Write the report of what is stored, publish it, and show it in the UI.

    Args:
        work: what is reported on.
        missing: what is planned and not stored.
        wall_minutes: of all runs together; None keeps what an earlier report says.
        departures: of this execution, beside the experiment's own.
    """
    shared = {"split.json": Path(work.prepared.train).with_name("split.json")}
    shared["contamination.json"] = shared["split.json"].with_name("contamination.json")
    given = gather(work.store, work.experiment, work.cells, missing, work.prepared.contamination, wall_minutes)
    given = replace(given, departures=(*given.departures, *departures))
    finding = publish_report(work.store, given, work.runs / "reports" / work.experiment.name, shared)
    show(given, finding)
    tell_wandb(work, given, finding)
    return finding


def gather(
    store: Store,
    experiment: Experiment,
    cells: tuple[Cell, ...],
    missing: list[str],
    contamination: Contamination | None,
    wall_minutes: float | None = None,
) -> ReportInput:
    """Read everything the report says from the store; the wall time, unless it is given, from the last report."""
    if wall_minutes is None and (last := store.read(f"reports/{experiment.name}/result.json")) is not None:
        wall_minutes = json.loads(last).get("wall_minutes")
    model = cells[0].model
    base = {p.benchmark: s for p in experiment.protocols if (s := stored_score(store, f"{model}/scores/{p.folder}", 0))}
    clean = {b: frozenset(ids) for b, ids in contamination.clean.items()} if contamination else {}
    whole = {b: None if len(ids) == len(base[b].problems) else ids for b, ids in clean.items() if b in base}
    return ReportInput(
        experiment=experiment.name,
        question=experiment.question,
        registered_sha256=experiment.sha256,
        model=model,
        protocols=experiment.protocols,
        criterion=experiment.criterion,
        runs=tuple(evidence(store, experiment, c) for c in cells),
        base=base,
        arm_labels={a: ARMS[a].label for a in dict.fromkeys(c.arm for c in cells)},
        pairs=experiment.pairs,
        top_k=next((t.top_k for _, a in experiment.pairs[:1] for t in ARMS[a].terms if isinstance(t, Center)), None),
        wall_minutes=wall_minutes,
        clean=whole,
        missing=tuple(missing),
        departures=_departures(experiment, cells),
        provenance={"store": store.url, "registered experiment": experiment.sha256, **versions()},
    )


def _departures(experiment: Experiment, cells: tuple[Cell, ...]) -> tuple[str, ...]:
    planned = {c.name for c in experiment.cells()}
    asked = {c.name for c in cells}
    if asked == planned:
        return experiment.departures
    return (
        *experiment.departures,
        f"{len(asked)} cells were asked for; the registered experiment has {len(planned)}",
    )


def evidence(store: Store, experiment: Experiment, cell: Cell) -> RunEvidence:
    """Read what one cell left: rewards, end, scores."""
    raw = store.read(f"{cell.name}/logs/result.json")
    result = Result.model_validate_json(raw) if raw is not None else None
    end = result.end if result is not None else None
    lines = (store.read(f"{cell.name}/logs/steps.jsonl") or b"").decode("utf-8").splitlines()
    rows = [json.loads(line) for line in lines if line]
    scores = {
        p.benchmark: {
            s: found for s in cell.checkpoints if (found := stored_score(store, f"{cell.name}/scores/{p.folder}", s))
        }
        for p in experiment.protocols
    }
    return RunEvidence(
        label=cell.name,
        arm=cell.arm,
        lr=cell.lr,
        seed=cell.seed,
        steps=cell.steps,
        checkpoints=cell.checkpoints,
        rewards=tuple(_number(r["reward"]) for r in rows),
        figures=_figures(rows),
        end="diverged" if end == "diverged" else "finished" if end == "finished" else None,
        onset_step=result.onset_step if result is not None else None,
        scores=scores,
        signs=tuple(f"{s.name.replace('_', ' ')}: {s.detail}" for s in result.signs) if result is not None else (),
    )


def _figures(rows: list[dict[str, Any]]) -> dict[str, tuple[float, ...]]:
    """Return the stability signals of every step; those of sampler and learner where the log has them."""
    found = {name: tuple(_number(r.get(name)) for r in rows) for name in ("grad_norm", "entropy")}
    names = ("logprob_gap", "head_mass") if any(r.get("sampler") for r in rows) else ()
    return found | {name: tuple(_number((r.get("sampler") or {}).get(name)) for r in rows) for name in names}


def _number(value: object) -> float:
    return float(value) if isinstance(value, int | float | str) else math.nan


def publish_report(store: Store, given: ReportInput, out: Path, shared: dict[str, Path]) -> Finding:
    """Write the report locally and replace the one in the store."""
    shutil.rmtree(out, ignore_errors=True)
    finding = write_report(out, given)
    for name, path in shared.items():
        if path.is_file():
            shutil.copyfile(path, out / name)
    write_manifest(
        out,
        "report",
        Provenance(fingerprint=given.registered_sha256, revisions=Revisions(model=given.model, datasets={})),
    )
    store.publish(out, f"reports/{given.experiment}")
    return finding


def show(given: ReportInput, finding: Finding) -> None:
    """Put the report and the table of cells into the Prefect UI; an unreachable server costs the picture only."""
    key = given.experiment.replace("_", "-")
    rows = [
        {"cell": r.cell, "class": r.class_, "onset step": r.onset_step, "why": r.why, "signs": "; ".join(seen.signs)}
        for seen, r in zip(given.runs, finding.runs, strict=True)
    ]
    try:
        markdown = report_markdown(given, finding, inline(draw_pictures(given)))
        create_markdown_artifact(markdown, key=f"{key}-report", description=finding.sentence)
        create_table_artifact(rows, key=f"{key}-cells", description="every planned cell")
    except (httpx.HTTPError, PrefectException) as e:
        logger.warning("the report is stored, but could not be shown in the Prefect UI: %s", e)


def rebuild(store: Store, experiment: Experiment, cells: tuple[Cell, ...], out: Path) -> Finding:
    """Build finding and report again from the store alone (`ablation report`)."""
    rel = f"reports/{experiment.name}"
    shared = {}
    contamination = None
    out.mkdir(parents=True, exist_ok=True)
    for name in ("split.json", "contamination.json"):
        raw = store.read(f"{rel}/{name}")
        if raw is not None:
            shared[name] = out.parent / name
            shared[name].write_bytes(raw)
            if name == "contamination.json":
                contamination = Contamination.model_validate_json(raw)
    given = gather(store, experiment, cells, missing_of(store, experiment, cells), contamination)
    return publish_report(store, given, out, shared)


def missing_of(store: Store, experiment: Experiment, cells: tuple[Cell, ...]) -> list[str]:
    """Name what is planned and not stored, without the run directories."""
    model = cells[0].model
    bases = [p for p in experiment.protocols if stored_score(store, f"{model}/scores/{p.folder}", 0) is None]
    found = [f"{model}/global_step_0 ({p.benchmark})" for p in bases]
    for cell in cells:
        run = evidence(store, experiment, cell)
        if run.end is None:
            found.append(f"{cell.name} (not ended)")
            continue
        for step in run.expected:
            lacking = [p.benchmark for p in experiment.protocols if step not in run.scores[p.benchmark]]
            found += [f"{cell.name}/global_step_{step} ({b})" for b in lacking]
    return found
