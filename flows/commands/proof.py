"""`ablation doctor --resume`: tiny cells trained twice here, once broken off half-way; the bytes must be equal."""

import json
import shutil
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from evaluation.errors import IncompleteError
from evaluation.files import read_jsonl, sha256_file, write_json
from evaluation.manifests import Revisions
from evaluation.problems import prepare
from flows.commands.checks import Check
from flows.experiments import EXPERIMENTS
from tasks.launch import STOPPING, run_to_end
from tasks.models import locate_model, prompt_of
from training.cell import MODELS
from training.folder import CellFile, RunFolder, Runtime

LORA_RANK = 8


def prove_resume() -> list[Check]:
    """Prove it for a cell that trains every weight and for one that trains adapters; both at once, a core each."""
    STOPPING.clear()
    with ThreadPoolExecutor(2) as pool:
        try:
            return list(pool.map(_prove, ("exact resume", "exact resume, LoRA"), (None, LORA_RANK)))
        except BaseException:
            STOPPING.set()  # a signal, or one has failed: the children end now, not when they are done
            raise


def _prove(name: str, lora_rank: int | None) -> Check:
    """Train the replay cell of `micro` unbroken and from its own half-way state; equal weights and logs prove it."""
    try:
        same, detail = _compared(lora_rank)
    except IncompleteError as e:  # the trainer's own line; what this machine lacks, and a signal, end the command
        same, detail = False, str(e)
    return Check(name=name, ok=same, detail=detail, kind="proof")


def _compared(lora_rank: int | None) -> tuple[bool, str]:
    """Return whether both ways end in the same bytes, and what was compared."""
    with tempfile.TemporaryDirectory(prefix="ablation-resume-") as scratch:
        unbroken, resumed = (RunFolder(Path(scratch) / name) for name in ("unbroken", "resumed"))
        half, end = _prepare(unbroken, Path(scratch), lora_rank)
        _train(unbroken)
        resumed.resume(half).parent.mkdir(parents=True)
        shutil.copytree(unbroken.resume(half), resumed.resume(half))
        for path in (unbroken.cell_json, unbroken.runtime_json):
            shutil.copy(path, resumed.root)
        _train(resumed)
        weights = [sha256_file(f.checkpoint(end) / "model.safetensors") for f in (unbroken, resumed)]
        logs = [_steps(f, half) for f in (unbroken, resumed)]
    same = weights[0] == weights[1] and logs[0] == logs[1]
    detail = f"{end} steps unbroken and from step {half}: weights {weights[0][:12]} and {weights[1][:12]}, logs " + (
        "equal" if logs[0] == logs[1] else f"{json.dumps(logs[0])[:120]} and {json.dumps(logs[1])[:120]}"
    )
    return same, detail


def _prepare(folder: RunFolder, scratch: Path, lora_rank: int | None) -> tuple[int, int]:
    """Write cell.json and runtime.json; return the first checkpoint's step and the endpoint."""
    spec = EXPERIMENTS["micro"]
    cell = next(c for c in spec.cells() if c.terms).replace(lora_rank=lora_rank)
    model = MODELS[cell.model]
    files = locate_model(model, scratch)
    prepared = prepare(spec.benchmark, spec.data_seed, [p.benchmark for p in spec.protocols], scratch / "problems")
    revisions = Revisions(model=files.identity, datasets=prepared.revisions)
    write_json(
        folder.cell_json,
        CellFile(
            cell=cell,
            prompt=prompt_of(model, files, spec.benchmark),
            split_sha256=prepared.split_sha256,
            revisions=revisions,
        ),
    )
    write_json(folder.runtime_json, Runtime(model_path=files.path, problems_path=prepared.train))
    return cell.checkpoints[0], cell.checkpoints[-1]


def _train(folder: RunFolder) -> None:
    run_to_end([sys.executable, "-m", "training.run", str(folder.root)], log=folder.logs / "output.log")


def _steps(folder: RunFolder, after: int) -> list[dict[str, object]]:
    """Return what the log says of the steps after the break, but for their wall time."""
    rows = read_jsonl(folder.steps_jsonl)
    return [{k: v for k, v in r.items() if k != "seconds"} for r in rows if r["global_step"] > after]
