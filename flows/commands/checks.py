"""What `ablation doctor` asks of this machine itself. torch is imported by a child, and only where there is a GPU."""

import importlib.metadata
import importlib.util
import json
import os
import platform
import re
import shutil
import subprocess
import sys
from typing import TYPE_CHECKING, Literal

from evaluation.errors import AblationError
from evaluation.records import Record
from flows.parameters import Parameters
from tasks.settings import child_environment, settings
from training.cell import MODELS
from training.footprint import VLLM_SHARE, fixed_bytes

if TYPE_CHECKING:
    from evaluation.judge.audit import Check as AuditCheck

_ASK_TORCH = """import json, torch
there = torch.cuda.device_count() if torch.cuda.is_available() else 0
print(json.dumps([torch.__version__, torch.version.cuda, there]))"""


class Check(Record):
    """One thing that was tried."""

    name: str
    ok: bool
    detail: str
    needed: bool = True
    """Whether the experiment asked about cannot run without it."""
    kind: Literal["machine", "proof"] = "machine"
    """`machine`: what is there; `proof`: whether our own promise holds here."""


def examine_machine(parameters: Parameters) -> list[Check]:
    """Return every check of this machine, in the order a person would mend them."""
    return [
        check_python(),
        check_packages(),
        check_cores(),
        *check_gpu(parameters),
        check_engine(),
        *check_judge(),
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


def check_gpu(parameters: Parameters) -> list[Check]:
    """The devices that cells may use have room for what a cell holds before its first row, and torch sees them."""
    needed = parameters.spec.needs_gpu or MODELS[parameters.grid[0].model].needs_gpu
    program, gpus = shutil.which("nvidia-smi"), settings().gpus
    if program is None or not gpus:
        reason = "no nvidia-smi: no NVIDIA driver" if program is None else "the driver lists none, or they are hidden"
        return [Check(name="gpu", ok=False, needed=needed, detail=reason)]
    asked = subprocess.run(
        [
            program,
            "--query-gpu=name,memory.total,memory.used",
            "--format=csv,noheader,nounits",
            f"--id={','.join(gpus)}",
        ],
        capture_output=True,
        text=True,
        timeout=30,
        check=False,
    )
    rows = [line.rsplit(",", 2) for line in asked.stdout.splitlines() if line.count(",") >= 2]
    if asked.returncode or not rows:
        return [Check(name="gpu", ok=False, needed=needed, detail=f"nvidia-smi: {asked.stdout.strip()[:100]}")]
    free_gb = min(float(total) - float(used) for _, total, used in rows) * 2**20 / 1e9
    need_gb = need_bytes(parameters) / 1e9
    detail = f"{len(rows)} x {rows[0][0].strip()}, {free_gb:.0f} GB free on the fullest; a cell takes {need_gb:.0f} GB"
    return [Check(name="gpu", ok=free_gb >= need_gb, needed=needed, detail=detail), check_torch(len(rows), needed)]


def need_bytes(parameters: Parameters) -> float:
    """Return the least memory of a device that trains the hungriest cell: the trainer's own arithmetic, vLLM beside."""
    cells, model = parameters.grid, MODELS[parameters.grid[0].model]
    share = VLLM_SHARE if importlib.util.find_spec("vllm") else 0.0
    several = settings().gpus_per_cell > 1
    trained = {c: 0 if c.lora_rank else model.num_parameters for c in cells}  # adapters are small
    fixed = (fixed_bytes(model.num_parameters, trained[c], replay=bool(c.terms), several=several) for c in cells)
    return max(fixed) / (1 - share)


def check_torch(num_gpus: int, needed: bool) -> Check:
    """The installed torch is a CUDA build that this driver serves: a child says so, since nothing here imports it."""
    done = subprocess.run(
        [sys.executable, "-c", _ASK_TORCH],
        env=child_environment(),
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    if done.returncode:
        return Check(name="torch", ok=False, needed=needed, detail=done.stderr.strip().rpartition("\n")[2][:200])
    version, cuda, there = json.loads(done.stdout.splitlines()[-1])
    built = f"torch {version}, built for CUDA {cuda}" if cuda else f"torch {version}, built without CUDA"
    ok = there >= num_gpus
    detail = f"{built}: sees {there} of {num_gpus} devices" + (
        "" if ok or not cuda else "; the driver may be too old for it"
    )
    return Check(name="torch", ok=ok, needed=needed, detail=detail)


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
    return [Check(name=f"judge: {c.name}", ok=c.ok, detail=c.detail, kind="proof") for c in found]
