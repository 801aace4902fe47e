"""The checks of `ablation doctor`. None imports torch: the GPU is asked through its driver's own program."""

import importlib.metadata
import importlib.util
import os
import platform
import re
import shutil
import subprocess
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from evaluation.errors import AblationError
from evaluation.records import Record
from flows.parameters import Parameters
from flows.planning import make_plan
from tasks.settings import settings
from training.cell import MODELS
from training.store import open_store

if TYPE_CHECKING:
    from evaluation.judge.audit import Check as AuditCheck

HUB_TIMEOUT_S = 5


class Check(Record):
    """One thing that was tried."""

    name: str
    ok: bool
    detail: str
    needed: bool = True
    """Whether the experiment asked about cannot run without it."""


def examine(parameters: Parameters) -> list[Check]:
    """Return every check, in the order a person would mend them."""
    spec, model = parameters.spec, MODELS[parameters.grid[0].model]
    on_gpu = spec.needs_gpu or model.needs_gpu
    return [
        check_python(),
        check_packages(),
        check_cores(),
        check_gpu(model.num_parameters, needed=on_gpu),
        check_engine(),
        *check_judge(),
        check_store(parameters),
        check_disk(parameters),
        check_hub(needed="/" in model.source and parameters.mbpp is None),
    ]


def check_python() -> Check:
    """3.11 to 3.13; the recorded verdicts were made by 3.11, and one hostile case holds for it alone."""
    version = platform.python_version()
    return Check(name="python", ok=version.startswith(("3.11.", "3.12.", "3.13.")), detail=version)


def check_packages() -> Check:
    """Every dependency is installed, and the pinned ones in the version whose internals are relied on."""
    wrong = []
    for line in importlib.metadata.requires("rl-ablation") or []:
        if "extra ==" in line:
            continue
        m = re.match(r"([\w.-]+)\s*(?:==([\w.]+))?", line)
        assert m is not None
        try:
            found = importlib.metadata.version(m[1])
        except importlib.metadata.PackageNotFoundError:
            wrong.append(f"{m[1]} is missing")
            continue
        if m[2] and found.partition("+")[0] != m[2]:
            wrong.append(f"{m[1]} is {found}, not {m[2]}")
    return Check(name="packages", ok=not wrong, detail="; ".join(wrong) or "all there, pins kept")


def check_cores() -> Check:
    """Cores of this process and memory; a cell of the embedded default peaks at 0.9 GB."""
    cores = len(os.sched_getaffinity(0))
    memory_gb = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 1e9
    need_gb = 1.5 + 0.9 * cores
    return Check(
        name="cores and memory",
        ok=memory_gb >= need_gb,
        detail=f"{cores} cores, {memory_gb:.1f} GB; a cell on every core takes {need_gb:.1f} GB",
    )


def check_gpu(num_parameters: int, *, needed: bool) -> Check:
    """A CUDA device with room for fp32 weights, gradients and both moments, and as much again for activations."""
    need_gb = 2 * 16 * num_parameters / 1e9
    program = shutil.which("nvidia-smi")
    if program is None:
        return Check(name="gpu", ok=False, needed=needed, detail="no nvidia-smi: no NVIDIA driver")
    asked = subprocess.run(
        [program, "--query-gpu=name,memory.total", "--format=csv,noheader,nounits"],
        capture_output=True,
        text=True,
        timeout=30,
        check=False,
    )
    rows = [line.rsplit(",", 1) for line in asked.stdout.splitlines() if "," in line]
    if asked.returncode or not rows:
        return Check(name="gpu", ok=False, needed=needed, detail=f"nvidia-smi: {asked.stdout.strip()[:100]}")
    smallest_gb = min(float(mib) for _, mib in rows) * 2**20 / 1e9
    detail = f"{len(rows)} x {rows[0][0].strip()}, {smallest_gb:.0f} GB; the model asks for about {need_gb:.0f} GB"
    return Check(name="gpu", ok=smallest_gb >= need_gb, needed=needed, detail=detail)


def check_engine() -> Check:
    """vLLM, several times faster on a GPU; without it transformers samples."""
    found = importlib.util.find_spec("vllm") is not None
    detail = "vllm is installed" if found else "vllm is not installed: the transformers engine samples"
    return Check(name="engine", ok=found, needed=False, detail=detail)


def check_judge() -> list[Check]:
    """The judge's cage, and planted cheats and honest programs through it."""
    from evaluation.judge import Judge
    from evaluation.judge.audit import audit

    try:
        with Judge([], caged=settings().caged) as judge:
            words = {True: "yes", False: "no"}
            parts = judge.cage.items()
            level = ", ".join(f"{n} {words[p] if isinstance(p, bool) else p}" for n, p in parts)
        found = audit(settings().caged)
    except AblationError as e:
        return [Check(name="judge cage", ok=False, detail=str(e))]
    if not settings().caged:
        detail = "ABLATION_UNCAGED=1: programs run under limits only, and may do what this user may"
        return [Check(name="judge cage", ok=False, detail=detail, needed=False), *_told(found)]
    return [Check(name="judge cage", ok=True, detail=f"{judge.version}: {level}"), *_told(found)]


def _told(found: "list[AuditCheck]") -> list[Check]:
    return [Check(name=f"judge: {c.name}", ok=c.ok, detail=c.detail) for c in found]


def check_store(parameters: Parameters) -> Check:
    """A small file is written to the store, read back and removed."""
    store = open_store(parameters.store or str(_nearest(_runs(parameters))))
    return _tried("store", store.check_writable, f"{store.url} can be written")


def check_disk(parameters: Parameters) -> Check:
    """Room for run directories and a store beside them."""
    totals, here = make_plan(parameters).totals, _nearest(_runs(parameters))
    need_gb = 2 * (totals.checkpoint_gb + totals.sample_gb) + totals.resume_gb
    free_gb = shutil.disk_usage(here).free / 1e9
    return Check(
        name="disk",
        ok=free_gb >= need_gb,
        detail=f"{free_gb:.1f} GB free at {here}; {parameters.experiment} writes about {need_gb:.2g} GB",
    )


def check_hub(*, needed: bool) -> Check:
    """The Hugging Face Hub answers; the embedded default does without."""
    from huggingface_hub import constants

    try:
        with urllib.request.urlopen(constants.ENDPOINT, timeout=HUB_TIMEOUT_S) as answer:
            detail, ok = f"{constants.ENDPOINT} answers {answer.status}", answer.status < 400
    except (OSError, ValueError) as e:
        detail, ok = f"{constants.ENDPOINT}: {getattr(e, 'reason', e)}", False
    return Check(name="hub", ok=ok, needed=needed, detail=detail)


def _tried(name: str, action: Callable[[], None], detail: str) -> Check:
    try:
        action()
    except AblationError as e:
        return Check(name=name, ok=False, detail=str(e))
    return Check(name=name, ok=True, detail=detail)


def _runs(parameters: Parameters) -> Path:
    return Path(parameters.runs or f"runs/{parameters.experiment}").absolute()


def _nearest(path: Path) -> Path:
    return next(p for p in (path, *path.parents) if p.is_dir())
