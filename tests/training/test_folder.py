"""Run directories: paths, and which of their folders count."""

from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from evaluation.files import write_json
from evaluation.manifests import Provenance, Revisions, write_manifest
from evaluation.prompts import PromptSpec
from training.cell import Cell, Identity
from training.folder import CellFile, Result, RunFolder, Runtime, numbered

CELL = Cell(model="toy", benchmark="toy", arm="nobuf", lr=3e-4, steps=4, stride=2)


def whole(folder: Path) -> None:
    folder.mkdir(parents=True)
    (folder / "x").write_text("y")
    write_manifest(folder, "checkpoint", Provenance())


def test_steps_are_ordered_by_number_and_half_made_folders_do_not_count(tmp_path: Path) -> None:
    """CHECKPOINT-089: text order ends with 90."""
    folder = RunFolder(tmp_path)
    for step in (1000, 30, 300, 60, 120, 90):
        whole(folder.checkpoint(step))
        whole(folder.resume(step))
    for odd in ("global_step_150.partial", "global_step_007", "global_step_", "global_step_1e3", "xglobal_step_5"):
        whole(tmp_path / odd)
    (tmp_path / "global_step_150").mkdir()
    (tmp_path / "global_step_999").write_text("a file")
    assert folder.checkpoints() == [30, 60, 90, 120, 300, 1000]
    assert folder.resumes() == [30, 60, 90, 120, 300, 1000]


def test_nothing_there_is_an_empty_list(tmp_path: Path) -> None:
    assert numbered(tmp_path / "absent", "global_step_") == []


def test_the_layout_of_the_contract(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path / CELL.name)
    names = {
        "cell.json": folder.cell_json,
        "runtime.json": folder.runtime_json,
        "logs/steps.jsonl": folder.steps_jsonl,
        "logs/result.json": folder.result_json,
        "rollouts/step_000001.parquet": folder.rollout(1),
        "global_step_30": folder.checkpoint(30),
        "resume/step_30": folder.resume(30),
    }
    assert {k: p.relative_to(tmp_path / CELL.name).as_posix() for k, p in names.items()} == {k: k for k in names}


def cell_file(prompt: object) -> dict[str, object]:
    return {
        "schema": "cell/1",
        "cell": CELL.model_dump(mode="json"),
        "prompt": prompt,
        "split_sha256": "s",
        "revisions": {"model": "m", "datasets": {}},
    }


def test_runtime_is_no_part_of_the_identity() -> None:
    assert not set(Runtime.model_fields) & set(Identity.model_fields)
    assert Runtime(model_path="/m", problems_path="/p").replace(num_threads=8).num_threads == 8


@pytest.mark.parametrize(
    "change",
    [{"num_threads": 0}, {"micro_batch": 0}, {"keep_resume": 0}, {"resume_every": 0}, {"report_to": ("mlflow",)}],
)
def test_impossible_runtimes_are_refused(change: dict[str, Any]) -> None:
    with pytest.raises(ValidationError):
        Runtime(model_path="/m", problems_path="/p").replace(**change)


@pytest.mark.parametrize("end", ["finished", "diverged"])
def test_results_read_back(tmp_path: Path, end: str) -> None:
    result = Result(end=end, last_step=4, onset_step=3 if end == "diverged" else None)
    write_json(tmp_path / "result.json", result)
    text = (tmp_path / "result.json").read_text()
    assert '"schema": "result/1"' in text
    assert Result.model_validate_json(text) == result


def test_results_from_before_there_were_signs_read_back() -> None:
    old = '{"schema": "result/1", "end": "finished", "last_step": 4, "onset_step": null}'
    assert Result.model_validate_json(old).signs == ()


def test_another_ending_is_refused() -> None:
    with pytest.raises(ValidationError):
        Result(end="stopped", last_step=4, onset_step=None)


def test_cell_json_gives_the_identity_of_its_parts(tmp_path: Path) -> None:
    prompt = PromptSpec(name="toy/1", rendering="plain", extraction="whole/1", stop_ids=(1,))
    file = CellFile.model_validate(cell_file(prompt.model_dump(mode="json")))
    write_json(tmp_path / "cell.json", file)
    again = CellFile.model_validate_json((tmp_path / "cell.json").read_text())
    assert again.identity == Identity(
        cell_config=CELL, split_sha256="s", prompt_sha256=prompt.sha256, revisions=Revisions(model="m", datasets={})
    )
    other = CellFile.model_validate(cell_file(prompt.replace(stop_ids=(1, 2)).model_dump(mode="json")))
    assert other.identity.fingerprint != again.identity.fingerprint
