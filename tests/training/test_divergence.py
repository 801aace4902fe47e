"""Divergence and collapse are results: exit 0, the onset recorded, the log strict JSON to the last line."""

import json
import logging
import math
import re
import shutil
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NoReturn

import pytest
import torch
from safetensors.torch import load, save_file

from evaluation.manifests import is_complete
from training.callbacks import jsonable
from training.folder import RunFolder
from training.grpo import Grpo
from training.run import main
from training.signs import WINDOW

ROOT = Path(__file__).resolve().parents[2]
TINY = Grpo(prompts_per_step=4, rollouts_per_prompt=4, max_new_tokens=48, compute_dtype="float32")
DIVERGED = {"schema": "result/1", "end": "diverged"}
Make = Callable[..., RunFolder]


@pytest.fixture(autouse=True)
def our_process() -> Iterator[None]:
    """These cells train in this process: give its signal handlers and threads back."""
    handlers = {s: signal.getsignal(s) for s in (signal.SIGTERM, signal.SIGINT)}
    threads = torch.get_num_threads()
    yield
    for number, handler in handlers.items():
        signal.signal(number, handler)
    torch.set_num_threads(threads)


def refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not JSON")


def rows(folder: RunFolder) -> list[dict[str, Any]]:
    """Read steps.jsonl as strictly as any other tool would."""
    text = folder.steps_jsonl.read_text()
    return [json.loads(line, parse_constant=refuse_constant) for line in text.splitlines()]


def result(folder: RunFolder) -> dict[str, Any]:
    return json.loads(folder.result_json.read_text())


def changed_model(out: Path, change: Callable[[dict[str, torch.Tensor]], None]) -> Path:
    """Copy the shipped model with other weights."""
    shutil.copytree(ROOT / "training" / "toy_model", out)
    tensors = load((out / "model.safetensors").read_bytes())
    change(tensors)
    save_file(tensors, out / "model.safetensors", metadata={"format": "pt"})
    return out


def poison(value: float) -> Callable[[dict[str, torch.Tensor]], None]:
    def change(tensors: dict[str, torch.Tensor]) -> None:
        tensors["model.layers.0.mlp.down_proj.weight"][0, 0] = value

    return change


def mute(tensors: dict[str, torch.Tensor]) -> None:
    """Make every token equally likely: no completion of it is a program."""
    tensors["model.norm.weight"].zero_()


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_a_model_that_is_not_finite_diverges_at_its_first_step(make_run: Make, tmp_path: Path, value: float) -> None:
    model = changed_model(tmp_path / "model", poison(value))
    folder = make_run(tmp_path / "run", runtime={"model_path": str(model)})
    assert main([str(folder.root)]) == 0
    empty = {"name": "empty_reward", "onset_step": 1, "detail": "no rollout was judged, from step 1 to the last"}
    assert result(folder) == {**DIVERGED, "last_step": 1, "onset_step": 1, "signs": [empty]}
    assert folder.checkpoints() == folder.resumes() == []
    assert is_complete(folder.logs)
    assert main([str(folder.root)]) == 0  # and stays ended


@pytest.mark.parametrize("arm", ["nobuf", "hardcd_lam0p1"])
def test_an_enormous_rate_ends_one_way_or_the_other(make_run: Make, tmp_path: Path, arm: str) -> None:
    folder = make_run(tmp_path / "run", arm=arm, lr=0.9, steps=4)
    assert main([str(folder.root)]) == 0
    found = result(folder)
    if found["end"] == "finished":
        assert (found["last_step"], folder.checkpoints()) == (4, [2, 4])
    else:
        assert found["onset_step"] == found["last_step"] <= 4
        assert all(s < found["onset_step"] for s in folder.checkpoints())
    assert [r["global_step"] for r in rows(folder)] == list(range(1, len(rows(folder)) + 1))


def test_weights_that_overflow_end_the_run_and_keep_the_figures_of_their_step(make_run: Make, tmp_path: Path) -> None:
    """AdamW multiplies the weights by 1 - rate x decay: past the range of float32 in one step."""
    folder = make_run(tmp_path / "run", grpo=TINY.replace(weight_decay=1e39), lr=0.9)
    assert main([str(folder.root)]) == 0
    assert result(folder) == {**DIVERGED, "last_step": 1, "onset_step": 1, "signs": []}
    (row,) = rows(folder)
    assert row["global_step"] == 1
    assert 0 <= row["reward"] <= 1
    assert folder.rollout(1).is_file()
    assert folder.checkpoints() == folder.resumes() == []


def test_a_divergence_in_the_middle_keeps_what_was_before_it(make_run: Make, tmp_path: Path) -> None:
    """The weights grow ten-millionfold a step: usable at the checkpoint of step 2, not at 3 or 4 (rounding chooses)."""
    folder = make_run(tmp_path / "run", arm="hardcd_lam0p1", grpo=TINY.replace(weight_decay=1e7), lr=0.9)
    assert main([str(folder.root)]) == 0
    found = result(folder)
    onset = found["onset_step"]
    assert onset in (3, 4)
    assert found == {**DIVERGED, "last_step": onset, "onset_step": onset, "signs": found["signs"]}
    assert folder.checkpoints() == folder.resumes() == [2]
    logged = rows(folder)
    assert [r["global_step"] for r in logged] == list(range(1, onset + 1))
    assert all(isinstance(r["grad_norm"], float) for r in logged[:-1])
    assert logged[-1]["grad_norm"] == "NaN"
    assert not folder.rollout(onset + 1).exists()
    assert is_complete(folder.logs)
    assert is_complete(folder.rollouts)


def test_a_collapsed_run_trains_on_to_its_end_and_says_since_when(
    make_run: Make, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Every reward is 0: no advantage, no replay, and still every step, checkpoint and line."""
    model = changed_model(tmp_path / "model", mute)
    changes = {"steps": 7, "stride": 4, "runtime": {"model_path": str(model)}}
    folder = make_run(tmp_path / "run", arm="hardcd_lam0p1", **changes)
    with caplog.at_level(logging.INFO):
        assert main([str(folder.root)]) == 0
    found = result(folder)
    assert (found["end"], found["onset_step"]) == ("finished", None)
    flat = {"name": "constant_reward", "onset_step": 1, "detail": "every reward is 0, from step 1 to the last"}
    assert flat in found["signs"]
    told = [r.getMessage() for r in caplog.records if r.name.startswith("training")]
    (said,) = [i for i, line in enumerate(told) if line.startswith("sign: constant_reward from step 1 (")]
    steps = [i for i, line in enumerate(told) if line.startswith("step ")]
    assert steps[WINDOW - 1] < said < steps[WINDOW]  # at once, and only once
    assert re.fullmatch(r"step 5 of 7: reward 0\.000, grad norm 0, \d+ s left", told[steps[4]])
    assert folder.checkpoints() == [4, 7]
    logged = rows(folder)
    assert [(r["reward"], r["loss"], r["replay"]["drawn"]) for r in logged] == [(0.0, 0.0, 0)] * 7
    assert all(r["varied_groups"] == 0 for r in logged)
    assert all(r["truncated_fraction"] > 0.5 for r in logged)
    assert all(r["entropy"] == pytest.approx(math.log(661), rel=1e-3) for r in logged)


@pytest.mark.parametrize(
    ("value", "text"),
    [(math.nan, "NaN"), (math.inf, "Infinity"), (-math.inf, "-Infinity"), (0.5, 0.5), (None, None), (3, 3)],
)
def test_numbers_that_json_has_no_word_for_are_strings(value: float | None, text: object) -> None:
    assert jsonable(value) == text
