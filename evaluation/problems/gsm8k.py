"""GSM8K (main: 7,473 training and 1,319 test problems), from local files or the hub, checked by count and content.

The right number is what stands after the only `####` of a row, nothing else: the last calculator note or the last
number of the reasoning differ from it in hundreds of rows. Golds are used as they are, disputed ones too.
"""

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from evaluation.answers import MARKER
from evaluation.errors import InputError
from evaluation.problems.mbpp import Loaded, check_rows, hash_json, read_rows, refuse
from evaluation.records import Problem

ROWS = {"train": 7473, "test": 1319}
CONTENT = "32baa0d21079d365bbe40dcfd684624aae3ccd9c1f34b07ac5c45c02c33e326b"
"""Of the question and the answer of every row, training rows first, without carriage returns and outer blanks."""
NUM_TRAIN = 3200
"""The first so many training rows train (spec B); their order is the seed's."""
TEST_NUMBERS = 10_000
"""Test row 0 is problem `Gsm8k/10000`, so that no number stands for two problems; training row 0 is `Gsm8k/0`."""
GOLD = re.compile(r"-?[0-9]+(?:,[0-9]{3})*")


def load_gsm8k(folder: str | None = None) -> tuple[Loaded, Loaded]:
    """Return all training and all test problems, in the files' order.

    Args:
        folder: has gsm8k_train.jsonl and gsm8k_test.jsonl (or train.jsonl and test.jsonl); None fetches the pinned
            revision from the hub through `datasets`.

    Raises:
        InputError: the folder or a file is not there, or is not GSM8K.
        MachineError: no folder was given and the hub cannot be reached.
    """
    if folder is None:
        rows, sha256, revision = read_rows("gsm8k", None)
        check_rows("gsm8k", None, rows, ("split", "question", "answer"), sum(ROWS.values()))
        read = {split: ([r for r in rows if r["split"] == split], sha256, revision) for split in ROWS}
    else:
        read = {split: read_rows("gsm8k", find_file(Path(folder).expanduser(), split)) for split in ROWS}
    where = folder or "download"
    for split, (rows, _, _) in read.items():
        check_rows("gsm8k", f"{where} ({split})", rows, ("question", "answer"), ROWS[split])
    if (found := _content([*read["train"][0], *read["test"][0]])) != CONTENT:
        refuse("gsm8k", where, f"its problems differ from GSM8K's (content {found[:12]})")
    return _loaded(*read["train"], first=0), _loaded(*read["test"], first=TEST_NUMBERS)


def _loaded(rows: Sequence[dict[str, Any]], sha256: str, revision: str, first: int) -> Loaded:
    return Loaded(tuple(_problem(first + i, row) for i, row in enumerate(rows)), sha256, revision)


def find_file(folder: Path, split: str) -> str:
    """Return the path of one split's file in a folder.

    Raises:
        InputError: there is no such folder or file.
    """
    names = (f"gsm8k_{split}.jsonl", f"{split}.jsonl")
    for name in names:
        if (folder / name).is_file():
            return str(folder / name)
    reason = f"has no {names[0]}" if folder.is_dir() else "no such folder"
    raise InputError("gsm8k", folder, reason, "give a folder with gsm8k_train.jsonl and gsm8k_test.jsonl")


def gold_of(answer: str) -> str:
    """Return the number after a gold answer's only marker, as an integer's text.

    Raises:
        ValueError: there is not exactly one marker, or no integer after it.
    """
    parts = answer.split(MARKER)
    if len(parts) != 2 or not GOLD.fullmatch(parts[1].strip()):
        raise ValueError(f"answer={answer[-40:]!r}: not one {MARKER} with a whole number after it")
    return str(int(parts[1].replace(",", "")))


def _problem(number: int, row: dict[str, Any]) -> Problem:
    return Problem(
        problem_id=f"Gsm8k/{number}",
        text=_tidy(row["question"]),
        entry_point="",
        reference=_tidy(row["answer"]),
        asserts=(),
        answer=gold_of(row["answer"]),
    )


def _tidy(text: str) -> str:
    return text.replace("\r", "").strip()


def _content(rows: Sequence[dict[str, Any]]) -> str:
    try:
        return hash_json([[_tidy(r["question"]), _tidy(r["answer"])] for r in rows])
    except AttributeError:
        return "of other types"
