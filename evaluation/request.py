"""What an evaluation child is asked to do: `request.json`. Free of torch, so that tasks can write it."""

from pathlib import Path
from typing import Literal

from pydantic import Field

from evaluation.files import PARTIAL, write_json
from evaluation.manifests import Provenance, is_complete
from evaluation.prompts import PromptSpec
from evaluation.protocol import Protocol
from evaluation.records import Record

REQUEST = "request.json"
Engine = Literal["transformers", "vllm"]
FAILURE = "failure.txt"
"""In a unit's `out`: why the child gave it up, for the task that waits for it."""
DRAWN = f"drawn{PARTIAL}"
"""In a unit's `out`, until it is scored: every sample is there, and whoever draws is done with it."""


class Unit(Record):
    """One checkpoint under one protocol; `out` gets samples, verdicts, the score and, last, the manifest."""

    label: str
    """What tables call it: `<cell>/global_step_N`, `<model>/global_step_0`, or a path."""
    cell: str | None
    global_step: int
    model_path: str
    """Local folder or hub repository."""
    model_revision: str | None = None
    model_subfolder: str | None = None
    protocol: Protocol
    provenance: Provenance
    out: str


class Request(Record):
    """Units that share a prompt specification and problems; more may be appended while the child runs."""

    schema_: Literal["request/1"] = Field(default="request/1", alias="schema")
    prompt: PromptSpec
    problems: dict[str, str]
    """Path of the problems of each benchmark (JSONL of `evaluation.records.Problem`)."""
    units: tuple[Unit, ...]
    engine: Engine = "transformers"
    device: str = "cpu"
    num_threads: int = Field(default=1, ge=1)
    batch_size: int = Field(default=512, ge=1)
    """Rows decoded together; samples do not depend on it beyond float rounding."""
    judge_workers: int = Field(default=1, ge=1)
    caged: bool = True
    """False: programs run under limits only (`ABLATION_UNCAGED`)."""
    cache: str | None = None
    """Folder of reference outputs."""
    linger_s: float = Field(default=0.0, ge=0)
    """How long who draws waits for more units once all are done, unless `closed`."""
    closed: bool = True
    """No more units will come."""


def is_drawn(out: Path) -> bool:
    """Whether nothing more is to be drawn of a unit."""
    return (out / DRAWN).exists() or is_complete(out)


def write_request(folder: Path, request: Request) -> None:
    """Write `folder/request.json`, whole; a running child sees the old file or the new one."""
    write_json(folder / REQUEST, request)


def read_request(folder: Path) -> Request:
    """Read `folder/request.json`."""
    return Request.model_validate_json((folder / REQUEST).read_text(encoding="utf-8"))
