"""The environment: what is read of it, and what is refused."""

import os
import sys

import pytest

from evaluation.errors import InputError
from tasks import settings as settings_module
from tasks.settings import child_environment, prefect_environment, prepare_prefect, settings


def test_defaults(monkeypatch):
    for name in ("ABLATION_LAUNCHER", "ABLATION_HOME"):
        monkeypatch.delenv(name, raising=False)
    found = settings()
    assert (found.launcher, found.home) == ("process", "")
    assert found.cores == len(os.sched_getaffinity(0))


def test_launcher(monkeypatch):
    monkeypatch.setenv("ABLATION_LAUNCHER", "deployment")
    assert settings().launcher == "deployment"
    monkeypatch.setenv("ABLATION_LAUNCHER", "slurm")
    with pytest.raises(InputError, match="ABLATION_LAUNCHER=slurm: unknown launcher; use process or deployment"):
        settings()


def test_the_cage_goes_only_where_somebody_insists(monkeypatch):
    monkeypatch.delenv("ABLATION_UNCAGED", raising=False)
    assert settings().caged
    monkeypatch.setenv("ABLATION_UNCAGED", "1")
    assert not settings().caged
    monkeypatch.setenv("ABLATION_UNCAGED", "yes")
    with pytest.raises(InputError, match="ABLATION_UNCAGED=yes: neither 0 nor 1"):
        settings()


@pytest.fixture
def host(tmp_path, monkeypatch):
    """`host(script, named)`: a host whose nvidia-smi is that shell script."""

    def make(script, named=None):
        if script is not None:
            (tmp_path / "nvidia-smi").write_text(f"#!/bin/sh\n{script}\n")
            (tmp_path / "nvidia-smi").chmod(0o755)
        monkeypatch.setenv("PATH", str(tmp_path))
        monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
        if named is not None:
            monkeypatch.setenv("CUDA_VISIBLE_DEVICES", named)

    return make


@pytest.mark.parametrize(
    ("named", "found"),
    [
        (None, ()),
        ("", ()),
        (" , ", ()),
        ("wandb", ("wandb",)),
        (" tensorboard ,wandb, trackio,wandb", ("tensorboard", "wandb", "trackio")),
    ],
)
def test_reporters_are_named_in_a_list(monkeypatch, named, found):
    if named is None:
        monkeypatch.delenv("ABLATION_REPORT_TO", raising=False)
    else:
        monkeypatch.setenv("ABLATION_REPORT_TO", named)
    assert settings().report_to == found


def test_an_unknown_reporter_is_refused_with_those_there_are(monkeypatch):
    monkeypatch.setenv("ABLATION_REPORT_TO", "wandb,mlflow")
    words = "ABLATION_REPORT_TO=wandb,mlflow: 'mlflow' is no reporter; use a comma list of tensorboard, wandb, trackio"
    with pytest.raises(InputError) as refused:
        settings()
    assert str(refused.value) == words


def test_a_reporters_own_variables_reach_a_child_only_where_it_is_chosen(monkeypatch):
    for name in ("WANDB_PROJECT", "WANDB_MODE", "WANDB_FINISH_TIMEOUT", "TENSORBOARD_LOGGING_DIR"):
        monkeypatch.delenv(name, raising=False)
    for name, value in (("WANDB_API_KEY", "k"), ("TRACKIO_DIR", "d"), ("WANDB_LOG_MODEL", "end")):
        monkeypatch.setenv(name, value)
    assert not [k for k in child_environment(1) if k.startswith(("WANDB_", "TRACKIO_"))]
    assert not [k for k in child_environment(1, ["tensorboard"]) if k.startswith(("WANDB_", "TRACKIO_"))]
    told = child_environment(1, ["wandb"])
    assert {k: v for k, v in told.items() if k.startswith(("WANDB_", "TRACKIO_"))} == {
        "WANDB_API_KEY": "k",
        "WANDB_PROJECT": "rl-ablation",
        "WANDB_FINISH_TIMEOUT": "60",
    }
    monkeypatch.setenv("WANDB_PROJECT", "mine")
    both = child_environment(1, ["wandb", "trackio"])
    assert (both["WANDB_PROJECT"], both["TRACKIO_DIR"]) == ("mine", "d")


@pytest.mark.parametrize(
    ("script", "named", "gpus"),
    [
        ("echo 0; echo 1", None, ("0", "1")),
        ("echo 0; echo 1", "1", ("1",)),
        ("echo 0; echo 1", "", ()),
        ("echo 0; echo 1", "GPU-aa,GPU-bb", ("GPU-aa", "GPU-bb")),
        ("exit 9", None, ()),
        (None, None, ()),
    ],
)
def test_gpus_are_counted_without_cuda(host, script, named, gpus):
    host(script, named)
    assert settings().gpus == gpus


@pytest.mark.parametrize(
    ("gpus", "asked", "found"),
    [
        (4, None, 1),
        (4, "", 1),
        (4, "2", 2),
        (4, "4", 4),
        (4, "5", "this host has 4; use 1 to 4"),
        (4, "0", "this host has 4; use 1 to 4"),
        (4, "two", "this host has 4; use 1 to 4"),
        (4, "-1", "this host has 4; use 1 to 4"),
        (0, "8", 8),
        (0, "65", "not a number from 1 to 64; use 1 to 64"),
    ],
)
def test_gpus_of_a_cell(host, monkeypatch, gpus, asked, found):
    host("; ".join(f"echo {i}" for i in range(gpus)) or None)
    monkeypatch.delenv("ABLATION_GPUS_PER_CELL", raising=False)
    if asked is not None:
        monkeypatch.setenv("ABLATION_GPUS_PER_CELL", asked)
    if isinstance(found, int):
        assert settings().gpus_per_cell == found
        return
    with pytest.raises(InputError) as caught:
        settings()
    assert str(caught.value) == f"ABLATION_GPUS_PER_CELL={asked}: {found}"


@pytest.mark.parametrize(("asked", "left"), [(None, None), ("", None), ("14400", 14400)])
def test_the_time_that_cells_have_counts_from_the_start_of_the_process(monkeypatch, asked, left):
    monkeypatch.setattr(settings_module, "STARTED", 1000.0)
    monkeypatch.delenv("ABLATION_WALL_TIME_S", raising=False)
    if asked is not None:
        monkeypatch.setenv("ABLATION_WALL_TIME_S", asked)
    assert settings().end_by == (None if left is None else 1000.0 + left)


@pytest.mark.parametrize("asked", ["0", "-5", "4h", "1e4", "٣"])
def test_a_wall_time_that_is_no_number_of_seconds_is_refused(monkeypatch, asked):
    monkeypatch.setenv("ABLATION_WALL_TIME_S", asked)
    with pytest.raises(InputError, match=f"ABLATION_WALL_TIME_S={asked}: not a whole number of seconds above 0"):
        settings()


def test_prefect_keeps_what_somebody_has_set(monkeypatch):
    monkeypatch.setenv("PREFECT_CLIENT_MAX_RETRIES", "3")
    monkeypatch.delenv("PREFECT_SERVER_ANALYTICS_ENABLED", raising=False)
    assert prefect_environment(MORE="1")["PREFECT_CLIENT_MAX_RETRIES"] == "3"
    assert prefect_environment()["PREFECT_SERVER_ANALYTICS_ENABLED"] == "false"
    before = dict(os.environ)
    prepare_prefect()
    assert os.environ["PREFECT_CLIENT_MAX_RETRIES"] == "3"
    for name in os.environ.keys() - before.keys():
        monkeypatch.delenv(name)


def test_asking_for_settings_needs_neither_prefect_nor_torch():
    import subprocess

    code = "import sys, tasks.settings, tasks.launch; print(*{'torch', 'prefect'} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == ""


def test_a_service_s_key_reaches_only_the_trainers_of_its_cells(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TINKER_API_KEY", "tml-secret")
    assert "TINKER_API_KEY" not in child_environment(1)
    assert child_environment(1, backend="tinker")["TINKER_API_KEY"] == "tml-secret"
