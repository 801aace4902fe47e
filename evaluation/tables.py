"""The tables of a report as rows of text, the first row their head: Markdown and the page show the same ones."""

from collections.abc import Iterator, Sequence

import numpy as np

from evaluation.changes import SOLVED, Sharpening, ever_solved, forgetting, paired_difference, sharpening
from evaluation.curves import RunEvidence
from evaluation.drop_tables import drop_tables
from evaluation.findings import Finding
from evaluation.given import ReportInput
from evaluation.ladders import rate_text
from evaluation.markup import Row, Table
from evaluation.protocol import Protocol
from evaluation.scores import Estimate, Score
from evaluation.statistics import sampling_error, wilson_interval

WINDOW = 10
"""Steps before and from an onset whose means are shown."""
EVIDENCE = {
    "reward": "reward",
    "entropy": "entropy",
    "grad_norm": "gradient norm",
    "mean_tokens": "tokens",
    "logprob_gap": "log-prob gap",
}
"""Columns of the step log that show how a run broke, and their words."""


def answer_tables(given: ReportInput, finding: Finding) -> tuple[Table, ...]:
    """Return the boundary of each arm and the shifts, or the limbs of the rule and what they rest on."""
    if finding.rule == "drop":
        return tuple(drop_tables(given.runs, given.arm_labels, finding))
    rows: list[Row] = [("arm", "where it breaks")]
    rows += [(given.arm_labels[arm], b.text) for arm, b in finding.boundary.items()]
    for arm, found in finding.comparisons.items():
        rows.append((f"shift, {given.arm_labels[arm]}", f"{found.shift.replace('_', ' ')}: {found.text}"))
    if finding.min_detectable is not None:
        rows.append(("smallest shift that could have been seen", f"{finding.min_detectable:.2g} rungs"))
    return (Table("Where the arms break", tuple(rows)),)


def headline(given: ReportInput, finding: Finding) -> str:
    """Return the answer in one sentence; the finding's own sentence has the figures."""
    if finding.rule == "drop":
        return f"By the declared rule: {finding.verdict or 'no verdict'}."
    parts = []
    for arm, b in finding.boundary.items():
        place = "shows no boundary on this ladder"
        if b.last_stable is not None and b.first_unstable is not None:
            place = f"breaks between {rate_text(b.last_stable)} and {rate_text(b.first_unstable)}"
        parts.append(f"{given.arm_labels[arm]} {place}")
    said = {
        "up": "the second boundary lies higher",
        "down": "the second boundary lies lower",
        "not_detectable": "a shift is not detectable",
        "not_identified": "a shift is not identified",
    }
    parts[0] = parts[0][0].upper() + parts[0][1:]
    return f"{', '.join(parts)}: {said[finding.shift]}." if len(parts) > 1 else f"{parts[0]}."


def clean_text(finding: Finding) -> str:
    """Return what the clean subset says; empty where there is none."""
    if (clean := finding.clean) is None:
        return ""
    changed = "; ".join(clean.changed) or "no run changes its class"
    answer = "the same answer" if clean.sentence == finding.sentence else clean.sentence
    return f"On the {clean.num_problems} problems that share no assert with training: {answer} ({changed})."


def runs_table(given: ReportInput, finding: Finding) -> Table:
    """Return every planned run with its class and the figures behind it."""
    rows: list[Row] = [("cell", "rate", "arm", "class", "onset step", "why")]
    for run, found in zip(given.runs, finding.runs, strict=True):
        onset = "" if found.onset_step is None else str(found.onset_step)
        rows.append((run.label, rate_text(run.lr), given.arm_labels[run.arm], found.class_, onset, found.why))
    return Table("Runs", tuple(rows))


def onset_table(given: ReportInput, finding: Finding) -> Table | None:
    """Return what the step logs show around each onset; None where nothing broke or no column is logged."""
    columns = [c for c in EVIDENCE if c == "reward" or any(c in r.figures for r in given.runs)]
    rows: list[Row] = [("cell", "class", "onset step", *(EVIDENCE[c] for c in columns))]
    for run, found in zip(given.runs, finding.runs, strict=True):
        if found.onset_step is not None and run.rewards:
            series = {**run.figures, "reward": run.rewards}
            shown = (_around(series.get(c, ()), found.onset_step) for c in columns)
            rows.append((run.label, found.class_, str(found.onset_step), *shown))
    absent = [words for c, words in EVIDENCE.items() if c not in columns]
    note = f"Mean of the {WINDOW} steps before the onset -> of the {WINDOW} from it on, finite values only."
    note += f" Not logged: {', '.join(absent)}." if absent else ""
    return Table("Around the onset", tuple(rows), note) if len(rows) > 1 else None


def _around(values: Sequence[float], onset: int) -> str:
    before, after = values[max(0, onset - 1 - WINDOW) : onset - 1], values[onset - 1 : onset - 1 + WINDOW]
    return " -> ".join(_mean_text(part) for part in (before, after))


def _mean_text(values: Sequence[float]) -> str:
    finite = [v for v in values if np.isfinite(v)]
    return f"{float(np.mean(finite)):.3g}" if finite else "not finite" if values else "none"


def arms_table(given: ReportInput) -> Table | None:
    """Return the last pass@1 of the other arms minus the control's, run by run, on the same problems."""
    rows: list[Row] = [("rate", "seed", "against the control", "benchmark", "pass@1, difference at the end")]
    control, *others = given.arm_labels
    for protocol in given.protocols:
        benchmark = protocol.benchmark
        ends = {(r.arm, r.lr, r.seed): r.scores.get(benchmark, {}).get(r.checkpoints[-1]) for r in given.runs}
        for run in (r for r in given.runs if r.arm in others and (control, r.lr, r.seed) in ends):
            first, second = ends[control, run.lr, run.seed], ends[run.arm, run.lr, run.seed]
            found = paired_difference(first, second, given.clusters(benchmark)) if first and second else None
            text = "no last score" if found is None else f"{found.value:+.3f} [{found.low:+.3f}, {found.high:+.3f}]"
            if found is not None and found.p is not None:
                text += f", McNemar p = {found.p:.2g}"
            rows.append((rate_text(run.lr), str(run.seed), given.arm_labels[run.arm], benchmark, text))
    note = "95 % intervals: paired bootstrap over problems; they say nothing about other seeds."
    return Table("The arms compared at the end", tuple(rows), note) if len(rows) > 1 else None


def last_scores(given: ReportInput, protocol: Protocol) -> Iterator[tuple[RunEvidence, int, Score]]:
    """Yield each run's last stored checkpoint and its score."""
    for run in given.runs:
        if scores := run.scores.get(protocol.benchmark, {}):
            yield run, max(scores), scores[max(scores)]


def forgetting_table(given: ReportInput, protocol: Protocol) -> Table:
    """Return what each run's last stored checkpoint does with the problems that the base solved."""
    counts = ("retained", "lost", "gained", "neither")
    rows: list[Row] = [("folder", *(f"{c}, pass@1" for c in counts), *(f"{c}, ever" for c in counts))]
    base = given.base.get(protocol.benchmark)
    for run in given.runs:
        scores = run.scores.get(protocol.benchmark, {})
        if base is None or not scores:
            rows.append((run.label, "missing", *("" for _ in rows[0][2:])))
            continue
        both = (forgetting(base, scores[max(scores)]), ever_solved(base, scores[max(scores)]))
        rows.append((f"{run.label}/global_step_{max(scores)}", *(str(getattr(f, c)) for f in both for c in counts)))
    note = (
        f"Against the base. At pass@1 a problem is solved when at least {SOLVED:.0%} of its judged samples pass; "
        "ever: when any does."
    )
    return Table(f"Forgetting on {protocol.benchmark}", tuple(rows), note)


def sharpening_table(given: ReportInput, protocol: Protocol) -> Table | None:
    """Return how pass@1 and the best of many moved against the base; None where one sample a problem is drawn."""
    base, clusters = given.base.get(protocol.benchmark), given.clusters(protocol.benchmark)
    rows: list[Row] = [("folder", "pass@1 against the base", "pass@k against the base", "k", "sharpened")]
    for run, step, score in last_scores(given, protocol):
        found = sharpening(base, score, clusters) if base else None
        if found is not None:
            rows.append((f"{run.label}/global_step_{step}", *_sharpening_cells(found)))
    note = "Sharpened: pass@1 rose while pass@k fell, each by a paired 95 % interval that leaves 0 out."
    return Table(f"Sharpening on {protocol.benchmark}", tuple(rows), note) if len(rows) > 1 else None


def sharpened_text(given: ReportInput) -> str:
    """Return which runs are sharpened, by benchmark; empty where none is."""
    found = []
    for protocol in given.protocols:
        shown = sharpening_table(given, protocol)
        if names := [row[0] for row in shown.rows[1:] if row[-1] == "yes"] if shown else []:
            found.append(f"{', '.join(names)} on {protocol.benchmark}")
    return f"Sharpened (pass@1 rose while the best of many samples fell): {'; '.join(found)}." if found else ""


def _sharpening_cells(found: Sharpening) -> Row:
    moved = (f"{d.value:+.3f} [{d.low:+.3f}, {d.high:+.3f}]" for d in (found.first, found.many))
    return *moved, str(found.k), "yes" if found.found else "no"


def scores_table(given: ReportInput, protocol: Protocol, *, ends: bool = False) -> Table:
    """Return pass@k of the base and of every planned checkpoint, or a few k of each run's last one alone."""
    every, few = protocol.reported_ks, range(0, len(protocol.reported_ks), max(1, len(protocol.reported_ks) // 3))
    ks = tuple(dict.fromkeys([*(every[i] for i in few), every[-1]])) if ends else every
    clean = given.clean.get(protocol.benchmark)
    extra = (
        "pass@1, first suite alone",
        *(["pass@1, clean subset"] if clean else []),
        "Wilson's interval" if protocol.n == 1 else "sampling error of pass@1",
        "unjudged",
    )
    rows: list[Row] = [("folder", *(f"pass@{k}" for k in ks), *extra)]

    def add(name: str, score: Score | None, status: str) -> None:
        if score is None:
            rows.append((name, *(status for _ in ks), *("" for _ in extra)))
            return
        found = given.estimates(protocol, score)
        first = given.estimates(protocol, score, "base")[1]
        subset = [estimate_text(given.estimates(protocol, score, subset=clean)[1])] if clean else []
        cells = (estimate_text(found[k]) for k in ks)
        rows.append((name, *cells, estimate_text(first), *subset, _noise_text(score), str(score.num_errors)))

    add(f"{given.model}/global_step_0 (base)", given.base.get(protocol.benchmark), "missing")
    for run in given.runs:
        for step in run.checkpoints[-1:] if ends else run.checkpoints:
            score = run.scores.get(protocol.benchmark, {}).get(step)
            add(f"{run.label}/global_step_{step}", score, absence(run, step))
    return Table(f"Scores on {protocol.benchmark}", tuple(rows), _scores_note(rows))


def _noise_text(score: Score) -> str:
    """Return what other samples would change: Wilson's interval of single answers, else the sampling error."""
    judged = list(score.judged(score.suite).values())
    if score.n == 1 and judged and all(n == 1 for n, _ in judged):
        low, high = wilson_interval(sum(c for _, c in judged), len(judged))
        return f"{low:.3f} to {high:.3f}"
    error = sampling_error(judged, 1)
    return "" if error is None else f"{error:.4f}"


def _scores_note(rows: Sequence[Row]) -> str:
    note = (
        "95 % intervals: bootstrap over problems (what other problems would change), near-duplicates together; the "
        "sampling error is what other samples of these very problems would change."
    )
    agreed = any("all agree" in cell for row in rows for cell in row)
    return note + (
        " Where all problems agree the bootstrap has no width; the bound is Wilson's for as many problems."
        if agreed
        else ""
    )


def absence(run: RunEvidence | None, step: int) -> str:
    """Return why a planned score is not there: after a divergence none is expected."""
    return "diverged" if run is not None and run.end == "diverged" and step not in run.expected else "missing"


def estimate_text(e: Estimate) -> str:
    """Return a value with its interval; where all problems agree, with a bound that does not feign certainty."""
    if e.value is None:
        return f"n < k ({e.num_problems} problems)"
    text = f"{e.value:.3f} [{e.low:.3f}, {e.high:.3f}]"
    if e.low != e.high:
        return text
    if e.value not in {0.0, 1.0}:
        return f"{text}, all agree"
    low, high = wilson_interval(round(e.value * e.num_problems), e.num_problems)
    return f"{text}, all agree: {'at most' if e.value == 0 else 'at least'} {high if e.value == 0 else low:.3f}"


def contamination_table(given: ReportInput) -> Table | None:
    """Return each run's last pass@1 on all problems, on the clean ones, and on those without near-duplicates too."""
    found = given.contamination
    rows: list[Row] = [("folder", "benchmark", "all", "clean", "clean and no near-duplicate")]
    for protocol in given.protocols if found else ():
        assert found is not None
        benchmark = protocol.benchmark
        base, clean = given.base.get(benchmark), frozenset(found.clean.get(benchmark, ()))
        strict = clean - {d.evaluation_id for d in found.near if d.benchmark == benchmark}
        scores = [(f"{given.model}/global_step_0 (base)", base)] if base else []
        scores += [(f"{r.label}/global_step_{s}", score) for r, s, score in last_scores(given, protocol)]
        for name, score in scores:
            three = (given.estimates(protocol, score, subset=ids)[1] for ids in (None, clean, strict))
            cells = (f"{estimate_text(e)}, {e.num_problems} problems" for e in three)
            rows.append((name, benchmark, *cells))
    note = f"pass@1. Clean: no shared assert ({found.rule}). Near-duplicates: {found.near_rule}." if found else ""
    return Table("With and without what training has seen", tuple(rows), note) if len(rows) > 1 else None


def overlaps_table(given: ReportInput) -> Table | None:
    """Return how many problems share what with training, by benchmark."""
    found = given.contamination
    if found is None:
        return None
    rows: list[Row] = [("benchmark", "pairs that share an assert", "training", "evaluated", "near-duplicate pairs")]
    for benchmark, touched in found.touched.items():
        near = sum(d.benchmark == benchmark for d in found.near)
        rows.append((benchmark, str(touched.pairs), str(touched.train), str(touched.evaluation), str(near)))
    return Table("What training and evaluation share", tuple(rows), "The pairs themselves: contamination.json.")


def cost_table(given: ReportInput) -> Table | None:
    """Return time and bytes, as far as they are recorded."""
    cost, rows = given.cost, [("what", "amount")]
    if cost.training_seconds:
        hours = sum(cost.training_seconds.values()) / 3600
        rows.append((f"training, all logged steps of {len(cost.training_seconds)} cells", f"{hours:.2f} device-hours"))
        name, most = max(cost.training_seconds.items(), key=lambda item: item[1])
        rows.append((f"longest cell ({name})", f"{most / 3600:.2f} device-hours"))
    rows += [(f"stored: {kind}", f"{size / 1e9:.3f} GB") for kind, size in cost.stored_bytes.items()]
    note = (
        "Device-hours: seconds of the step logs, one GPU (or this CPU) a cell; a cell on several GPUs took as many "
        "times more. Drawing the samples and repeated steps of killed attempts are not recorded."
    )
    return Table("Cost", tuple(rows), note) if len(rows) > 1 else None


def sources_table(given: ReportInput) -> Table | None:
    """Return every file that a number comes from, with its hash."""
    found = sorted({*given.sources, *(s for r in given.runs for s in r.sources)})
    return Table("Files", (("file in the store", "sha256"), *found)) if found else None
