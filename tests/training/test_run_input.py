"""What is wrong with a run directory or a machine is one line and an exit code, before anything heavy starts."""

import json
import os
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

from evaluation.files import write_json, write_jsonl
from evaluation.manifests import is_complete
from training.folder import CellFile, Result, RunFolder
from training.run import main, read_folder
from training.started import begin, close

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


def claim(folder: RunFolder) -> None:
    """Note, as the trainer does before its first step, whose the folder is."""
    cell_file, runtime = read_folder(folder)
    begin(folder, cell_file, Path(runtime.problems_path), 0)


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
    claim(folder)
    with Path(json.loads(folder.runtime_json.read_text())["problems_path"]).open("a") as problems:
        problems.write("\n")
    code, err = refusal(folder, capsys)
    assert code == 2
    assert "problems_path=" in err and "is not what this cell began with" in err


def test_a_folder_in_which_another_cell_has_begun_is_refused_with_the_difference(
    folder: RunFolder, capsys: Any
) -> None:
    """Killed before its first resume state it has left no manifest."""
    claim(folder)
    change(folder.cell_json, put("cell", "seed", value=7))
    code, err = refusal(folder, capsys)
    assert code == 2
    assert f"cell={folder.began_json}: holds another run (cell_config.seed: 7 -> 0); use another" in err


@pytest.mark.parametrize("content", ["", "{", '{"schema": "began/1"}'])
def test_a_garbled_note_of_the_beginning_is_named(folder: RunFolder, capsys: Any, content: str) -> None:
    folder.began_json.write_text(content)
    assert refusal(folder, capsys)[0] == 2


def test_a_start_that_was_refused_claims_nothing(make_run: Make, tmp_path: Path, capsys: Any) -> None:
    """Otherwise the right file of problems would be refused after the wrong one."""
    folder = make_run(tmp_path / "run", num_problems=3)
    assert refusal(folder, capsys)[0] == 2
    assert not folder.began_json.exists()


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
    ended = {"schema": "result/1", "end": "finished", "last_step": 1, "onset_step": None}
    folder.result_json.write_text(json.dumps(ended))
    folder.steps_jsonl.write_text('{"global_step": 1}\n')
    close(folder, CellFile.model_validate_json(folder.cell_json.read_text()))
    before = (folder.logs / "MANIFEST.json").read_text()
    folder.steps_jsonl.write_text("")
    assert main([str(folder.root)]) == 1
    assert (folder.logs / "MANIFEST.json").read_text() == before


@pytest.mark.parametrize("end", ["finished", "diverged"])
@pytest.mark.parametrize(
    "lost", ["rollouts", "step_000001", "step_000003", "step_000005", "steps.jsonl", "line 2", "line 6"]
)
def test_records_that_lost_a_step_before_they_were_sealed_are_not_sealed(
    folder: RunFolder, capsys: Any, lost: str, end: str
) -> None:
    """Killed between its result and its manifests; what went since would be missing from a whole folder."""
    ended(folder, end)
    if lost == "rollouts":
        shutil.rmtree(folder.rollouts)
    elif lost == "steps.jsonl":
        folder.steps_jsonl.unlink()
    elif lost.startswith("line"):
        lines = folder.steps_jsonl.read_text().splitlines(keepends=True)
        del lines[int(lost.split()[1]) - 1]
        folder.steps_jsonl.write_text("".join(lines))
    else:
        (folder.rollouts / f"{lost}.parquet").unlink()
    for _ in range(2):
        assert main([str(folder.root)]) == 1
        err = capsys.readouterr().err
        assert ONE_LINE.fullmatch(err)
        assert "restore it, or remove the cell's folder" in err
        assert not (folder.logs / "MANIFEST.json").exists() and not (folder.rollouts / "MANIFEST.json").exists()


@pytest.mark.parametrize(
    ("end", "after", "lacking"), [("finished", 4, (1, 4)), ("diverged", 0, (6,)), ("finished", 0, ())]
)
def test_records_that_were_never_here_are_no_loss(
    folder: RunFolder, end: str, after: int, lacking: tuple[int, ...]
) -> None:
    """Those before another folder's resume state, and those of a step that broke off in sampling."""
    ended(folder, end, after)
    for step in lacking:
        folder.rollout(step).unlink()
    assert main([str(folder.root)]) == 0
    assert is_complete(folder.logs) and is_complete(folder.rollouts)


def ended(folder: RunFolder, end: str, after: int = 0) -> None:
    """Leave the records of six steps, as a cell has them when it has ended and sealed nothing yet."""
    cell_file, runtime = read_folder(folder)
    begin(folder, cell_file, Path(runtime.problems_path), after)
    write_jsonl(folder.steps_jsonl, ({"global_step": s} for s in range(1, 7)))
    onset = 6 if end == "diverged" else None
    write_json(folder.result_json, Result.model_validate({"end": end, "last_step": 6, "onset_step": onset}))
    folder.rollouts.mkdir()
    for step in range(1, 7):
        folder.rollout(step).write_bytes(b"rows")


KILLED_WHILE_IMPORTING = """
import os, signal, time
os.kill(os.getpid(), signal.{})
time.sleep(60)
"""


@pytest.mark.parametrize("what", ["SIGTERM", "SIGINT"])
@pytest.mark.parametrize("module", ["training.run", "training.launch", "evaluation.run"])
def test_a_signal_while_the_program_is_still_imported_is_a_stop(
    folder: RunFolder, tmp_path: Path, module: str, what: str
) -> None:
    """Not a death by signal, and no traceback: the first import of another's package is made to send it."""
    (tmp_path / "pydantic.py").write_text(KILLED_WHILE_IMPORTING.format(what))
    env = {**os.environ, "PYTHONPATH": str(tmp_path)}
    done = subprocess.run(
        [sys.executable, "-m", module, str(folder.root)], cwd=ROOT, env=env, capture_output=True, text=True, check=False
    )
    assert done.returncode == 75
    assert ONE_LINE.fullmatch(done.stderr)
