"""`ablation report`: the finding again, from the store alone."""

import json
from pathlib import Path

import pytest

from evaluation.files import write_json, write_jsonl
from evaluation.manifests import Revisions, write_manifest
from evaluation.records import Outcome, Verdict
from evaluation.scores import build_score
from flows.cli import main
from flows.experiments import EXPERIMENTS
from training.cell import Cell, Identity
from training.folder import Result
from training.store import Store, open_store

SPEC = EXPERIMENTS["micro"]
PROTOCOL = SPEC.protocols[0]
PROBLEMS = [f"Toy/{i}" for i in range(16)]


def identity(cell: Cell | None) -> Identity:
    return Identity(
        cell_config=cell, split_sha256="s", prompt_sha256="p", revisions=Revisions(model="m", datasets={"toy": "d"})
    )


def score(store: Store, scratch: Path, cell: Cell | None, step: int, passes: int) -> None:
    """Store a score in which every problem has `passes` of n samples right."""
    word = {True: Outcome.PASS, False: Outcome.FAIL}
    verdicts = [
        (
            i,
            Verdict(
                problem_id=p, base=word[i < passes], plus=word[i < passes], tests_passed=0, tests_total=1, seconds=0
            ),
        )
        for p in PROBLEMS
        for i in range(PROTOCOL.n)
    ]
    name = cell.name if cell else "toy"
    found = build_score(
        label=f"{name}/global_step_{step}",
        cell=cell.name if cell else None,
        global_step=step,
        benchmark=PROTOCOL.benchmark,
        ks=PROTOCOL.reported_ks,
        problem_ids=PROBLEMS,
        verdicts=verdicts,
        has_plus=True,
        protocol_sha256=PROTOCOL.sha256,
        prompt_sha256="p",
        judge_version="j",
    )
    folder = scratch / f"{name}-{step}"
    write_json(folder / "score.json", found)
    write_manifest(folder, "score", identity(cell).provenance(cell.name if cell else None, step))
    store.publish(folder, f"{name}/scores/{PROTOCOL.folder}/global_step_{step}")


def end(store: Store, scratch: Path, cell: Cell) -> None:
    folder = scratch / f"{cell.name}-logs"
    rows = [{"global_step": i + 1, "reward": 0.5} for i in range(cell.steps)]
    write_jsonl(folder / "steps.jsonl", rows)
    write_json(folder / "result.json", Result(end="finished", last_step=cell.steps, onset_step=None))
    write_manifest(folder, "logs", identity(cell).provenance(cell.name))
    store.publish(folder, f"{cell.name}/logs")


@pytest.fixture
def store(tmp_path: Path) -> Store:
    """Micro without its last cell's last score."""
    store = open_store(str(tmp_path / "store"))
    score(store, tmp_path, None, 0, 1)
    cells = SPEC.cells()
    for cell in cells:
        end(store, tmp_path, cell)
        for step in cell.checkpoints:
            if (cell, step) != (cells[-1], cell.steps):
                score(store, tmp_path, cell, step, 2 if cell.arm == "nobuf" else 0)
    return store


@pytest.mark.parametrize("name", ["steps.jsonl", "result.json"])
@pytest.mark.parametrize("bad", [b'{"global_step": 1, "rew', b"\xff\xfe"])
def test_damaged_logs_are_named(store: Store, capsys: pytest.CaptureFixture[str], name: str, bad: bytes) -> None:
    cell = SPEC.cells()[0].name
    (Path(store.url.removeprefix("file://")) / cell / "logs" / name).write_bytes(bad)
    assert main(["report", store.url]) == 2
    said = capsys.readouterr().err
    assert said.startswith(f"error: logs={store.url}/{cell}/logs/{name}: is damaged; ")
    assert said.count("\n") == 1


def test_for_people_too_what_is_missing_is_said(store: Store, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["report", store.url]) == 1
    last = SPEC.cells()[-1]
    assert f"missing: {last.name}/global_step_{last.steps} (" in capsys.readouterr().out


def test_the_finding_is_rebuilt_and_what_is_missing_is_said(store: Store, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["report", store.url, "--json"]) == 1
    finding = json.loads(capsys.readouterr().out)
    assert (finding["schema"], finding["experiment"]) == ("finding/1", "micro")
    classes = {r["cell"]: r["class"] for r in finding["runs"]}
    first, last = SPEC.cells()
    assert classes[first.name] == "stable"
    assert classes[last.name] == "incomplete"
    assert any(f"{last.name}/global_step_{last.steps}" in m for m in finding["missing"])
    assert store.has("reports/micro")
    assert main(["report", store.url]) == 1
    assert finding["sentence"] in capsys.readouterr().out


def test_a_complete_store_exits_zero_and_says_the_same_twice(
    store: Store, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    score(store, tmp_path, SPEC.cells()[-1], SPEC.steps, 0)
    texts = []
    for _ in range(2):
        assert main(["report", store.url, "--json"]) == 0
        texts.append(capsys.readouterr().out)
    assert texts[0] == texts[1]
    assert [r["class"] for r in json.loads(texts[0])["runs"]] == ["stable", "degraded"]


def test_only_the_cells_that_were_asked_for_are_reported(
    store: Store, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    main(["report", store.url, "--json"])
    finding = json.loads(capsys.readouterr().out)
    finding["runs"] = finding["runs"][:1]
    folder = tmp_path / "asked"
    write_json(folder / "finding.json", finding)
    write_manifest(folder, "report", store.manifest("reports/micro") or pytest.fail())  # type: ignore[arg-type]
    store.publish(folder, "reports/micro")
    assert main(["report", store.url, "--json"]) == 0
    again = json.loads(capsys.readouterr().out)
    assert [r["cell"] for r in again["runs"]] == [r["cell"] for r in finding["runs"]]


def test_another_experiment_or_an_empty_store_is_refused(
    store: Store, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for words, part in (
        (["report", store.url, "--experiment", "nope"], "experiment=nope: unknown"),
        (["report", store.url, "--experiment", "full"], "experiment=full: no cell of it"),
        (["report", str(tmp_path / "none")], "holds no cell"),
    ):
        assert main(words) == 2
        assert part in capsys.readouterr().err


def test_a_score_whose_bytes_have_changed_enters_no_report(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """One digit of the same width: the size is right, the number would be wrong."""
    store = open_store(str(tmp_path / "store"))
    score(store, tmp_path, None, 0, 1)
    for cell in SPEC.cells():
        for step in cell.checkpoints:
            score(store, tmp_path, cell, step, 1)
    path = next((tmp_path / "store").glob("toy_*/scores/*/global_step_2/score.json"))
    path.write_bytes(path.read_bytes().replace(b"1", b"2", 1))
    assert main(["report", str(tmp_path / "store"), "--experiment", "micro"]) == 2
    err = capsys.readouterr().err
    assert "score.json: has other bytes than its manifest says; remove its folder" in err
