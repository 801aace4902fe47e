"""The report: the answer first, then the ladder, the curves and every number; scores.csv and finding.json beside it."""

import base64
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from evaluation.curves import Classified, classify
from evaluation.files import PARTIAL, write_json, write_text
from evaluation.findings import Finding, find, on_subset
from evaluation.given import Cost, ReportInput, SampleShown
from evaluation.markup import Table, table
from evaluation.page.document import report_page
from evaluation.results import drop_result
from evaluation.score_rows import COLUMNS, scores_csv
from evaluation.scores import Score
from evaluation.tables import (
    answer_tables,
    arms_table,
    clean_text,
    contamination_table,
    cost_table,
    forgetting_table,
    onset_table,
    overlaps_table,
    runs_table,
    scores_table,
    sharpened_text,
    sharpening_table,
    sources_table,
)

__all__ = ["COLUMNS", "Cost", "ReportInput", "SampleShown", "inline", "make_finding", "report_markdown", "write_report"]


def write_report(folder: Path, given: ReportInput) -> Finding:
    """Write report.html, report.md, its pictures, scores.csv, finding.json (and result.json) to `folder`; return it."""
    finding = make_finding(given)
    pictures = _draw_pictures(given)
    folder.mkdir(parents=True, exist_ok=True)
    for name, png in pictures.items():
        partial = folder / f"{name}{PARTIAL}"
        partial.write_bytes(png)
        partial.replace(folder / name)
    write_text(folder / "scores.csv", scores_csv(given))
    write_json(folder / "finding.json", finding)
    write_text(folder / "report.html", report_page(given, finding, _classified(given)))
    if finding.rule == "drop" and given.pairs:
        base, how = given.base.get(given.primary), {"top_k": given.top_k, "wall_minutes": given.wall_minutes}
        write_json(folder / "result.json", drop_result(given.runs, base, given.primary, given.pairs[0], **how))
    write_text(folder / "report.md", report_markdown(given, finding, {n: n for n in pictures}))
    return finding


def make_finding(given: ReportInput) -> Finding:
    """Apply the declared criterion, to all problems and to those that share nothing with training."""
    whole, clean = _find(given), given.clean.get(given.primary)
    if not clean:
        return whole
    runs = tuple(
        replace(r, scores={b: _on(clean, s) if b == given.primary else s for b, s in r.scores.items()})
        for r in given.runs
    )
    base = {b: s.restricted(clean) if b == given.primary else s for b, s in given.base.items()}
    scored = (s for r in runs for s in r.scores.get(given.primary, {}).values())
    evaluated = {p for s in (*base.values(), *scored) if s.benchmark == given.primary for p in s.problems}
    if not evaluated:
        return whole
    part = _find(replace(given, runs=runs, base=base))
    return whole.replace(clean=on_subset(part, whole, len(evaluated)))


def _on(subset: frozenset[str], scores: dict[int, Score]) -> dict[int, Score]:
    return {step: score.restricted(subset) for step, score in scores.items()}


def _find(given: ReportInput) -> Finding:
    return find(
        experiment=given.experiment,
        criterion=given.criterion,
        runs=given.runs,
        base=given.base.get(given.primary),
        benchmark=given.primary,
        protocol_sha256=given.protocols[0].sha256,
        registered_sha256=given.registered_sha256,
        arm_labels=given.arm_labels,
        pairs=given.pairs,
        missing=given.missing,
        departures=given.departures,
        clusters=given.clusters(given.primary),
    )


def _draw_pictures(given: ReportInput) -> dict[str, bytes]:
    """Return the PNGs by file name."""
    from evaluation.plots import plot_curves, plot_ladder

    curves = {"curves.png": plot_curves(given)}
    if given.criterion.rule == "drop":
        return curves
    return {"ladder.png": plot_ladder(_classified(given), given.arm_labels)} | curves


def _classified(given: ReportInput) -> list[Classified]:
    base, clusters = given.base.get(given.primary), given.clusters(given.primary)
    return [classify(r, base, given.primary, given.criterion, clusters) for r in given.runs]


def inline(pictures: dict[str, bytes]) -> dict[str, str]:
    """Return pictures as data URIs, for an artifact that cannot link to files."""
    return {n: f"data:image/png;base64,{base64.b64encode(png).decode()}" for n, png in pictures.items()}


def report_markdown(given: ReportInput, finding: Finding, links: dict[str, str]) -> str:
    """Return the report as Markdown; `links` gives each picture's address."""
    parts = [
        f"# {given.experiment}",
        f"**{finding.sentence}**",
        f"Question: {given.question}",
        *([f"![every run's class by rate and arm]({links['ladder.png']})"] if "ladder.png" in links else []),
        *(_section(t) for t in answer_tables(given, finding)),
        clean_text(finding),
        sharpened_text(given),
        _section(runs_table(given, finding)),
        *_signs(given),
        _section(onset_table(given, finding)),
        f"![pass@1 and reward by step]({links['curves.png']})",
        _section(arms_table(given)) or "There is no pair of runs to compare.",
        *(_section(forgetting_table(given, p)) for p in given.protocols),
        *(_section(sharpening_table(given, p)) for p in given.protocols),
        _section(overlaps_table(given)),
        _section(contamination_table(given)),
        *(_section(scores_table(given, p)) for p in given.protocols),
        *_lists(given, finding),
        _section(cost_table(given)),
        _section(sources_table(given)),
    ]
    return "\n\n".join(p for p in parts if p) + "\n"


def _section(shown: Table | None) -> str:
    return "" if shown is None else f"## {shown.title}\n\n{table(shown.rows)}" + (shown.note and f"\n\n{shown.note}")


def _lists(given: ReportInput, finding: Finding) -> Iterator[str]:
    for title, lines in (("Missing", finding.missing), ("Departures", given.departures), ("Notes", given.notes)):
        if lines:
            yield f"## {title}\n\n" + "\n".join(f"- {x}" for x in lines)
    if given.provenance:
        yield "## Provenance\n\n" + table([("what", "value"), *given.provenance.items()])


def _signs(given: ReportInput) -> Iterator[str]:
    """Yield what the trainers' logs show beside the classes, where there is anything."""
    lines = [f"- {run.label}: {sign}" for run in given.runs for sign in run.signs]
    if lines:
        yield "Signs in the training logs (they are told, and decide nothing):\n\n" + "\n".join(lines)
