"""The report: the answer first, then the ladder, the curves and every number; scores.csv and finding.json beside it."""

import base64
import csv
import io
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from evaluation.changes import SOLVED, forgetting, paired_difference
from evaluation.curves import Classified, Criterion, RunEvidence, classify
from evaluation.drop_tables import drop_tables
from evaluation.files import PARTIAL, write_json, write_text
from evaluation.findings import Finding, find
from evaluation.ladders import rate_text
from evaluation.markup import table
from evaluation.protocol import Protocol
from evaluation.results import drop_result
from evaluation.scores import Estimate, Score, Suite

COLUMNS: tuple[str, ...] = (
    "folder", "cell", "model", "arm", "lr", "seed", "global_step", "benchmark", "suite", "subset", "k", "n",
    "num_problems", "value", "low", "high", "num_harness_errors", "protocol", "status",
)  # fmt: skip


@dataclass(frozen=True)
class ReportInput:
    """Everything a report says, from what is stored."""

    experiment: str
    question: str
    registered_sha256: str
    model: str
    protocols: tuple[Protocol, ...]
    """The first is the primary one."""
    criterion: Criterion
    runs: tuple[RunEvidence, ...]
    base: dict[str, Score]
    """Of the base model, by benchmark."""
    arm_labels: dict[str, str]
    """Words for each arm, the control first."""
    pairs: tuple[tuple[str, str], ...] = ()
    """(control, treated) arms of the rule "drop", the question's first."""
    top_k: int | None = None
    """Size of the head that the treated arm uses, for result.json."""
    wall_minutes: float | None = None
    """Of all runs together, for result.json."""
    clean: dict[str, frozenset[str] | None] = field(default_factory=dict)
    """Problems of each benchmark that share no assert with training; None or absent: no such subset."""
    missing: tuple[str, ...] = ()
    departures: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    provenance: dict[str, str] = field(default_factory=dict)

    @property
    def primary(self) -> str:
        """Benchmark that the finding rests on."""
        return self.protocols[0].benchmark


def write_report(folder: Path, given: ReportInput) -> Finding:
    """Write report.md, its pictures, scores.csv, finding.json (and result.json) to `folder`; return the finding."""
    finding = make_finding(given)
    pictures = draw_pictures(given)
    folder.mkdir(parents=True, exist_ok=True)
    for name, png in pictures.items():
        partial = folder / f"{name}{PARTIAL}"
        partial.write_bytes(png)
        partial.replace(folder / name)
    write_text(folder / "scores.csv", scores_csv(given))
    write_json(folder / "finding.json", finding)
    if finding.rule == "drop" and given.pairs:
        base, how = given.base.get(given.primary), {"top_k": given.top_k, "wall_minutes": given.wall_minutes}
        write_json(folder / "result.json", drop_result(given.runs, base, given.primary, given.pairs[0], **how))
    write_text(folder / "report.md", report_markdown(given, finding, {n: n for n in pictures}))
    return finding


def make_finding(given: ReportInput) -> Finding:
    """Apply the declared criterion."""
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
    )


def draw_pictures(given: ReportInput) -> dict[str, bytes]:
    """Return the PNGs by file name."""
    from evaluation.plots import plot_curves, plot_ladder

    base = given.base.get(given.primary)
    curves = {"curves.png": plot_curves(given.runs, base, given.primary, given.arm_labels)}
    if given.criterion.rule == "drop":
        return curves
    return {"ladder.png": plot_ladder(_classified(given), given.arm_labels)} | curves


def _classified(given: ReportInput) -> list[Classified]:
    return [classify(r, given.base.get(given.primary), given.primary, given.criterion) for r in given.runs]


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
        drop_tables(given.runs, given.arm_labels, finding)
        if finding.rule == "drop"
        else _boundary_table(given, finding),
        "## Runs",
        _runs_table(given, finding),
        *_signs(given),
        f"![pass@1 and reward by step]({links['curves.png']})",
        "## The arms compared at the end\n\n" + _arms_table(given),
        *(f"## Forgetting on {p.benchmark}\n\n{_forgetting_table(given, p)}" for p in given.protocols),
        *(f"## Scores on {p.benchmark}\n\n{_scores_table(given, p)}" for p in given.protocols),
        *_lists(given, finding),
    ]
    return "\n\n".join(parts) + "\n"


def _lists(given: ReportInput, finding: Finding) -> Iterator[str]:
    for title, lines in (("Missing", finding.missing), ("Departures", given.departures), ("Notes", given.notes)):
        if lines:
            yield f"## {title}\n\n" + "\n".join(f"- {x}" for x in lines)
    if given.provenance:
        rows = [("what", "value"), *given.provenance.items()]
        yield "## Provenance\n\n" + table(rows)


def _boundary_table(given: ReportInput, finding: Finding) -> str:
    rows: list[tuple[str, ...]] = [("arm", "where it breaks")]
    rows += [(given.arm_labels[arm], b.text) for arm, b in finding.boundary.items()]
    for arm, found in finding.comparisons.items():
        rows.append((f"shift, {given.arm_labels[arm]}", f"{found.shift.replace('_', ' ')}: {found.text}"))
    if finding.min_detectable is not None:
        rows.append(("smallest shift that could have been seen", f"{finding.min_detectable:.2g} rungs"))
    return table(rows)


def _runs_table(given: ReportInput, finding: Finding) -> str:
    rows: list[tuple[str, ...]] = [("cell", "rate", "arm", "class", "onset step", "why")]
    for run, found in zip(given.runs, finding.runs, strict=True):
        onset = "" if found.onset_step is None else str(found.onset_step)
        rows.append((run.label, rate_text(run.lr), given.arm_labels[run.arm], found.class_, onset, found.why))
    return table(rows)


def _signs(given: ReportInput) -> Iterator[str]:
    """Yield what the trainers' logs show beside the classes, where there is anything."""
    lines = [f"- {run.label}: {sign}" for run in given.runs for sign in run.signs]
    if lines:
        yield "Signs in the training logs (they are told, and decide nothing):\n\n" + "\n".join(lines)


def _arms_table(given: ReportInput) -> str:
    """Return the last pass@1 of the other arms minus the control's, run by run, on the same problems."""
    rows: list[tuple[str, ...]] = [
        ("rate", "seed", "against the control", "benchmark", "pass@1, difference at the end")
    ]
    control, *others = given.arm_labels
    for protocol in given.protocols:
        ends = {(r.arm, r.lr, r.seed): r.scores.get(protocol.benchmark, {}).get(r.checkpoints[-1]) for r in given.runs}
        for run in (r for r in given.runs if r.arm in others and (control, r.lr, r.seed) in ends):
            first, second = ends[control, run.lr, run.seed], ends[run.arm, run.lr, run.seed]
            found = paired_difference(first, second) if first and second else None
            text = "no last score" if found is None else f"{found.value:+.3f} [{found.low:+.3f}, {found.high:+.3f}]"
            if found is not None and found.p is not None:
                text += f", McNemar p = {found.p:.2g}"
            rows.append((rate_text(run.lr), str(run.seed), given.arm_labels[run.arm], protocol.benchmark, text))
    if len(rows) == 1:
        return "There is no pair of runs to compare."
    return table(rows) + "\n\n95 % intervals: paired bootstrap over problems; they say nothing about other seeds."


def _forgetting_table(given: ReportInput, protocol: Protocol) -> str:
    """Return what each run's last stored checkpoint does with the problems that the base solved."""
    rows: list[tuple[str, ...]] = [("folder", "retained", "lost", "gained", "solved by neither")]
    base = given.base.get(protocol.benchmark)
    for run in given.runs:
        scores = run.scores.get(protocol.benchmark, {})
        if base is None or not scores:
            rows.append((run.label, "missing", "", "", ""))
            continue
        found = forgetting(base, scores[max(scores)])
        counts = (found.retained, found.lost, found.gained, found.neither)
        rows.append((f"{run.label}/global_step_{max(scores)}", *map(str, counts)))
    return table(rows) + f"\n\nSolved: at least {SOLVED:.0%} of a problem's judged samples pass."


def _scores_table(given: ReportInput, protocol: Protocol) -> str:
    ks, clean = protocol.reported_ks, given.clean.get(protocol.benchmark)
    extra = ("pass@1, first suite alone", *(["pass@1, clean subset"] if clean else []), "unjudged")
    rows: list[tuple[str, ...]] = [("folder", *(f"pass@{k}" for k in ks), *extra)]

    def add(name: str, score: Score | None, status: str) -> None:
        if score is None:
            rows.append((name, *(status for _ in ks), *("" for _ in extra)))
            return
        cells = [_cell(score.estimate(score.suite, k)) for k in ks]
        subset = [_cell(score.estimate(score.suite, 1, clean))] if clean else []
        rows.append((name, *cells, _cell(score.estimate("base", 1)), *subset, str(score.num_errors)))

    add(f"{given.model}/global_step_0 (base)", given.base.get(protocol.benchmark), "missing")
    for run in given.runs:
        for step in run.checkpoints:
            score = run.scores.get(protocol.benchmark, {}).get(step)
            add(f"{run.label}/global_step_{step}", score, _absence(run, step))
    return table(rows)


def _absence(run: RunEvidence | None, step: int) -> str:
    """Return why a planned score is not there: after a divergence none is expected."""
    return "diverged" if run is not None and run.end == "diverged" and step not in run.expected else "missing"


def _cell(e: Estimate) -> str:
    if e.value is None:
        return f"n < k ({e.num_problems} problems)"
    return f"{e.value:.3f} [{e.low:.3f}, {e.high:.3f}]"


def scores_csv(given: ReportInput) -> str:
    """Return scores.csv: one row per cell, checkpoint, benchmark, suite, subset and k, every planned one."""
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
            for k in protocol.reported_ks:
                e = score.estimate(suite, k, ids) if score else None
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
                    "num_harness_errors": _errors(score, ids) if score else "",
                    "protocol": protocol.folder,
                    "status": _status(score, e, run, step),
                }


def _status(score: Score | None, estimate: Estimate | None, run: RunEvidence | None, step: int) -> str:
    """Return the row's status; failed: a problem has fewer than k judged samples, so that there is no value."""
    if score is None or estimate is None:
        return _absence(run, step)
    return "failed" if estimate.value is None else "done"


def _errors(score: Score, subset: frozenset[str] | None) -> int:
    """Return the unjudged samples of the rows that the estimate rests on."""
    return sum(c.errors for p, c in score.problems.items() if subset is None or p in subset)


def _suites(given: ReportInput, protocol: Protocol) -> tuple[Suite, ...]:
    """Return the benchmark's suites as any of its scores shows them; both when nothing is scored yet."""
    scores = [s for run in given.runs for s in run.scores.get(protocol.benchmark, {}).values()]
    known = given.base.get(protocol.benchmark) or next(iter(scores), None)
    return ("base",) if known is not None and known.suite == "base" else ("base", "plus")
