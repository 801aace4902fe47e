"""MBPP (974 problems) and MBPP+ v0.2.0 (378), from a local file or their own homes, checked by count and content.

The content checks do not depend on where a file came from: MBPP's ignores line ends and trailing blanks, MBPP+'s covers
ids, entry points and tests but not the prompts, since the released file shows an assert in them and files rebuilt from
EvalPlus's history do not. A file that fails its check is never used.

MBPP's quirks handled here: CRLF and lone CR in the code (EXTRACT-038), asserts in parentheses (927), code that runs
before the asserts (367, 927), helpers and classes beside the tested function, a tested function called `sum` (126).
MBPP+'s: ten `assertion` fields start with an import, so "the first line" means the first line that is an assert.
"""

import ast
import builtins
import gzip
import hashlib
import json
import logging
import subprocess
import sys
import tempfile
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from evaluation.errors import InputError, MachineError
from evaluation.files import check_readable
from evaluation.records import Problem

MBPP_ROWS = 974
MBPP_PLUS_ROWS = 378
MBPP_CONTENT = "5a33317b2b137b39d6c4fdd47154451f43255d3fe043a2a4796f2e4d40060a63"
"""`_hash_mbpp` of the 974 problems."""
MBPP_PLUS_CONTENT = "b3470cff843a55fbdfce251a9fcb35af2f50a3b063f10cd7c60f26a3f866749b"
"""`_hash_mbpp_plus` of v0.2.0."""
MBPP_PLUS_RELEASED = "b54e762755248ca411b523c917fa9f93c07b5ff2966bf60b3917b853926a3dad"
"""sha256 of the released v0.2.0 file (EvalPlus's md5 ee43ecabebf20deef4bb776a405ac5b1), accepted by its bytes."""
RIGHT_FILE = {
    "mbpp": "MBPP's mbpp.jsonl (974 problems)",
    "mbpp_plus": "MbppPlus v0.2.0 (378 problems)",
    "humaneval_plus": "HumanEvalPlus v0.1.10 (164 problems)",
    "gsm8k": "GSM8K main's train and test files (7473 and 1319 problems)",
}
DOWNLOAD_TIMEOUT_S = 600

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Loaded:
    """Problems, ascending by number, and where their bytes came from."""

    problems: tuple[Problem, ...]
    sha256: str
    """Of the file that was read."""
    revision: str
    """Commit or release of the source, `sha256:<hex>` for a local file."""


def load_mbpp(path: str | None = None) -> Loaded:
    """Return the 974 problems of MBPP, from a JSONL file or through `datasets` from the hub (pinned revision).

    Raises:
        InputError: the file is not there or is not MBPP.
        MachineError: no file was given and the hub cannot be reached.
    """
    rows, sha256, revision = read_rows("mbpp", path)
    check_rows("mbpp", path, rows, ("task_id", "text", "code", "test_list", "test_setup_code"), MBPP_ROWS)
    found = _try_hash(_hash_mbpp, rows)
    if found != MBPP_CONTENT:
        refuse("mbpp", path, f"its {MBPP_ROWS} problems differ from MBPP's (content {found[:12]})")
    return Loaded(tuple(_mbpp_problem(r) for r in _ascending(rows)), sha256, revision)


def load_mbpp_plus(path: str | None = None) -> Loaded:
    """Return the 378 problems of MBPP+ v0.2.0, from a JSONL file or through EvalPlus's own download and cache.

    Raises:
        InputError: the file is not there or is not v0.2.0.
        MachineError: no file was given and EvalPlus's release cannot be reached.
    """
    rows, sha256, revision = read_rows("mbpp_plus", path)
    needed = ("task_id", "prompt", "entry_point", "canonical_solution", "base_input", "plus_input", "atol", "assertion")
    check_rows("mbpp_plus", path, rows, needed, MBPP_PLUS_ROWS)
    found = _try_hash(_hash_mbpp_plus, rows)
    if found != MBPP_PLUS_CONTENT and sha256 != MBPP_PLUS_RELEASED:
        refuse("mbpp_plus", path, f"its ids, entry points or tests differ from v0.2.0 (content {found[:12]})")
    return Loaded(tuple(_mbpp_plus_problem(r) for r in _ascending(rows)), sha256, revision)


def number(task_id: int | str) -> int:
    """Return the integer of an id in either file: MBPP has 6, MBPP+ has `Mbpp/6` (SPLIT-003)."""
    return int(str(task_id).rsplit("/", 1)[-1])


def find_entry_point(asserts: Sequence[str]) -> str:
    """Return the function that every assert calls; a builtin only if nothing else is called (`sum` in 126).

    Taken from the asserts and not from the code, whose last function may be a helper.

    Raises:
        ValueError: the asserts share no call.
    """
    calls = [
        [n.func.id for n in ast.walk(ast.parse(a)) if isinstance(n, ast.Call) and isinstance(n.func, ast.Name)]
        for a in asserts
    ]
    common = [c for c in calls[0] if all(c in others for others in calls)]
    if not common:
        raise ValueError(f"no function is called by all of {list(asserts)}")
    return next((c for c in common if not hasattr(builtins, c)), common[0])


def read_rows(field: str, path: str | None) -> tuple[list[dict[str, Any]], str, str]:
    """Return rows, sha256 of the (unpacked) file and revision; without a path, from the source's own home."""
    if path is not None:
        file = Path(path).expanduser()
        check_readable(field, file, f"{RIGHT_FILE[field]} with {_flag(field)}")
        rows, sha256 = _read_jsonl(field, file)
        return rows, sha256, f"sha256:{sha256}"
    with tempfile.TemporaryDirectory() as scratch:
        file, revision = _download(field, Path(scratch))
        return *_read_jsonl(field, file), revision


def _download(field: str, scratch: Path) -> tuple[Path, str]:
    """Fetch in a child: its libraries are heavy, print to stdout, write to the working folder and may hang."""
    log.info("%s: no file given, fetching it", field)
    out = scratch / f"{field}.jsonl"
    argv = [sys.executable, "-m", "evaluation.problems.download", field, str(out)]
    cause = f"no answer within {DOWNLOAD_TIMEOUT_S} s"
    try:
        done = subprocess.run(argv, cwd=scratch, capture_output=True, text=True, timeout=DOWNLOAD_TIMEOUT_S)
    except subprocess.TimeoutExpired:
        done = None
    if done is not None and done.returncode == 0:
        return out, done.stdout.strip().splitlines()[-1]
    if done is not None:
        cause = (done.stderr.strip().splitlines() or ["no reason given"])[-1]
    raise MachineError(
        field, "download", f"it cannot be fetched here ({cause})", f"give a local copy with {_flag(field)}"
    )


def _read_jsonl(field: str, path: Path) -> tuple[list[dict[str, Any]], str]:
    try:
        data = path.read_bytes()
        data = gzip.decompress(data) if path.suffix == ".gz" else data
        lines = [line for line in data.decode("utf-8").split("\n") if line.strip()]
    except OSError as error:
        refuse(field, str(path), f"cannot be read ({error.strerror or error})")
    except (ValueError, EOFError, zlib.error) as error:
        refuse(field, str(path), f"not a file of JSON lines ({error})")
    rows = [_row(field, path, number, line) for number, line in enumerate(lines, 1)]
    if not all(isinstance(r, dict) for r in rows):
        refuse(field, str(path), "not one JSON object a line")
    return rows, hashlib.sha256(data).hexdigest()


def _row(field: str, path: Path, number: int, line: str) -> Any:
    try:
        return json.loads(line)
    except (ValueError, RecursionError) as error:
        at = f"column {error.colno}: {error.msg}" if isinstance(error, json.JSONDecodeError) else error
        refuse(field, str(path), f"row {number} is not JSON ({at})")


def check_rows(
    field: str, path: str | None, rows: Sequence[Mapping[str, Any]], needed: Sequence[str], expected: int
) -> None:
    """Check the number of rows and their fields.

    Raises:
        InputError: with what is wrong.
    """
    if len(rows) == 399 and field == "mbpp_plus":
        refuse(field, path, "399 problems: this is v0.1.0, whose split would be 314/399/261 and not 320/378/276")
    if len(rows) != expected:
        refuse(field, path, f"{len(rows)} problems and not {expected}")
    for i, row in enumerate(rows):
        missing = [k for k in needed if k not in row]
        if missing:
            refuse(field, path, f"row {i + 1} has no '{missing[0]}'")


def refuse(field: str, path: str | None, reason: str) -> NoReturn:
    """Raise the InputError of a file that is not what it should be."""
    raise InputError(field, path or "download", reason, f"use {RIGHT_FILE[field]}")


def _flag(field: str) -> str:
    if field == "gsm8k":
        return "--gsm8k FOLDER"
    return "--problems FILE" if field == "humaneval_plus" else f"--{field.replace('_', '-')} FILE"


def _ascending(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """By number, never by position in the file (SPLIT-004)."""
    return sorted(rows, key=lambda r: number(r["task_id"]))


def _unix(text: str) -> str:
    """Remove carriage returns; replacing them by newlines would double the lines inside strings."""
    return text.replace("\r", "")


def _mbpp_problem(row: Mapping[str, Any]) -> Problem:
    asserts = tuple(_unix(a).strip() for a in row["test_list"])
    return Problem(
        problem_id=f"Mbpp/{number(row['task_id'])}",
        text=_unix(row["text"]).strip(),
        entry_point=find_entry_point(asserts),
        reference=_unix(row["code"]),
        setup=_unix(row["test_setup_code"] or ""),
        asserts=asserts,
    )


def _mbpp_plus_problem(row: Mapping[str, Any]) -> Problem:
    text, shown = _split_prompt(row["prompt"])
    lines = [line for line in _unix(row["assertion"]).split("\n") if line.strip()]
    asserts = [line.strip() for line in lines if line.startswith("assert")]
    asserts = [*shown, *(a for a in asserts if a not in shown)]
    return Problem(
        problem_id=row["task_id"],
        text=text,
        entry_point=row["entry_point"],
        # EvalPlus runs prompt + canonical_solution; the prompt is a docstring, so the solution alone is the same.
        reference=_unix(row["canonical_solution"]).strip("\n") + "\n",
        setup="\n".join(line for line in lines if not line.startswith("assert")),
        asserts=tuple(asserts),
        base_inputs=row["base_input"],
        plus_inputs=row["plus_input"],
        atol=float(row["atol"]),
    )


def _split_prompt(prompt: str) -> tuple[str, list[str]]:
    """Return the words of an MBPP+ prompt and the asserts it shows: one in the released file, none in a rebuilt one."""
    body = _unix(prompt).strip()
    quote = body[:3]
    if quote not in {"'''", '"""'} or not body.endswith(quote) or quote in body[3:-3]:
        raise InputError(
            "mbpp_plus", repr(prompt[:40]), "a prompt that is not one docstring", f"use {RIGHT_FILE['mbpp_plus']}"
        )
    lines = body[3:-3].strip().split("\n")
    shown = [line.strip() for line in lines if line.startswith("assert ")]
    return "\n".join(line for line in lines if not line.startswith("assert ")).strip(), shown


def _try_hash(of: Callable[[Sequence[dict[str, Any]]], str], rows: Sequence[dict[str, Any]]) -> str:
    """Return the content hash; fields of another type than they should be are just another content."""
    try:
        return of(rows)
    except (TypeError, ValueError, AttributeError):
        return "of other types"


def _hash_mbpp(rows: Sequence[dict[str, Any]]) -> str:
    def tidy(text: str | None) -> str:
        return "\n".join(line.rstrip() for line in _unix(text or "").rstrip().split("\n"))

    return hash_json(
        [
            [
                number(r["task_id"]),
                *(tidy(r[k]) for k in ("text", "code", "test_setup_code")),
                *map(tidy, r["test_list"]),
            ]
            for r in _ascending(rows)
        ]
    )


def _hash_mbpp_plus(rows: Sequence[dict[str, Any]]) -> str:
    return hash_json(
        [[r["task_id"], r["entry_point"], float(r["atol"]), r["base_input"], r["plus_input"]] for r in _ascending(rows)]
    )


def hash_json(value: object) -> str:
    """Return the sha256 of a value's compact JSON."""
    # Not canonical_json: the tests of 404 hold infinities.
    return hashlib.sha256(json.dumps(value, separators=(",", ":")).encode()).hexdigest()
