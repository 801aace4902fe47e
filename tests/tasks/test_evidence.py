"""Programs of the explorer, cost, and what was registered before training: read from a store made by hand."""

import hashlib
import json
from dataclasses import replace
from pathlib import Path

import pytest
from hostile_report import HOSTILE, PLUS, hostile_report

from evaluation.errors import InputError
from evaluation.files import write_jsonl
from evaluation.given import ReportInput
from evaluation.manifests import Provenance, write_manifest
from flows.experiments import EXPERIMENTS
from flows.stored import planned_cells
from tasks.evidence import cost_of, shown_samples
from tasks.registration import NAME, declare, departures, read_registered
from tasks.reports import gather, missing_of, publish_report, rebuild
from training.store import Store, open_store

BASE = f"m/scores/{PLUS.folder}/global_step_0"
MICRO = EXPERIMENTS["micro"]


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return open_store(str(tmp_path / "store"))


@pytest.fixture
def given() -> ReportInput:
    """The base alone is scored."""
    whole = hostile_report()
    return replace(whole, runs=tuple(replace(r, scores={}) for r in whole.runs), samples=())


def fill(store: Store, tmp_path: Path) -> Path:
    """Store 4 samples of 3 problems each: the second and the third of each pass, but nothing of Mbpp/2."""
    folder = tmp_path / "store" / BASE
    ids = [(f"Mbpp/{p}", i) for p in range(3) for i in range(4)]
    write_jsonl(
        folder / "samples.jsonl",
        ({"task_id": p, "index": i, "completion": "c", "solution": f"# {p} {i} {HOSTILE[0]}", "finish_reason": "stop",
          "num_tokens": 3} for p, i in ids),
    )  # fmt: skip
    write_jsonl(
        folder / "verdicts.jsonl",
        ({"task_id": p, "index": i, "base": "pass", "plus": "pass" if i in (1, 2) and p != "Mbpp/2" else "timeout",
          "tests_passed": i, "tests_total": 9, "seconds": 0.1} for p, i in ids),
    )  # fmt: skip
    write_manifest(folder, "score", Provenance())
    return folder


def test_of_each_problem_the_first_that_passes_and_the_first_that_does_not(
    store: Store, given: ReportInput, tmp_path: Path
) -> None:
    folder = fill(store, tmp_path)
    found, sources, notes = shown_samples(store, given, ["Mbpp/2", "Mbpp/0", "Mbpp/9"])
    shown = [(s.problem_id, s.index, s.base, s.plus, s.tests_passed) for s in found]
    assert shown == [
        ("Mbpp/2", 0, "pass", "timeout", 0),
        ("Mbpp/0", 0, "pass", "timeout", 0),
        ("Mbpp/0", 1, "pass", "pass", 1),
    ]
    assert found[1].source == f"# Mbpp/0 0 {HOSTILE[0]}" and found[1].folder == "m/global_step_0"
    assert notes == () and dict(sources) == {
        f"{BASE}/{n}": hashlib.sha256((folder / n).read_bytes()).hexdigest()
        for n in ("samples.jsonl", "verdicts.jsonl")
    }


@pytest.mark.parametrize(("harm", "said"), [("bytes", "other bytes"), ("absent", "not stored")])
def test_programs_that_cannot_be_trusted_are_not_shown_and_cost_no_report(
    store: Store, given: ReportInput, tmp_path: Path, harm: str, said: str
) -> None:
    folder = fill(store, tmp_path)
    if harm == "bytes":
        path = folder / "samples.jsonl"
        path.write_bytes(path.read_bytes().replace(b"stop", b"STOP"))
    else:
        (folder / "samples.jsonl").unlink()
    found, sources, notes = shown_samples(store, given, ["Mbpp/0"])
    assert (found, sources) == ((), ()) and len(notes) == 1 and said in notes[0] and "m/global_step_0" in notes[0]


def test_cost_counts_every_byte_once(store: Store, given: ReportInput, tmp_path: Path) -> None:
    fill(store, tmp_path)
    cost = cost_of(store, given.runs)
    assert cost.stored_bytes == {
        "scores": sum(p.stat().st_size for p in (tmp_path / "store").rglob("*") if p.is_file())
    }
    assert cost.training_seconds == {r.label: 60.0 for r in given.runs}


def test_what_is_declared_is_stored_before_training_and_stays(store: Store, tmp_path: Path) -> None:
    cells = MICRO.cells()
    asked = {c.name for c in cells}
    assert "no registration" in departures(store, MICRO, asked)[0]
    assert declare(store, MICRO, cells).endswith(MICRO.sha256)
    first = read_registered(store, MICRO)
    assert first is not None and first.sha256 == MICRO.sha256 and first.begun == ()
    assert first.experiment["criterion"] == json.loads(MICRO.criterion.model_dump_json())
    assert store.verify().ok and departures(store, MICRO, asked) == ()
    assert declare(store, MICRO, cells) == "registered before"
    out = tmp_path / "out"
    given = gather(store, MICRO, cells, [], None)
    assert given.provenance["registered at"] == first.registered_at
    publish_report(store, replace(given, missing=tuple(missing_of(given))), out, {})
    assert read_registered(store, MICRO) == first and (out / NAME).is_file()
    finding = rebuild(store, MICRO, cells, tmp_path / "again")
    assert read_registered(store, MICRO) == first and len(finding.missing) == 1 + len(cells)
    assert (tmp_path / "again" / "report.html").is_file()


def test_another_criterion_after_the_runs_were_seen_is_refused(store: Store, tmp_path: Path) -> None:
    cells = MICRO.cells()
    declare(store, MICRO, cells)
    kinder = MICRO.replace(criterion=MICRO.criterion.replace(degraded_drop=0.5))
    with pytest.raises(InputError, match="by another declaration"):
        declare(store, kinder, cells)  # before anything trains
    assert MICRO.sha256 in departures(store, kinder, {c.name for c in cells})[0]
    with pytest.raises(InputError, match="holds another run"):
        publish_report(store, gather(store, kinder, cells, [], None), tmp_path / "out", {})


def test_a_late_registration_says_so_and_the_cells_asked_for_are_known(store: Store, tmp_path: Path) -> None:
    cells = MICRO.cells()
    log = tmp_path / "store" / cells[0].name / "logs" / "steps.jsonl"
    log.parent.mkdir(parents=True)
    log.write_text("")
    declare(store, MICRO, cells[:1])
    found = departures(store, MICRO, {cells[0].name})
    assert "1 cells were asked for" in found[0] and "when 1 cells had begun" in found[1]
    assert planned_cells(store, MICRO, list(cells)) == cells[:1]
