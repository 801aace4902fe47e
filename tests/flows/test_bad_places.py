"""Places that cannot be read, written or reached: the error line and code, at once, whoever runs the command."""

import json
import os
import re
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest

from evaluation.manifests import Revisions, write_manifest
from flows.experiments import EXPERIMENTS
from training.cell import Identity
from training.store import open_store

ROOT = Path(__file__).resolve().parents[2]
TOY = ROOT / "training" / "toy_model"
LINE = re.compile(r"error: [\w.-]+=.*: .+; .+\n")
LIKE_A_USER = ("setpriv", "--bounding-set", "-dac_override,-dac_read_search")
"""Root may read and write everything; without these two capabilities permissions hold for it as for a user."""
SECONDS = 20


def refused(code: int, *words: str, cwd: Path, unprivileged: bool = False, **env: str) -> str:
    """Run a command, as a user without privileges if asked; assert its code and its one line, and return that."""
    prefix: tuple[str, ...] = ()
    if unprivileged and os.getuid() == 0:
        if shutil.which(LIKE_A_USER[0]) is None:
            pytest.skip("needs setpriv to give up root's privileges")
        prefix = LIKE_A_USER
    start = time.monotonic()
    found = subprocess.run(
        [*prefix, sys.executable, "-m", "flows.cli", *words],
        cwd=cwd,
        env={**os.environ, "PYTHONPATH": str(ROOT), "HOME": str(cwd), **env},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert found.returncode == code, found.stderr[-2000:]
    assert time.monotonic() - start < SECONDS
    lines = [x for x in found.stderr.splitlines(keepends=True) if x.startswith("error: ")]
    assert len(lines) == 1 and LINE.fullmatch(lines[0]), found.stderr[-2000:]
    assert "Traceback" not in found.stderr
    return lines[0]


def store_with_a_checkpoint(root: Path) -> Path:
    cell = EXPERIMENTS["micro"].cells()[0]
    identity = Identity(
        cell_config=cell, split_sha256="s", prompt_sha256="p", revisions=Revisions(model="m", datasets={})
    )
    shutil.copytree(TOY, root / "made")
    write_manifest(root / "made", "checkpoint", identity.provenance(cell.name, 2))
    open_store(str(root / "store")).publish(root / "made", f"{cell.name}/global_step_2")
    return root / "store"


def test_an_unreadable_folder_of_a_store_is_no_empty_one(tmp_path: Path) -> None:
    store = store_with_a_checkpoint(tmp_path)
    folder = next(store.glob("*/global_step_2"))
    folder.chmod(0)
    try:
        line = refused(3, "verify", str(store), cwd=tmp_path, unprivileged=True)
    finally:
        folder.chmod(0o755)
    assert "global_step_2: Permission denied; give this user access" in line


def test_an_unreadable_file_of_a_store_is_told(tmp_path: Path) -> None:
    store = store_with_a_checkpoint(tmp_path)
    weights = next(store.glob("*/global_step_2/*.safetensors"))
    weights.chmod(0)
    line = refused(3, "verify", str(store), cwd=tmp_path, unprivileged=True)
    assert f"path={weights}: Permission denied" in line


def test_a_store_that_may_not_be_written_gets_no_report(tmp_path: Path) -> None:
    store = store_with_a_checkpoint(tmp_path)
    store.chmod(0o555)
    line = refused(3, "report", str(store), "--experiment", "micro", cwd=tmp_path, unprivileged=True)
    assert line.startswith(f"error: store={store.as_uri()}: cannot be written (Permission denied); give")


@pytest.mark.parametrize("words", ["score {file} --benchmark toy_plus", "split --mbpp {file} --mbpp-plus {file}"])
def test_an_unreadable_file_is_told_as_one(tmp_path: Path, words: str) -> None:
    file = tmp_path / "samples.jsonl"
    file.write_text(json.dumps({"task_id": "Toy/1", "solution": ""}) + "\n")
    file.chmod(0)
    line = refused(2, *words.format(file=file).split(), cwd=tmp_path, unprivileged=True)
    assert "this user may not read it" in line or "cannot be read (Permission denied)" in line


def test_run_directories_that_may_not_be_written_are_refused_before_anything_starts(tmp_path: Path) -> None:
    runs = tmp_path / "runs"
    runs.mkdir(mode=0o555)
    store = tmp_path / "store"
    line = refused(3, "run", "micro", "--runs", str(runs), "--store", str(store), cwd=tmp_path, unprivileged=True)
    assert line == f"error: runs={runs}: cannot be written (Permission denied); give another folder with --runs\n"


@pytest.mark.parametrize("offline", ["0", "1"])
def test_a_hub_out_of_reach_is_this_machine_s_lack(tmp_path: Path, offline: str) -> None:
    store = store_with_a_checkpoint(tmp_path)
    env = {"HF_ENDPOINT": "http://127.0.0.1:9", "HF_TOKEN": "hf_x", "HF_HUB_OFFLINE": offline}
    line = refused(3, "publish", str(store), "--hub", "nobody/nothing", cwd=tmp_path, **env)
    assert line.startswith("error: hub=nobody/nothing: ")


@pytest.mark.parametrize(
    ("words", "code", "part"),
    [
        ("--out /proc/nowhere/x", 3, "out=/proc/nowhere: cannot be written"),
        ("--device tpu", 2, "device=tpu: unknown; use cpu, cuda or cuda:N"),
        ("--engine magic", 2, "engine=magic: unknown; use one of transformers, vllm"),
        ("--threads 0", 2, "threads=0"),
        ("--max-tokens 0", 2, "max_tokens=0"),
        ("--max-tokens 100000", 2, "max_tokens=100000: the model's context has"),
        ("--num-problems 99999", 2, "num_problems=99999: toy_plus has 128; use at most 128"),
        ("--temperature nan", 2, "temperature=NaN"),
    ],
)
def test_an_evaluation_that_cannot_be_is_refused_before_the_model_is_loaded(
    tmp_path: Path, words: str, code: int, part: str
) -> None:
    line = refused(code, "evaluate", str(TOY), "--benchmark", "toy_plus", *words.split(), cwd=tmp_path)
    assert part in line
    assert not (tmp_path / "evaluations").exists()


def test_a_corrected_evaluation_is_not_held_up_by_the_refused_one(tmp_path: Path) -> None:
    """The child refuses weights that are not there; what it was asked must not stay behind and block the next."""
    hollow = tmp_path / "hollow"
    shutil.copytree(TOY, hollow, ignore=shutil.ignore_patterns("*.safetensors"))
    words = ("evaluate", str(hollow), "--benchmark", "toy_plus", "--num-problems", "2", "--n", "1", "--out", "scored")
    refused(2, *words, cwd=tmp_path)
    assert not (tmp_path / "scored.work").exists()


@pytest.mark.parametrize("path", ["model.safetensors", "tokenizer.json"])
def test_a_checkpoint_with_other_bytes_of_the_same_size_is_not_evaluated(tmp_path: Path, path: str) -> None:
    store = store_with_a_checkpoint(tmp_path)
    folder = next(store.glob("*/global_step_2"))
    size = (folder / path).stat().st_size
    (folder / path).write_bytes(bytes(size))
    line = refused(2, "evaluate", str(folder), "--n", "1", "--num-problems", "2", cwd=tmp_path)
    assert f"differs from its manifest: {path} has other bytes than its manifest says; fetch it again" in line
