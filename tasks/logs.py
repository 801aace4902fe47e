"""What a cell logged, read from the store."""

import json
from collections.abc import Callable
from typing import Any, TypeVar

from evaluation.errors import InputError
from training.folder import Result
from training.store import Store

T = TypeVar("T")


def parse_result(store: Store, cell: str, raw: bytes | None) -> Result | None:
    """Return how a cell ended, by the bytes of its result.json; None where there is none.

    Raises:
        InputError: the file is damaged.
    """
    return None if raw is None else _parsed(store, cell, "result.json", lambda: Result.model_validate_json(raw))


def parse_steps(store: Store, cell: str, raw: bytes | None) -> list[dict[str, Any]]:
    """Return the lines of a cell's steps.jsonl, by its bytes; none where there is none.

    Raises:
        InputError: the file is damaged.
    """
    return _parsed(
        store, cell, "steps.jsonl", lambda: [json.loads(x) for x in (raw or b"").decode("utf-8").splitlines() if x]
    )


def _parsed(store: Store, cell: str, name: str, parse: Callable[[], T]) -> T:
    try:
        return parse()
    except ValueError as e:  # of json, of pydantic, of utf-8
        place, fix = f"{store.url}/{cell}/logs/{name}", "`ablation verify` says what else is; restore it"
        raise InputError("logs", place, "is damaged", fix) from e
