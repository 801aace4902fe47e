"""The environment, read here and nowhere else; and what Prefect must find in it before it is imported."""

import logging
import os
import shutil
import subprocess
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

from evaluation.errors import InputError
from evaluation.records import Record
from training.reporters import PROJECT, REPORTERS, Reporter

PREFECT_DEFAULTS = {
    "PREFECT_SERVER_EPHEMERAL_STARTUP_TIMEOUT_SECONDS": "240",  # the first start of a home migrates its database
    "PREFECT_SERVER_LOGGING_LEVEL": "CRITICAL",  # its temporary server tells of harmless cancellations at exit
    "PREFECT_SERVER_ANALYTICS_ENABLED": "false",
    "PREFECT_CLIENT_MAX_RETRIES": "10",
    "PREFECT_FLOWS_HEARTBEAT_FREQUENCY": "30",  # deployments/automations.yaml takes a run for lost after 180 s
    "PREFECT_LOGGING_EXTRA_LOGGERS": "flows,tasks,training,evaluation",
    "PREFECT_LOGGING_TO_API_WHEN_MISSING_FLOW": "ignore",
    "DO_NOT_TRACK": "1",
}
CHILD_KEEPS = (
    "PATH",
    "HOME",
    "LANG",
    "LC_ALL",
    "TMPDIR",
    "LD_LIBRARY_PATH",
    "PYTHONPATH",
    "VIRTUAL_ENV",
    "CUDA_VISIBLE_DEVICES",
    "CUDA_HOME",
    "HF_HOME",
    "HF_HUB_OFFLINE",
    "HF_ENDPOINT",
    "HF_TOKEN",
    "HF_HUB_CACHE",
    "XDG_CACHE_HOME",
    "HTTP_PROXY",
    "HTTPS_PROXY",
    "NO_PROXY",
    "SSL_CERT_FILE",
    "MBPP_OVERRIDE_PATH",
    "NCCL_DEBUG",
    "NCCL_IB_DISABLE",
    "NCCL_P2P_DISABLE",
    "NCCL_SOCKET_IFNAME",
    "GLOO_SOCKET_IFNAME",
    "COVERAGE_PROCESS_CONFIG",
    "COVERAGE_PROCESS_START",
)
"""What a trainer or evaluator gets of our environment: no storage or server credentials. A program gets nothing."""

STARTED = time.time()
"""When this process began, near enough."""
MAX_GPUS = 64
"""More are in no one host."""
REPORTER_DEFAULTS = {"wandb": {"WANDB_PROJECT": PROJECT, "WANDB_FINISH_TIMEOUT": "60"}}
"""W&B's own default waits for an unreachable service without end."""
NEVER_KEPT = {
    "WANDB_LOG_MODEL",  # checkpoints are published by the store, whole and with their manifest
    "WANDB_SERVICE",  # of a parent's run
    "TENSORBOARD_LOGGING_DIR",  # each cell has its own
}


PACKAGES = ("flows", "tasks", "training", "evaluation")


def tell_from(level: int = logging.INFO) -> None:
    """Let our own lines from `level` on through to whoever sends them on; Python's default is WARNING."""
    for name in PACKAGES:
        logging.getLogger(name).setLevel(level)


class Settings(Record):
    """Where and how this process runs things."""

    launcher: Literal["process", "deployment"] = "process"
    """`process`: children of this process; `deployment`: child flow runs in the work pools `gpu` and `eval`."""
    gpus: tuple[str, ...] = ()
    """Devices that cells may use here."""
    gpus_per_cell: int = 1
    """Devices that train one cell together (`ABLATION_GPUS_PER_CELL`)."""
    cores: int = 1
    locks: Path = Path("/tmp")
    """Lock files of this host's devices, the same for every run of this user."""
    caged: bool = True
    """False only where ABLATION_UNCAGED=1 insists that programs run without the cage."""
    end_by: float | None = None
    """Unix time by which cells have saved and ended: this process's start plus `ABLATION_WALL_TIME_S`."""
    report_to: tuple[Reporter, ...] = ()
    """Who else is told every step's figures (`ABLATION_REPORT_TO`)."""
    home: str = ""
    """Where pools find this project (`ABLATION_HOME`)."""
    service_url: str | None = None
    """Where the service of the backend `tinker` is (`TINKER_BASE_URL`); None is Tinker's own."""
    service_key: bool = False
    """Whether its SDK will find a key: in `TINKER_API_KEY`, by `TINKER_CREDENTIAL_CMD` or from `tinker auth login`."""


def settings() -> Settings:
    """Read the environment.

    Raises:
        InputError: ABLATION_LAUNCHER, ABLATION_UNCAGED, ABLATION_GPUS_PER_CELL, ABLATION_WALL_TIME_S or
            ABLATION_REPORT_TO has a value that it cannot have.
    """
    launcher = os.environ.get("ABLATION_LAUNCHER", "process")
    if launcher not in {"process", "deployment"}:
        raise InputError("ABLATION_LAUNCHER", launcher, "unknown launcher", "use process or deployment")
    gpus = _gpus()
    return Settings.model_validate(
        {
            "launcher": launcher,
            "gpus": gpus,
            "gpus_per_cell": _gpus_per_cell(len(gpus)),
            "cores": len(os.sched_getaffinity(0)),
            "locks": Path(tempfile.gettempdir()) / f"ablation-gpus-{os.getuid()}",
            "caged": _caged(),
            "end_by": _end_by(),
            "report_to": _report_to(),
            "home": os.environ.get("ABLATION_HOME", ""),
            "service_url": os.environ.get("TINKER_BASE_URL") or None,
            "service_key": _service_key(),
        }
    )


def _caged() -> bool:
    insisted = os.environ.get("ABLATION_UNCAGED", "0")
    if insisted not in {"", "0", "1"}:
        raise InputError("ABLATION_UNCAGED", insisted, "neither 0 nor 1", "set 1 to run programs without the cage")
    return insisted != "1"


def _gpus_per_cell(here: int) -> int:
    """Read how many GPUs train a cell together; a host without any only plans, or hands the cells to others."""
    asked = os.environ.get("ABLATION_GPUS_PER_CELL") or "1"
    most = here or MAX_GPUS
    if not (asked.isascii() and asked.isdecimal() and 1 <= int(asked) <= most):
        reason = f"this host has {here}" if here else f"not a number from 1 to {most}"
        raise InputError("ABLATION_GPUS_PER_CELL", asked, reason, f"use 1 to {most}")
    return int(asked)


def _end_by() -> float | None:
    asked = os.environ.get("ABLATION_WALL_TIME_S", "")
    if not asked:
        return None
    if not (asked.isascii() and asked.isdecimal() and int(asked) > 0):
        raise InputError("ABLATION_WALL_TIME_S", asked, "not a whole number of seconds above 0", "use e.g. 14400")
    return STARTED + int(asked)


def _service_key() -> bool:
    named = any(os.environ.get(f"TINKER_{word}") for word in ("API_KEY", "CREDENTIAL_CMD"))
    return named or Path("~/.tinker/credentials.json").expanduser().is_file()


def _report_to() -> tuple[str, ...]:
    named = os.environ.get("ABLATION_REPORT_TO", "")
    asked = tuple(dict.fromkeys(name.strip() for name in named.split(",") if name.strip()))
    for name in asked:
        if name not in REPORTERS:
            fix = f"use a comma list of {', '.join(REPORTERS)}"
            raise InputError("ABLATION_REPORT_TO", named, f"'{name}' is no reporter", fix)
    return asked


def _gpus() -> tuple[str, ...]:
    """List the devices of this host without CUDA: what `CUDA_VISIBLE_DEVICES` names, else what nvidia-smi lists."""
    named = os.environ.get("CUDA_VISIBLE_DEVICES")
    if shutil.which("nvidia-smi") is None or named == "":
        return ()
    query = ["nvidia-smi", "--query-gpu=index", "--format=csv,noheader"]
    try:
        listed = subprocess.run(query, capture_output=True, text=True, timeout=20, check=True).stdout.split()
    except (OSError, subprocess.SubprocessError):
        return ()
    return tuple(g.strip() for g in named.split(",")) if named is not None and listed else tuple(listed)


def prepare_prefect() -> None:
    """Set what Prefect reads when it is imported, unless somebody has."""
    for name, value in PREFECT_DEFAULTS.items():
        os.environ.setdefault(name, value)


def point_prefect_at(url: str) -> None:
    """Name the server that Prefect talks to from now on; its settings have to be read again."""
    os.environ["PREFECT_API_URL"] = url


def prefect_environment(**extra: str) -> dict[str, str]:
    """Return our whole environment and more, for Prefect's own commands (its profile is in it)."""
    return {**PREFECT_DEFAULTS, **os.environ, **extra}


def child_environment(num_threads: int = 1, report_to: Sequence[str] = (), backend: str = "local") -> dict[str, str]:
    """Return the whole environment of a trainer or evaluator; a reporter's or service's variables only for its own."""
    kept = {k: v for k in CHILD_KEEPS if (v := os.environ.get(k)) is not None}
    if backend != "local":
        kept |= {k: v for k, v in os.environ.items() if k.startswith(f"{backend.upper()}_")}
    for reporter in report_to:
        kept |= REPORTER_DEFAULTS.get(reporter, {})
        prefix = f"{reporter.upper()}_"
        kept |= {k: v for k, v in os.environ.items() if k.startswith(prefix) and k not in NEVER_KEPT}
    threads = str(num_threads)
    return kept | {
        "OMP_NUM_THREADS": threads,
        "MKL_NUM_THREADS": threads,
        "OPENBLAS_NUM_THREADS": threads,
        "TOKENIZERS_PARALLELISM": "false",
        "TRL_EXPERIMENTAL_SILENCE": "1",
        "PYTHONUNBUFFERED": "1",
        "PYTHONWARNINGS": "ignore",
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_CPU_KVCACHE_SPACE": "1",
    }
