"""Bad input: the error line and exit code of the contracts, within seconds, and nothing started."""

import json
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest

from flows.cli import main

ROOT = Path(__file__).resolve().parents[2]
SHARED = ROOT.parent / "shared"
LINE = re.compile(r"error: [\w.-]+=.*: .+; .+\n")
SECONDS = 10


def refused(capsys: pytest.CaptureFixture[str], code: int, *words: str) -> str:
    """Assert that a command is refused with `code` and one line in time, in both forms; return the line."""
    lines = []
    for more in ([], ["--json"]):
        capsys.readouterr()
        start = time.monotonic()
        assert main([*words, *more]) == code, capsys.readouterr()
        assert time.monotonic() - start < SECONDS
        out, err = capsys.readouterr()
        assert LINE.fullmatch(err), err
        lines.append(err)
        if more:
            document = json.loads(out)
            assert (document["schema"], document["exit_code"]) == ("error/1", code)
            assert f"error: {document['error']}\n" == err
        else:
            assert out == ""
    assert lines[0] == lines[1]
    return lines[0]


@pytest.mark.parametrize(
    ("words", "part"),
    [
        ("", "COMMAND="),
        ("fly", "COMMAND=fly: unknown; use one of run, plan"),
        ("plan", "experiment=: is missing"),
        ("plan nope", "experiment=nope: unknown experiment; use one of "),
        ("run nope", "experiment=nope: unknown experiment"),
        ("plan full --cells nope", "cells=nope: not a cell of full"),
        ("run smoke --cells toy_toy_nobuf_lr3e4,nope", "cells=nope: not a cell of smoke"),
        ("run smoke --cells toy_toy_nobuf_lr3e4,", "cells=: not a cell of smoke"),
        ("run smoke --cells toy_toy_nobuf_lr3e-4", "cells=toy_toy_nobuf_lr3e-4"),
        ("plan full --model gpt2", "model=gpt2: unknown model; use one of"),
        ("plan full --model toy", "model=toy: cannot be prompted"),
        ("run smoke --model q25_3b", "model=q25_3b: cannot be prompted"),
        ("plan full --seeds 0", "seeds=0: should be greater than or equal to 1; use 1 or more"),
        ("plan full --seeds -1", "seeds=-1"),
        ("plan full --seeds many", "seeds=many: is not a whole number"),
        ("plan full --seeds 1.5", "seeds=1.5: is not a whole number"),
        ("plan full --seeds 1000000", "seeds=1000000: should be less than or equal to 1000; use 1000 or less"),
        ("run micro --seeds 1000000", "seeds=1000000"),
        ("run micro --store=", "store=: String should have at least 1 character; leave it out, or give"),
        ("run micro --runs=", "runs=: String should have at least 1 character; leave it out, or give"),
        ("verify --json=", "arguments="),
        ("run smoke --max-parallel-cells 0", "max_parallel_cells=0"),
        ("plan full --hosts 0", "hosts=0"),
        ("plan full --slots -2", "slots=-2"),
        ("plan full --slots 3", "slots=3: of how many hosts; add --hosts N"),
        ("run micro --mbpp x", "mbpp=x: micro generates its problems; leave it out"),
        ("plan smoke --mbpp-plus x", "mbpp_plus=x: smoke generates its problems; leave it out"),
        ("plan full --slot 2", "arguments=--slot 2: not known here"),
        ("plan full extra", "arguments=extra: not known here"),
        ("plan full --seeds", "seeds=: expected one argument"),
        ("split --mbpp /nowhere/mbpp.jsonl", "mbpp=/nowhere/mbpp.jsonl"),
        ("verify /nowhere", "store=file:///nowhere: holds no folder"),
        ("verify ftp://host/store", "store=ftp://host/store: scheme 'ftp' is not served"),
        ("verify file://relative", "store=file://relative"),
        ("publish /nowhere --hub me/runs", "store=file:///nowhere"),
        ("publish /nowhere --hub nonsense", "hub=nonsense: is not a repository's name; write ORG/NAME"),
        ("publish /nowhere", "hub=: is missing"),
        ("score /nowhere.jsonl --benchmark mbpp_plus", "samples=/nowhere.jsonl: no such file"),
        ("score /nowhere.jsonl", "benchmark=: is missing"),
        ("doctor --experiment nope", "experiment=nope"),
    ],
)
def test_wrong_words_are_refused_with_field_value_reason_and_fix(
    words: str, part: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert part in refused(capsys, 2, *words.split())


def wrong_version(tmp_path: Path) -> Path:
    """MBPP+ with 399 problems, as v0.1.0 has."""
    source = SHARED / "data" / "MbppPlus-v0.2.0.jsonl"
    if not source.is_file():
        pytest.skip("needs ../shared/data")
    rows = [json.loads(line) for line in source.read_text(encoding="utf-8").splitlines()]
    extra = [{**rows[i], "task_id": f"Mbpp/{10_000 + i}"} for i in range(21)]
    path = tmp_path / "MbppPlus-v0.1.0.jsonl"
    path.write_text("".join(json.dumps(r) + "\n" for r in rows + extra))
    return path


def test_the_wrong_version_of_mbpp_plus_is_refused_with_the_reason(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    mbpp = str(SHARED / "data" / "mbpp.jsonl")
    line = refused(capsys, 2, "split", "--mbpp", mbpp, "--mbpp-plus", str(wrong_version(tmp_path)))
    assert "399" in line and "378" in line


@pytest.mark.parametrize("content", ["", "{\n", '{"a": 1}\n', "not json\n", "\x00\x01"])
def test_a_wrong_file_is_refused(tmp_path: Path, content: str, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "mbpp.jsonl"
    path.write_text(content)
    refused(capsys, 2, "split", "--mbpp", str(path), "--mbpp-plus", str(path))


def test_a_folder_in_the_place_of_a_file_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    refused(capsys, 2, "split", "--mbpp", str(tmp_path), "--mbpp-plus", str(tmp_path))
    refused(capsys, 2, "score", str(tmp_path), "--benchmark", "mbpp_plus")


SAMPLE = {"task_id": "Mbpp/2", "solution": "def similar_elements(a, b): ..."}


@pytest.mark.parametrize(
    ("rows", "more"),
    [
        ([{**SAMPLE, "task_id": "Mbpp/1"}], []),
        ([{**SAMPLE, "completion": "x"}], []),
        ([{"task_id": "Mbpp/2"}], []),
        ([{"solution": "x"}], []),
        ([SAMPLE, SAMPLE], []),
        ([SAMPLE], []),
        ([SAMPLE], ["--partial", "--k", "2"]),
        ([SAMPLE], ["--partial", "--k", "0"]),
        ([SAMPLE], ["--partial", "--k", "one"]),
        ([SAMPLE], ["--partial", "--workers", "0"]),
        ([SAMPLE], ["--partial", "--problems", "/nowhere"]),
        ([], ["--partial"]),
    ],
)
def test_samples_that_cannot_be_scored_are_refused(
    tmp_path: Path, rows: list[dict[str, str]], more: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    plus = SHARED / "data" / "MbppPlus-v0.2.0.jsonl"
    if not plus.is_file():
        pytest.skip("needs ../shared/data")
    path = tmp_path / "samples.jsonl"
    path.write_text("".join(json.dumps(r) + "\n" for r in rows))
    flags = ["--benchmark", "mbpp_plus", "--mbpp-plus", str(plus), "--out", str(tmp_path / "out")]
    refused(capsys, 2, "score", str(path), *flags, *more)


def test_an_unknown_benchmark_is_refused_with_the_known_ones(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "s.jsonl").write_text(json.dumps(SAMPLE) + "\n")
    line = refused(capsys, 2, "score", str(tmp_path / "s.jsonl"), "--benchmark", "humaneval")
    assert "mbpp_plus" in line


@pytest.mark.parametrize("where", ["/proc/ablation/store", "{tmp}/file/store"])
def test_an_unwritable_store_is_found_before_anything_starts(
    tmp_path: Path, where: str, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").write_text("in the way")
    store = where.format(tmp=tmp_path)
    line = refused(capsys, 3, "run", "micro", "--runs", str(tmp_path / "runs"), "--store", store)
    assert "store=" in line and "cannot be written" in line
    assert not (tmp_path / "runs" / "toy_toy_nobuf_lr3e4").exists()


def test_full_without_a_gpu_says_what_is_missing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    if Path("/dev/nvidia0").exists():
        pytest.skip("this machine has a GPU")
    line = refused(capsys, 3, "run", "full", "--runs", str(tmp_path / "runs"))
    assert "gpu=none" in line and "try `ablation run smoke`" in line
    line = refused(capsys, 3, "run", "score_centering", "--runs", str(tmp_path / "runs"))
    assert "try `ablation run score_centering_smoke`" in line
    assert not (tmp_path / "runs").exists()


CELL = {
    "model": "toy",
    "benchmark": "toy",
    "arm": "nobuf",
    "lr": 3e-4,
    "seed": 0,
    "steps": 4,
    "stride": 2,
    "grpo": {"compute_dtype": "float32"},
}
FILE = {
    "schema": "cell/1",
    "cell": CELL,
    "prompt": {"name": "toy/1", "rendering": "plain", "extraction": "whole/1", "stop_ids": [1]},
    "split_sha256": "s",
    "revisions": {"model": "m", "datasets": {}},
}
RUNTIME = {"schema": "runtime/1", "model_path": "/nowhere/model", "problems_path": "/nowhere/train.jsonl"}


@pytest.mark.parametrize(
    ("cell", "runtime", "part"),
    [
        ({**FILE, "cell": {**CELL, "stride": 0}}, RUNTIME, "cell.stride=0"),
        ({**FILE, "cell": {**CELL, "stride": 9}}, RUNTIME, "stride=9"),
        ({**FILE, "cell": {**CELL, "lr": 3}}, RUNTIME, "cell.lr=3"),
        ({**FILE, "cell": {**CELL, "arm": "x"}}, RUNTIME, "arm=x"),
        ({**FILE, "cell": {**CELL, "speed": 1}}, RUNTIME, "cell.speed=1"),
        (FILE, {**RUNTIME, "num_threads": 0}, "num_threads=0"),
        (FILE, RUNTIME, "/nowhere"),
        (None, RUNTIME, "cell.json"),
        (FILE, None, "runtime.json"),
    ],
)
def test_training_refuses_a_folder_that_makes_no_sense(
    tmp_path: Path, cell: dict[str, object] | None, runtime: dict[str, object] | None, part: str
) -> None:
    if not (ROOT / "training" / "run.py").is_file():
        pytest.skip("training.run is not there")
    for name, value in (("cell.json", cell), ("runtime.json", runtime)):
        if value is not None:
            (tmp_path / name).write_text(json.dumps(value))
    module_refuses("training.run", tmp_path, part)


def test_programs_refuse_a_folder_that_is_not_there(tmp_path: Path) -> None:
    for module in ("training.run", "evaluation.run"):
        if (ROOT / f"{module.replace('.', '/')}.py").is_file():
            module_refuses(module, tmp_path / "absent", "absent")


def module_refuses(module: str, folder: Path, part: str) -> None:
    """Assert that `python -m module FOLDER` exits 2 with one line that has `part` in it."""
    found = subprocess.run(
        [sys.executable, "-m", module, str(folder)], cwd=ROOT, capture_output=True, text=True, timeout=60, check=False
    )
    assert found.returncode == 2, found.stderr[-2000:]
    last = found.stderr.splitlines(keepends=True)[-1]
    assert LINE.fullmatch(last) and part in last, found.stderr[-2000:]
    assert "Traceback" not in found.stderr


@pytest.mark.prefect
def test_a_store_that_holds_another_run_is_refused_with_the_difference(tmp_path: Path) -> None:
    from evaluation.manifests import Revisions, write_manifest
    from flows.experiments import EXPERIMENTS
    from training.cell import Identity
    from training.store import open_store

    cell = EXPERIMENTS["micro"].cells()[0]
    other = Identity(
        cell_config=cell.replace(steps=8),
        split_sha256="s",
        prompt_sha256="p",
        revisions=Revisions(model="m", datasets={}),
    )
    (tmp_path / "f").mkdir()
    (tmp_path / "f" / "config.json").write_text("{}")
    write_manifest(tmp_path / "f", "checkpoint", other.provenance(cell.name, 2))
    open_store(str(tmp_path / "store")).publish(tmp_path / "f", f"{cell.name}/global_step_2")
    flags = ["--runs", str(tmp_path / "runs"), "--store", str(tmp_path / "store"), "--json"]
    found = subprocess.run(
        [sys.executable, "-m", "flows.cli", "run", "micro", *flags],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert found.returncode == 2, found.stderr[-2000:]
    assert json.loads(found.stdout)["exit_code"] == 2
    assert "Traceback" not in found.stderr
    last = found.stderr.splitlines(keepends=True)[-1]
    assert LINE.fullmatch(last) and "cell_config.steps: 4 -> 8" in last
    assert not (tmp_path / "runs" / cell.name / "rollouts").exists()


@pytest.mark.parametrize("out", ["/proc/nowhere", "/dev/null/x"])
def test_results_that_could_not_be_written_are_refused_before_anything_is_judged(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], out: str
) -> None:
    (tmp_path / "s.jsonl").write_text('{"task_id": "Toy/1", "solution": ""}\n')
    line = refused(capsys, 3, "score", str(tmp_path / "s.jsonl"), "--benchmark", "toy_plus", "--partial", "--out", out)
    assert line.startswith(f"error: out={out}: cannot be written (")
