"""Reporters get the lines of steps.jsonl, whatever ends the cell, and change nothing of what is trained."""

import json
import math
import shutil
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load, save_file
from transformers import TrainerCallback
from transformers.integrations import integration_utils

from evaluation.errors import MachineError
from evaluation.files import sha256_file
from training.folder import RunFolder
from training.reporters import refuse_absent
from training.run import main
from training.watching import flat

ROOT = Path(__file__).resolve().parents[2]
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


class Heard(TrainerCallback):
    """A reporter that writes down what it is told; `fails` names the event at which it breaks."""

    events: list[tuple[str, int, dict[str, Any]]]
    fails = ""

    def hear(self, event: str, state: Any, logs: dict[str, Any] | None = None) -> None:
        self.events.append((event, state.global_step, logs or {}))
        if event == self.fails:
            raise ConnectionError("the service\nis away")

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self.hear("begin", state)

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, Any] | None = None, **_: Any) -> None:
        self.hear("log", state, logs)

    def on_train_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self.hear("end", state)


@pytest.fixture
def heard(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> type[Heard]:
    """Stand in for trackio, which need not be installed: an empty package, and a callback in transformers' table."""
    (tmp_path / "path" / "trackio").mkdir(parents=True)
    (tmp_path / "path" / "trackio" / "__init__.py").touch()
    monkeypatch.syspath_prepend(tmp_path / "path")
    reporter = type("HeardCallback", (Heard,), {"events": []})
    monkeypatch.setitem(integration_utils.INTEGRATION_TO_CALLBACK, "trackio", reporter)
    return reporter


TRACKIO = {"report_to": ["trackio"], "experiment": "micro"}


def lines(folder: RunFolder) -> list[dict[str, Any]]:
    return [json.loads(line) for line in folder.steps_jsonl.read_text().splitlines()]


def test_each_step_is_told_once_as_it_was_written_beside_trls_figures(
    make_run: Make, tmp_path: Path, heard: type[Heard]
) -> None:
    folder = make_run(tmp_path / "run", arm="hardcd_lam0p1", steps=3, runtime=TRACKIO)
    assert main([str(folder.root)]) == 0
    assert [(event, step) for event, step, _ in heard.events] == [
        ("begin", 0), ("log", 1), ("log", 2), ("log", 3), ("end", 3),
    ]  # fmt: skip
    for (_, _, told), line in zip(heard.events[1:4], lines(folder), strict=True):
        assert told.items() >= flat(line).items()
        assert {"reward", "loss", "grad_norm", "entropy", "varied_groups", "replay/drawn"} <= flat(line).keys()
        assert {"learning_rate", "completions/mean_length"} <= told.keys()
        assert not [k for k, v in told.items() if v is None]


def test_watching_changes_no_number(make_run: Make, tmp_path: Path, heard: type[Heard]) -> None:
    watched = make_run(tmp_path / "watched", arm="hardcd_lam0p1", steps=3, runtime=TRACKIO)
    alone = make_run(tmp_path / "alone", arm="hardcd_lam0p1", steps=3)
    assert main([str(watched.root)]) == main([str(alone.root)]) == 0
    assert heard.events
    first, second = (sha256_file(f.checkpoint(3) / "model.safetensors") for f in (watched, alone))
    assert first == second
    assert [r | {"seconds": 0} for r in lines(watched)] == [r | {"seconds": 0} for r in lines(alone)]
    assert sorted(p.name for p in watched.logs.iterdir()) == sorted(p.name for p in alone.logs.iterdir())


def test_the_step_that_broke_off_is_told_too(make_run: Make, tmp_path: Path, heard: type[Heard]) -> None:
    model = tmp_path / "model"
    shutil.copytree(ROOT / "training" / "toy_model", model)
    tensors = load((model / "model.safetensors").read_bytes())
    tensors["model.layers.0.mlp.down_proj.weight"][0, 0] = math.nan
    save_file(tensors, model / "model.safetensors", metadata={"format": "pt"})
    folder = make_run(tmp_path / "run", runtime={**TRACKIO, "model_path": str(model)})
    assert main([str(folder.root)]) == 0
    (_, (event, step, told), (last, *_)) = heard.events
    assert (event, step, last) == ("log", 1, "end")
    assert math.isnan(told["reward"])
    assert math.isnan(told["grad_norm"])


@pytest.mark.parametrize(("fails", "told"), [("begin", ["begin"]), ("log", ["begin", "log"])])
def test_a_reporter_that_breaks_costs_its_curve_only(
    make_run: Make, tmp_path: Path, heard: type[Heard], caplog: pytest.LogCaptureFixture, fails: str, told: list[str]
) -> None:
    heard.fails = fails
    folder = make_run(tmp_path / "run", steps=3, runtime=TRACKIO)
    assert main([str(folder.root)]) == 0
    assert [event for event, _, _ in heard.events] == told
    assert len(lines(folder)) == 3
    (line,) = [r.getMessage() for r in caplog.records if "tells nothing more" in r.getMessage()]
    assert line == "heard tells nothing more of this attempt: the service is away"


def test_a_package_that_is_not_installed_is_refused() -> None:
    refuse_absent([])
    with pytest.raises(MachineError, match="report_to=no_such_package: the package is not installed; install the ext"):
        refuse_absent(["json", "no_such_package"])


def test_figures_are_numbers_and_what_is_null_is_left_out() -> None:
    line = {"global_step": 3, "reward": 0.5, "grad_norm": "Infinity", "replay": {"drawn": 2, "nll": None}}
    assert flat(line) == {"reward": 0.5, "grad_norm": math.inf, "replay/drawn": 2.0}
    assert flat({"global_step": 1, "replay": None, "loss": "NaN"}).keys() == {"loss"}
