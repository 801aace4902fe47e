"""From the store to the finding: evidence of every planned cell, the report, and its Prefect artifacts."""

import json
import shutil
from dataclasses import replace
from pathlib import Path

from prefect import task
from prefect.artifacts import create_markdown_artifact, create_table_artifact

from evaluation.contamination import Contamination
from evaluation.findings import Finding
from evaluation.manifests import Provenance, Revisions, versions, write_manifest
from evaluation.page.explorer import chosen_problems
from evaluation.report import ReportInput, inline, report_markdown, write_report
from tasks.evidence import base_or_cell_scores, cost_of, evidence, shown_samples
from tasks.registration import NAME, departures, read_registered
from tasks.retries import ONCE_EACH
from tasks.shown import key_of, try_to_show
from tasks.wandb_results import tell_wandb
from tasks.work import Work
from training.arms import ARMS, Center
from training.cell import Cell
from training.experiment import Experiment
from training.store import Store


@task(name="report", task_run_name="report {work.experiment.name}", **ONCE_EACH)
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
    folder = work.runs / "reports" / work.experiment.name
    finding = publish_report(work.store, given, folder, shared)
    show(given, finding, folder)
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
    bases = {p.benchmark: base_or_cell_scores(store, model, p, (0,)) for p in experiment.protocols}
    base = {b: scores[0] for b, (scores, _) in bases.items() if scores}
    clean = {b: frozenset(ids) for b, ids in contamination.clean.items()} if contamination else {}
    whole = {b: None if len(ids) == len(base[b].problems) else ids for b, ids in clean.items() if b in base}
    runs = tuple(evidence(store, experiment, c) for c in cells)
    registered = read_registered(store, experiment)
    when = {"registered at": registered.registered_at} if registered is not None else {}
    given = ReportInput(
        experiment=experiment.name,
        question=experiment.question,
        registered_sha256=experiment.sha256,
        model=model,
        protocols=experiment.protocols,
        criterion=experiment.criterion,
        runs=runs,
        base=base,
        arm_labels={a: ARMS[a].label for a in dict.fromkeys(c.arm for c in cells)},
        pairs=experiment.pairs,
        top_k=next((t.top_k for _, a in experiment.pairs[:1] for t in ARMS[a].terms if isinstance(t, Center)), None),
        wall_minutes=wall_minutes,
        clean=whole,
        missing=tuple(missing),
        departures=departures(store, experiment, {c.name for c in cells}),
        provenance={"store": store.url, "registered experiment": experiment.sha256, **when, **versions()},
        contamination=contamination,
        sources=tuple(s for _, read in bases.values() for s in read),
        cost=cost_of(store, runs),
    )
    samples, read, notes = shown_samples(store, given, chosen_problems(given))
    return replace(given, samples=samples, sources=given.sources + read, notes=notes)


def publish_report(store: Store, given: ReportInput, out: Path, shared: dict[str, Path]) -> Finding:
    """Write the report locally and replace the one in the store."""
    shutil.rmtree(out, ignore_errors=True)
    finding = write_report(out, given)
    for name, path in shared.items():
        if path.is_file():
            shutil.copyfile(path, out / name)
    if (registered := store.read(f"reports/{given.experiment}/{NAME}")) is not None:
        (out / NAME).write_bytes(registered)
    write_manifest(
        out,
        "report",
        Provenance(fingerprint=given.registered_sha256, revisions=Revisions(model=given.model, datasets={})),
    )
    store.publish(out, f"reports/{given.experiment}")
    return finding


def show(given: ReportInput, finding: Finding, folder: Path) -> None:
    """Put a written report and the table of cells into the UI; an unreachable server costs the picture only."""
    key = key_of(given.experiment)
    rows = [
        {"cell": r.cell, "class": r.class_, "onset step": r.onset_step, "why": r.why, "signs": "; ".join(seen.signs)}
        for seen, r in zip(given.runs, finding.runs, strict=True)
    ]

    def create() -> None:
        pictures = {p.name: p.read_bytes() for p in folder.glob("*.png")}
        markdown = report_markdown(given, finding, inline(pictures))
        create_markdown_artifact(markdown, key=f"{key}-report", description=finding.sentence)
        create_table_artifact(rows, key=f"{key}-cells", description="every planned cell")

    try_to_show("the report, which is stored,", create)


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
    given = gather(store, experiment, cells, [], contamination)
    return publish_report(store, replace(given, missing=tuple(missing_of(given))), out, shared)


def missing_of(given: ReportInput) -> list[str]:
    """Name what is planned and not stored, without the run directories."""
    benchmarks = [p.benchmark for p in given.protocols]
    found = [f"{given.model}/global_step_0 ({b})" for b in benchmarks if b not in given.base]
    for run in given.runs:
        if run.end is None:
            found.append(f"{run.label} (not ended)")
            continue
        for step in run.expected:
            lacking = [b for b in benchmarks if step not in run.scores[b]]
            found += [f"{run.label}/global_step_{step} ({b})" for b in lacking]
    return found
