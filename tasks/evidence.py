"""What a report rests on, read from the store: runs, scores, programs, bytes; every file with the hash of its bytes."""

import hashlib
import io
import json
import math
from collections.abc import Sequence
from typing import Any

from evaluation.curves import RunEvidence
from evaluation.given import Cost, ReportInput, SampleShown
from evaluation.protocol import Protocol
from evaluation.scores import Score
from evaluation.tables import EVIDENCE, last_scores
from tasks.logs import parse_result, parse_steps
from tasks.stored import read_score
from training.cell import Cell
from training.experiment import Experiment
from training.store import Store

Sources = tuple[tuple[str, str], ...]
MOST_BYTES = 1 << 29
"""Of one samples.jsonl: a larger one is not read for the sake of a few programs."""


def evidence(store: Store, experiment: Experiment, cell: Cell) -> RunEvidence:
    """Read what one cell left: rewards and what else was logged, end, scores."""
    raw = {name: store.read(f"{cell.name}/logs/{name}") for name in ("result.json", "steps.jsonl")}
    result = parse_result(store, cell.name, raw["result.json"])
    rows = parse_steps(store, cell.name, raw["steps.jsonl"])
    sources = [(f"{cell.name}/logs/{n}", hashlib.sha256(r).hexdigest()) for n, r in raw.items() if r is not None]
    scores: dict[str, dict[int, Score]] = {}
    for protocol in experiment.protocols:
        found, read = base_or_cell_scores(store, cell.name, protocol, cell.checkpoints)
        scores[protocol.benchmark] = found
        sources += read
    return RunEvidence(
        label=cell.name,
        arm=cell.arm,
        lr=cell.lr,
        seed=cell.seed,
        steps=cell.steps,
        checkpoints=cell.checkpoints,
        rewards=tuple(_number(r["reward"]) for r in rows),
        end=result.end if result is not None else None,
        onset_step=result.onset_step if result is not None else None,
        scores=scores,
        signs=tuple(f"{s.name.replace('_', ' ')}: {s.detail}" for s in result.signs) if result is not None else (),
        figures=_figures(rows),
        sources=tuple(sources),
    )


def _figures(rows: list[dict[str, Any]]) -> dict[str, tuple[float, ...]]:
    """Return the columns of the step log that a report shows; those of sampler and learner where it has them."""
    flat = [r | (r.get("sampler") or {}) for r in rows]
    names = dict.fromkeys((*EVIDENCE, "head_mass", "seconds"))
    return {k: tuple(_number(r.get(k)) for r in flat) for k in names if any(k in r for r in flat)}


def _number(value: object) -> float:
    return float(value) if isinstance(value, int | float | str) else math.nan


def base_or_cell_scores(
    store: Store, name: str, protocol: Protocol, steps: Sequence[int]
) -> tuple[dict[int, Score], Sources]:
    """Return the stored scores of a cell, or of the base model, by step, and the files they were read from."""
    found, sources = {}, []
    for step in steps:
        rel = f"{name}/scores/{protocol.folder}"
        if (read := read_score(store, rel, step)) is not None:
            found[step] = read[0]
            sources.append((f"{rel}/global_step_{step}/score.json", read[1]))
    return found, tuple(sources)


def cost_of(store: Store, runs: Sequence[RunEvidence]) -> Cost:
    """Return what the runs took: the seconds of their logged steps, and the bytes of the store by kind of folder."""
    seconds = {r.label: sum(s for s in r.figures.get("seconds", ()) if math.isfinite(s)) for r in runs}
    sizes: dict[str, int] = {}
    for path, size in store.backend.list("").items():
        parts = path.split("/")
        part = parts[1] if len(parts) > 2 and parts[0] != "reports" else parts[0]
        kind = "checkpoints" if part.startswith("global_step_") else part
        sizes[kind] = sizes.get(kind, 0) + size
    return Cost(training_seconds={c: s for c, s in seconds.items() if s}, stored_bytes=dict(sorted(sizes.items())))


def shown_samples(
    store: Store, given: ReportInput, problems: Sequence[str]
) -> tuple[tuple[SampleShown, ...], Sources, tuple[str, ...]]:
    """Return programs of some problems: of the base and each run's last checkpoint the first that passes and fails.

    Returns:
        the programs, the files that they were read from, and what was left out and why.
    """
    protocol = given.protocols[0]
    places = [(f"{given.model}/global_step_0", given.model, 0)] if given.primary in given.base else []
    places += [(f"{run.label}/global_step_{step}", run.label, step) for run, step, _ in last_scores(given, protocol)]
    found: list[SampleShown] = []
    sources: list[tuple[str, str]] = []
    notes: list[str] = []
    for folder, name, step in places if problems else []:
        rel = f"{name}/scores/{protocol.folder}/global_step_{step}"
        files, why = _checked_files(store, rel)
        if why:
            notes.append(f"no programs of {folder} are shown: {why}")
            continue
        wanted = {(v["task_id"], v["index"]): v for v in _first_of_each(files["verdicts.jsonl"], problems)}
        heads = [f'{{"task_id": {json.dumps(p)}, "index": {i},' for p, i in wanted]
        found += [_shown(folder, r, wanted[r["task_id"], r["index"]]) for r in _rows(files["samples.jsonl"], heads)]
        sources += [(f"{rel}/{n}", hashlib.sha256(raw).hexdigest()) for n, raw in files.items()]
    order = {p: i for i, p in enumerate(problems)}
    found.sort(key=lambda s: order[s.problem_id])  # stable: folders stay in order
    return tuple(found), tuple(sources), tuple(notes)


def _checked_files(store: Store, rel: str) -> tuple[dict[str, bytes], str]:
    """Return samples and verdicts of a folder, or why not: some programs are never worth a failed report."""
    manifest = store.manifest(rel)
    listed = {f.path: f for f in manifest.files} if manifest is not None else {}
    files = {}
    for name in ("samples.jsonl", "verdicts.jsonl"):
        if name not in listed:
            return {}, f"its {name} is not stored"
        if listed[name].size_bytes > MOST_BYTES:
            return {}, f"its {name} has {listed[name].size_bytes} bytes"
        raw = store.read(f"{rel}/{name}")
        if raw is None or hashlib.sha256(raw).hexdigest() != listed[name].sha256:
            return {}, f"its {name} has other bytes than its manifest says"
        files[name] = raw
    return files, ""


def _rows(raw: bytes, heads: Sequence[str]) -> list[dict[str, Any]]:
    """Return the rows that begin with one of these texts; of a hundred thousand others none is parsed."""
    beginnings = tuple(h.encode() for h in heads)
    return [json.loads(line) for line in io.BytesIO(raw) if line.startswith(beginnings)]


def _first_of_each(raw: bytes, problems: Sequence[str]) -> list[dict[str, Any]]:
    """Return each problem's first verdict that is a pass, and its first that is not."""
    found: dict[tuple[str, bool], dict[str, Any]] = {}
    for row in _rows(raw, [f'{{"task_id": {json.dumps(p)},' for p in problems]):
        passed = row["base"] == "pass" and row["plus"] in {"pass", None}
        found.setdefault((row["task_id"], passed), row)
    return list(found.values())


def _shown(folder: str, row: dict[str, Any], verdict: dict[str, Any]) -> SampleShown:
    return SampleShown(
        problem_id=row["task_id"],
        folder=folder,
        index=row["index"],
        source=row["solution"],
        base=verdict["base"],
        plus=verdict["plus"],
        tests_passed=verdict["tests_passed"],
        tests_total=verdict["tests_total"],
    )
