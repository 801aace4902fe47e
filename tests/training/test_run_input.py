"""What is wrong with a run directory or a machine is one line and an exit code, before anything heavy starts."""

import json
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from training.folder import CellFile, RunFolder
from training.run import close, main

ROOT = Path(__file__).resolve().parents[2]
ONE_LINE = re.compile(r"error: [\w.]+=.*: .+; .+\n")
Make = Callable[..., RunFolder]
Edit = Callable[[dict[str, Any]], None]


@pytest.fixture(autouse=True)
def our_process() -> Iterator[None]:
    """`main` takes the signals of this process: give them back."""
    handlers = {s: signal.getsignal(s) for s in (signal.SIGTERM, signal.SIGINT)}
    yield
    for number, handler in handlers.items():
        signal.signal(number, handler)


@pytest.fixture
def folder(make_run: Make, tmp_path: Path) -> RunFolder:
    return make_run(tmp_path / "run")


def change(path: Path, edit: Edit) -> None:
    value = json.loads(path.read_text())
    edit(value)
    path.write_text(json.dumps(value))


def refusal(folder: RunFolder, capsys: pytest.CaptureFixture[str]) -> tuple[int, str]:
    """Run in this process; return the exit code and the one line, and check that nothing was started."""
    code = main([str(folder.root)])
    err = capsys.readouterr().err
    assert ONE_LINE.fullmatch(err.split("\n", err.count("\n") - 1)[-1]), err
    assert err.count("error: ") == 1
    assert "Traceback" not in err
    assert not folder.logs.exists()
    assert not folder.rollouts.exists()
    return code, err


def put(*path: str, value: Any) -> Edit:
    def edit(document: dict[str, Any]) -> None:
        for key in path[:-1]:
            document = document[key]
        document[path[-1]] = value

    return edit


@pytest.mark.parametrize(
    ("edit", "words"),
    [
        (put("cell", "stride", value=0), "stride=0"),
        (put("cell", "stride", value=7), "stride=7: longer than the run of 6 steps; use at most 6"),
        (put("cell", "steps", value=2.5), "steps=2.5"),
        (put("cell", "arm", value="replayed"), "arm=replayed: unknown; use one of center, center_bf16, center_int8"),
        (put("cell", "arm", value="hardcd_lam0p1"), "terms=0: the arm hardcd_lam0p1 has 1"),
        (put("cell", "model", value="gpt"), "model=gpt: unknown; use one of"),
        (put("cell", "lr", value=1.5), "lr=1.5"),
        (put("cell", "lr", value="fast"), "lr=fast"),
        (put("cell", "grpo", "top_p", value=0.9), "top_p=0.9"),
        (put("cell", "grpo", "rollouts_per_prompt", value=1), "rollouts_per_prompt=1"),
        (put("cell", "colour", value="red"), "colour=red"),
        (put("schema", value="cell/2"), "schema=cell/2"),
        (lambda d: d.pop("cell"), "cell="),
        (lambda d: d["cell"].pop("lr"), "lr="),
    ],
)
def test_an_impossible_cell_is_named(
    folder: RunFolder, capsys: pytest.CaptureFixture[str], edit: Edit, words: str
) -> None:
    change(folder.cell_json, edit)
    code, line = refusal(folder, capsys)
    assert code == 2
    assert words in line


@pytest.mark.parametrize(
    ("edit", "words", "code"),
    [
        (put("micro_batch", value=0), "micro_batch=0", 2),
        (put("keep_resume", value=0), "keep_resume=0", 2),
        (put("resume_every", value=0), "resume_every=0", 2),
        (put("num_threads", value="many"), "num_threads=many", 2),
        (put("sampler", value="dice"), "sampler=dice", 2),
        (put("turbo", value=True), "turbo=true", 2),
        (put("problems_path", value="/nowhere/train.jsonl"), "problems_path=/nowhere/train.jsonl", 2),
        (put("model_path", value="/nowhere/model"), "model_path=/nowhere/model", 2),
        (lambda d: d.pop("model_path"), "model_path=", 2),
    ],
)
def test_an_impossible_runtime_is_named(
    folder: RunFolder, capsys: pytest.CaptureFixture[str], edit: Edit, words: str, code: int
) -> None:
    change(folder.runtime_json, edit)
    found, line = refusal(folder, capsys)
    assert found == code
    assert words in line


@pytest.mark.parametrize("name", ["cell.json", "runtime.json"])
@pytest.mark.parametrize("content", [None, b"", b"{", b"[1, 2]", b"null", b"\xff\xfe\x00garbage", b'{"cell": NaN}'])
def test_a_missing_or_garbled_file_is_named(
    folder: RunFolder, capsys: pytest.CaptureFixture[str], name: str, content: bytes | None
) -> None:
    path = folder.root / name
    if content is None:
        path.unlink()
    else:
        path.write_bytes(content)
    code, line = refusal(folder, capsys)
    assert code == 2
    if content is None:
        assert f"has no {name}" in line


def test_a_folder_that_is_not_there_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, line = refusal(RunFolder(tmp_path / "absent"), capsys)
    assert (code, "absent" in line) == (2, True)


def test_a_bfloat16_cell_needs_a_gpu(folder: RunFolder, capsys: pytest.CaptureFixture[str]) -> None:
    change(folder.cell_json, put("cell", "grpo", "compute_dtype", value="bfloat16"))
    code, line = refusal(folder, capsys)
    assert code == 3
    assert "device=cpu: bfloat16 cells are trained on a GPU; set device to cuda" in line


def test_cuda_without_a_gpu_is_the_machines_fault(folder: RunFolder, capsys: pytest.CaptureFixture[str]) -> None:
    import torch

    if torch.cuda.is_available():
        pytest.skip("this machine has a GPU")
    change(folder.runtime_json, put("device", value="cuda"))
    code, line = refusal(folder, capsys)
    assert code == 3
    assert "device=cuda: no CUDA device" in line


@pytest.mark.parametrize("damage", ["empty", "no_weights", "cut_weights", "no_tokenizer", "missing_layer"])
def test_a_model_that_cannot_be_read_is_named(
    folder: RunFolder, tmp_path: Path, capsys: pytest.CaptureFixture[str], damage: str
) -> None:
    from safetensors.torch import load, save_file

    model = tmp_path / "model"
    shutil.copytree(ROOT / "training" / "toy_model", model)
    weights = model / "model.safetensors"
    if damage == "empty":
        shutil.rmtree(model)
        model.mkdir()
    elif damage == "no_weights":
        weights.unlink()
    elif damage == "cut_weights":
        weights.write_bytes(weights.read_bytes()[:5000])
    elif damage == "no_tokenizer":
        for path in model.glob("tokenizer*"):
            path.unlink()
    else:
        kept = {k: v for k, v in load(weights.read_bytes()).items() if not k.startswith("model.layers.1.")}
        save_file(kept, weights, metadata={"format": "pt"})
    change(folder.runtime_json, put("model_path", value=str(model)))
    code, line = refusal(folder, capsys)
    assert code == 2
    assert f"model_path={model}" in line


def test_a_split_smaller_than_a_step_is_named(make_run: Make, tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    code, line = refusal(make_run(tmp_path / "run", num_problems=3), capsys)
    assert code == 2
    assert "has 3 problems, fewer than the 4 of a step" in line


def test_the_program_itself_says_it_once_and_fast_and_debug_shows_the_traceback(folder: RunFolder) -> None:
    """A launcher sees only this: exit code, an empty stdout, one line on stderr."""
    change(folder.cell_json, put("cell", "stride", value=0))
    command = [sys.executable, "-m", "training.run", str(folder.root)]
    began = time.monotonic()
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert time.monotonic() - began < 30  # about a second on an idle machine
    assert (done.returncode, done.stdout) == (2, "")
    assert ONE_LINE.fullmatch(done.stderr)
    loud = subprocess.run([*command, "--debug"], cwd=ROOT, capture_output=True, text=True, check=False)
    assert loud.returncode == 2
    assert "Traceback" in loud.stderr


def test_other_problems_than_the_cell_began_with_are_refused(folder: RunFolder, capsys: Any) -> None:
    folder.problems_json.write_text(json.dumps({"schema": "problems/1", "sha256": "0" * 64}))
    code, err = refusal(folder, capsys)
    assert code == 2
    assert "problems_path=" in err and "is not what this cell began with" in err


def test_a_problem_that_is_there_twice_is_refused(folder: RunFolder, tmp_path: Path, capsys: Any) -> None:
    lines = Path(json.loads(folder.runtime_json.read_text())["problems_path"]).read_text().splitlines()
    (tmp_path / "twice.jsonl").write_text("\n".join([*lines, lines[0]]) + "\n")
    change(folder.runtime_json, put("problems_path", value=str(tmp_path / "twice.jsonl")))
    code, err = refusal(folder, capsys)
    assert code == 2
    assert "more than once" in err


@pytest.mark.parametrize("device", ["gpu", "banana", "cuda:x"])
def test_a_device_that_is_none_is_refused(folder: RunFolder, capsys: Any, device: str) -> None:
    change(folder.runtime_json, put("device", value=device))
    assert refusal(folder, capsys)[0] == 2


def test_records_that_changed_after_the_end_are_not_sealed_anew(folder: RunFolder) -> None:
    folder.logs.mkdir()
    ended = {"schema": "result/1", "end": "finished", "last_step": 2, "onset_step": None}
    folder.result_json.write_text(json.dumps(ended))
    folder.steps_jsonl.write_text("{}\n")
    close(folder, CellFile.model_validate_json(folder.cell_json.read_text()))
    before = (folder.logs / "MANIFEST.json").read_text()
    folder.steps_jsonl.write_text("")
    assert main([str(folder.root)]) == 1
    assert (folder.logs / "MANIFEST.json").read_text() == before
