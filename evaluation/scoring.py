"""Score samples in EvalPlus's format: `ablation score`. Always judged anew; an old result file decides nothing."""

import json
import re
from collections import Counter
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from evaluation.errors import InputError
from evaluation.files import sha256_file, write_json, write_jsonl
from evaluation.judge import Judge
from evaluation.records import Outcome, Problem, Program, Record, Verdict
from evaluation.scores import Score, build_score


class Row(Record):
    """One sample as the file has it."""

    task_id: str
    index: int
    """0, 1, ... within its problem."""
    source: str


def score_samples(
    samples: Path,
    benchmark: str,
    problems: Sequence[Problem],
    out: Path,
    *,
    ks: Sequence[int] = (),
    workers: int = 1,
    partial: bool = False,
    cache: Path | None = None,
    caged: bool = True,
    progress: Callable[[int, int], None] | None = None,
) -> Score:
    """Judge every sample on both suites and write verdicts.jsonl, score.json and EvalPlus's own result file to `out`.

    Args:
        samples: JSONL rows with `task_id` and exactly one of `solution`, `completion`.
        benchmark: name for tables.
        problems: all of the benchmark's.
        out: folder of the results.
        ks: reported k; empty means 1, 2, 4, ... and n.
        workers: programs judged at a time.
        partial: accept problems without samples, and uneven numbers of them; the score says how many.
        cache: folder of reference outputs and remembered verdicts.
        caged: as of the judge.
        progress: called with (done, total).

    Raises:
        InputError: a row, a problem or a k that cannot be scored.
        MachineError: no cage here.
    """
    results = out / f"{samples.name.removesuffix('.jsonl')}_eval_results.json"
    if samples.resolve() in {p.resolve() for p in (out / "verdicts.jsonl", out / "score.json", results)}:
        raise InputError("samples", samples, "would be overwritten by the results", "give another --out, or rename it")
    known = {p.problem_id: p for p in problems}
    rows, num_unknown = read_samples(samples, known, partial)
    counts = Counter(r.task_id for r in rows)
    _check_ks(ks, counts, partial)
    chosen = [known[t] for t in known if t in counts]
    with Judge(chosen, workers=workers, cache=cache, caged=caged) as judge:
        verdicts = judge.judge([Program(problem_id=r.task_id, source=r.source) for r in rows], progress)
    score = build_score(
        label=samples.name,
        cell=None,
        global_step=None,
        benchmark=benchmark,
        ks=ks or powers(min(counts.values())),
        problem_ids=[p.problem_id for p in chosen],
        verdicts=[(r.index, v) for r, v in zip(rows, verdicts, strict=True)],
        has_plus=any(p.plus_inputs is not None for p in chosen),
        protocol_sha256=None,
        prompt_sha256=None,
        judge_version=judge.version,
    )
    planned = len(known) if len(chosen) < len(known) else None
    score = score.replace(num_planned=planned, num_unknown=num_unknown or None)
    write_jsonl(out / "verdicts.jsonl", [verdict_row(r.index, v) for r, v in zip(rows, verdicts, strict=True)])
    write_json(results, evalplus_results(samples, rows, verdicts, known))
    write_json(out / "score.json", score)
    return score


def powers(n: int) -> tuple[int, ...]:
    """Return 1, 2, 4, ... up to n, and n."""
    return tuple(sorted({*(1 << i for i in range(n.bit_length()) if 1 << i <= n), n}))


def read_samples(path: Path, problems: dict[str, Problem], partial: bool) -> tuple[list[Row], int]:
    """Read and check the whole file before anything is judged; return its rows.

    With `partial`, rows of problems that are not the benchmark's are left out; the second value is their number.

    Raises:
        InputError: with the line, the field and the fix.
    """
    rows: list[Row] = []
    seen: set[tuple[str, str]] = set()
    counts: Counter[str] = Counter()
    named, num_unknown = True, 0
    with path.open("rb") as f:
        for number, raw in enumerate(f, start=1):
            line = _text(path, number, raw)
            if not line.strip():
                continue
            task_id, kind, text, identifier = _parse(path, number, line)
            if task_id not in problems:
                if not partial:
                    where = f"line {number} of {path.name}: not a problem of this benchmark"
                    raise InputError("task_id", task_id, where, "remove the row, name its benchmark, or use --partial")
                num_unknown += 1
                continue
            named = named and identifier is not None
            if identifier is not None and (task_id, identifier) in seen:
                raise InputError(
                    "_identifier", identifier, f"line {number} repeats a sample of {task_id}", "keep one row a sample"
                )
            seen.add((task_id, identifier or f"line {number}"))
            head = prompt_of(problems[task_id]) if kind == "completion" else ""
            rows.append(Row(task_id=task_id, index=counts[task_id], source=head + text))
            counts[task_id] += 1
    _check_counts(path, counts, problems, partial, named)
    return rows, num_unknown


def _text(path: Path, number: int, raw: bytes) -> str:
    try:
        return raw.decode("utf-8")
    except UnicodeDecodeError as e:
        raise InputError(
            "samples", f"line {number} of {path.name}", f"not UTF-8 ({e.reason})", "give a JSONL file"
        ) from e


def _parse(path: Path, number: int, line: str) -> tuple[str, str, str, str | None]:
    """Return a row's problem, the name of its text's field, the text, and its own identifier."""
    where = f"line {number} of {path.name}"
    try:
        row = json.loads(line)
    except (ValueError, RecursionError) as e:
        raise InputError("samples", where, f"not JSON ({e})", "write one JSON object a line") from e
    if not isinstance(row, dict) or not isinstance(row.get("task_id"), str):
        raise InputError("task_id", where, "missing, or not a text", "name the problem, e.g. Mbpp/2")
    task_id = row["task_id"]
    given = [k for k in ("solution", "completion") if k in row]
    if len(given) != 1:
        what, joined = ("both", "and") if given else ("neither", "nor")
        raise InputError("solution", where, f"{what} solution {joined} completion", "give exactly one of them")
    text = row[given[0]]
    if not isinstance(text, str):
        kind = "null" if text is None else f"a {type(text).__name__}"
        raise InputError(given[0], where, f"{kind}, not a text", "write one row for each program")
    identifier = row.get("_identifier", row.get("index"))
    return task_id, given[0], text, None if identifier is None else str(identifier)


def prompt_of(problem: Problem) -> str:
    """Return the text that EvalPlus puts before a `completion`: MBPP's docstring, HumanEval's head of the function."""
    if problem.problem_id.startswith("HumanEval/"):
        return problem.text
    return f'"""\n{problem.text}\n{problem.asserts[0]}\n"""\n'


def _check_counts(path: Path, counts: Counter[str], problems: dict[str, Problem], partial: bool, named: bool) -> None:
    if not counts:
        raise InputError("samples", path, "no samples in it", "give a JSONL file with a row a sample")
    if partial:
        return
    most, least = max(counts.values()), min(counts.values())
    if most > least and not named:
        twice = next(t for t, c in counts.items() if c == most)
        raise InputError(
            "samples",
            path,
            f"{twice} has {most} rows, others {least}: duplicates?",
            "give every row its own _identifier, or use --partial",
        )
    missing = [t for t in problems if t not in counts]
    if missing:
        listed = ", ".join(missing[:3])
        raise InputError(
            "samples", path, f"{len(missing)} problems have no sample ({listed}, ...)", "add them, or use --partial"
        )


def _check_ks(ks: Sequence[int], counts: Counter[str], partial: bool) -> None:
    """Refuse a k that no problem has samples for, or, of a whole file, that any problem lacks."""
    fewest, most = min(counts, key=counts.__getitem__), max(counts.values())
    if ks and max(ks) > (most if partial else counts[fewest]):
        has = f"no problem has more than {most}" if partial else f"{fewest} has {counts[fewest]}"
        raise InputError("k", max(ks), f"{has} samples", "draw more samples or ask for a smaller k")


def verdict_row(index: int, verdict: Verdict) -> dict[str, Any]:
    """Return a row of verdicts.jsonl (contracts)."""
    return {
        "task_id": verdict.problem_id,
        "index": index,
        "base": verdict.base.value,
        "plus": verdict.plus.value if verdict.plus is not None else None,
        "tests_passed": verdict.tests_passed,
        "tests_total": verdict.tests_total,
        "seconds": verdict.seconds,
    }


def evalplus_results(
    samples: Path, rows: Sequence[Row], verdicts: Sequence[Verdict], problems: dict[str, Problem]
) -> dict[str, Any]:
    """Return the result file with EvalPlus 0.3.1's keys and words; `hash` is that of the samples, not of a pickle."""
    found: dict[str, list[dict[str, Any]]] = {}
    for row, verdict in zip(rows, verdicts, strict=True):
        problem = problems[row.task_id]
        found.setdefault(row.task_id, []).append(
            {
                "task_id": row.task_id,
                "solution": row.source,
                "base_status": evalplus_word("base", verdict.base, verdict.detail),
                "plus_status": evalplus_word("plus", verdict.plus, verdict.detail),
                "base_fail_tests": _failed_inputs("base", problem.base_inputs, verdict.detail),
                "plus_fail_tests": _failed_inputs("plus", problem.plus_inputs, verdict.detail),
            }
        )
    now = datetime.now(UTC).strftime("%Y-%m-%d %H:%M")
    return {"date": now, "hash": sha256_file(samples)[:32], "eval": found}


def evalplus_word(suite: str, outcome: Outcome | None, detail: str) -> str | None:
    """Return EvalPlus's word: a test over its limit is `fail`; a suite over its, or a dead program, is `timeout`."""
    if outcome is None:
        return None
    if outcome is Outcome.TIMEOUT:
        return "timeout" if f"{suite}: suite:" in detail else "fail"
    if outcome is Outcome.FAIL and f"{suite}: ended" in detail:
        return "timeout"
    return outcome.value


def _failed_inputs(suite: str, inputs: Any, detail: str) -> list[Any]:
    found = re.search(rf"{suite}: test (\d+):", detail)
    if not found or not inputs or int(found[1]) >= len(inputs):
        return []
    return [inputs[int(found[1])]]
