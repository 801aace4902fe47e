"""HumanEval+ (164 problems, v0.1.10) in EvalPlus's format, for scoring only: nothing here trains on it.

A file is checked by its ids and fields; its content is EvalPlus's affair, whose checksum guards the download.
"""

from evaluation.problems.mbpp import Loaded, check_rows, number, read_rows, refuse
from evaluation.records import Problem

HUMANEVAL_PLUS_ROWS = 164
PREFIX = "HumanEval/"


def load_humaneval_plus(path: str | None = None) -> Loaded:
    """Return the problems, ascending by number, from a JSONL file or through EvalPlus's own download and cache.

    `text` is EvalPlus's prompt (imports, signature, docstring), which stands before every `completion`.

    Raises:
        InputError: the file is not there or is not HumanEval+.
        MachineError: no file was given and EvalPlus's release cannot be reached.
    """
    rows, sha256, revision = read_rows("humaneval_plus", path)
    needed = ("task_id", "prompt", "entry_point", "canonical_solution", "base_input", "plus_input", "atol")
    check_rows("humaneval_plus", path, rows, needed, HUMANEVAL_PLUS_ROWS)
    ids = {r["task_id"] for r in rows}
    lacking = [f"{PREFIX}{i}" for i in range(HUMANEVAL_PLUS_ROWS) if f"{PREFIX}{i}" not in ids]
    if lacking:
        refuse("humaneval_plus", path, f"{lacking[0]} is not there")
    problems = tuple(
        Problem(
            problem_id=row["task_id"],
            text=row["prompt"],
            entry_point=row["entry_point"],
            reference=row["prompt"] + row["canonical_solution"],
            asserts=(),
            base_inputs=row["base_input"],
            plus_inputs=row["plus_input"],
            atol=row["atol"],
        )
        for row in sorted(rows, key=lambda r: number(r["task_id"]))
    )
    return Loaded(problems, sha256, revision)
