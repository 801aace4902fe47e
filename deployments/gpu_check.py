"""Ten minutes on a GPU that prove what no CPU can: `make gpu-check` (or `--device cpu` to try the script itself).

Each line is one check: the small model trained on the device with the same data and seeds as on the CPU, bf16 compute,
a kill and a resume there, both sampling engines, and, where the hub is reachable, three steps of the real cell.
"""

import argparse
import json
import logging
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import pandas as pd

from evaluation.files import write_json
from evaluation.manifests import Provenance, Revisions
from evaluation.problems import prepare
from evaluation.prompts import PromptSpec
from evaluation.request import Request, Unit, write_request
from evaluation.scores import Score
from flows.experiments import EXPERIMENTS
from tasks.launch import error_line, run_child
from tasks.models import ModelFiles, locate_model, prompt_of
from training.cell import MODELS, Cell
from training.folder import CellFile, RunFolder, Runtime

logger = logging.getLogger("gpu-check")


class Check:
    """A working folder, and what the checks share."""

    def __init__(self, work: Path, device: str, mbpp: str | None, mbpp_plus: str | None) -> None:
        self.work, self.device, self.mbpp, self.mbpp_plus = work, device, mbpp, mbpp_plus
        self.toy = prepare("toy", 0, ["toy_plus"], work / "toy")
        self.files = locate_model(MODELS["toy"], work)
        self.prompt = prompt_of(MODELS["toy"], self.files, "toy")

    def cell(self, **changes: object) -> Cell:
        """Return a small cell with replay."""
        cell = EXPERIMENTS["micro"].cells()[1]
        grpo = {k: changes.pop(k) for k in list(changes) if k in type(cell.grpo).model_fields}
        return cell.replace(grpo=cell.grpo.replace(**grpo), **changes)

    def folder(self, name: str, cell: Cell, runtime: Runtime, prompt: PromptSpec, files: ModelFiles) -> RunFolder:
        """Write a run directory."""
        folder = RunFolder(self.work / name)
        revisions = Revisions(model=files.identity, datasets={})
        write_json(folder.cell_json, CellFile(cell=cell, prompt=prompt, split_sha256="", revisions=revisions))
        write_json(folder.runtime_json, runtime)
        return folder

    def train(self, name: str, device: str, cell: Cell) -> RunFolder:
        """Train a small cell on a device to its end."""
        runtime = Runtime(model_path=self.files.path, problems_path=self.toy.train, device=device)
        folder = self.folder(name, cell, runtime, self.prompt, self.files)
        run_to_zero([sys.executable, "-m", "training.run", str(folder.root)], folder.root / "train.log")
        return folder


def run_to_zero(argv: list[str], log: Path) -> None:
    """Run a child; its own error line is the failure."""
    code = run_child(argv, log=log)
    if code:
        raise RuntimeError(f"exit {code}: {error_line(log) or log}")


def check_device(check: Check) -> str:
    """Name the devices and the torch build."""
    code = "import torch; print(torch.__version__, torch.cuda.device_count(), torch.cuda.is_bf16_supported())"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split()
    if check.device == "cuda" and found[1] == "0":
        raise RuntimeError(f"torch {found[0]} sees no CUDA device")
    return f"torch {found[0]}, {found[1]} devices, bf16 {found[2]}"


def check_same_data(check: Check) -> str:
    """Train on both devices: the same problems in the same order, and first-step rollouts that agree."""
    here, there = (check.train(f"fp32_{d}", d, check.cell()) for d in ("cpu", check.device))
    a, b = (pd.read_parquet(f.rollout(1)) for f in (here, there))
    if a["problem_id"].tolist() != b["problem_id"].tolist():
        raise RuntimeError("other problems in step 1")
    same = sum(x == y for x, y in zip(a["completion"], b["completion"], strict=True))
    if same < 0.9 * len(a):
        raise RuntimeError(f"only {same} of {len(a)} first-step completions agree")
    return f"{same} of {len(a)} first-step completions agree"


def check_bf16(check: Check) -> str:
    """Train in bf16 compute on fp32 weights."""
    if check.device == "cpu":
        return "not on a CPU"
    folder = check.train("bf16", check.device, check.cell(compute_dtype="bfloat16"))
    end = json.loads(folder.result_json.read_text())["end"]
    if end != "finished":
        raise RuntimeError(f"the cell {end}")
    return "finished, finite"


def check_lora(check: Check) -> str:
    """Train adapters: the published checkpoint is whole, and differs from the base."""
    folder = check.train("lora", check.device, check.cell().replace(lora_rank=4, lr=5e-3))
    from safetensors.torch import load_file

    found, base = (load_file(f / "model.safetensors") for f in (folder.checkpoint(4), Path(check.files.path)))
    if found.keys() != base.keys():
        raise RuntimeError("other weights than the base has")
    moved = sum(not found[k].float().equal(base[k].float()) for k in base)
    if not moved:
        raise RuntimeError("no weight has moved")
    return f"{moved} of {len(base)} weights have moved, {folder.resumes()[-1]} steps"


def check_resume(check: Check) -> str:
    """Kill a cell after its first checkpoint; resumed, it sees the data that an uninterrupted one sees."""
    whole = check.work / f"fp32_{check.device}"
    runtime = Runtime(model_path=check.files.path, problems_path=check.toy.train, device=check.device)
    folder = check.folder("killed", check.cell(), runtime, check.prompt, check.files)
    argv = [sys.executable, "-m", "training.run", str(folder.root)]
    child = subprocess.Popen(argv, stderr=subprocess.DEVNULL)
    while not folder.checkpoint(2).exists() and child.poll() is None:
        time.sleep(0.05)
    child.send_signal(signal.SIGKILL)
    child.wait()
    run_to_zero(argv, folder.root / "train.log")
    a, b = (pd.read_parquet(RunFolder(f).rollout(4)) for f in (whole, folder.root))
    if a["problem_id"].tolist() != b["problem_id"].tolist():
        raise RuntimeError("other problems after the resume")
    return f"{sum(a['completion'] == b['completion'])} of {len(a)} last-step completions agree"


def check_engines(check: Check) -> str:
    """Score the small model with transformers, and with vLLM where it is installed."""
    protocol = EXPERIMENTS["smoke"].protocols[0]
    found = {}
    for engine in ("transformers", "vllm"):
        if engine == "vllm" and not _installed("vllm"):
            found[engine] = "not installed"
            continue
        out = check.work / f"scores_{engine}"
        unit = Unit(
            label=engine,
            cell=None,
            global_step=0,
            model_path=check.files.path,
            protocol=protocol,
            provenance=Provenance(),
            out=str(out),
        )
        request = Request(
            prompt=check.prompt,
            problems=check.toy.benchmarks,
            units=(unit,),
            engine=engine,
            device=check.device,
            cache=str(check.work / "references"),
        )
        write_request(check.work / engine, request)
        run_to_zero([sys.executable, "-m", "evaluation.run", str(check.work / engine)], check.work / f"{engine}.log")
        score = Score.model_validate_json((out / "score.json").read_text())
        e = score.estimate("plus", 1)
        found[engine] = f"pass@1 {e.value:.3f} [{e.low:.3f}, {e.high:.3f}]"
    return ", ".join(f"{k} {v}" for k, v in found.items())


def check_real_cell(check: Check) -> str:
    """Three steps of Qwen3-1.7B-Base on MBPP's real problems, small batches, and a published checkpoint."""
    if check.device == "cpu":
        return "not on a CPU"
    model = MODELS["qwen3_1p7b_base"]
    prepared = prepare("mbpp", 0, ["mbpp_plus"], check.work / "mbpp", check.mbpp, check.mbpp_plus)
    files = locate_model(model, check.work)
    prompt = prompt_of(model, files, "mbpp")
    cell = EXPERIMENTS["full"].cells()[0]
    cell = cell.replace(
        steps=3, stride=3, grpo=cell.grpo.replace(prompts_per_step=4, rollouts_per_prompt=8, max_new_tokens=512)
    )
    runtime = Runtime(
        model_path=files.path,
        model_revision=files.revision,
        problems_path=prepared.train,
        device="cuda",
        sampler="vllm" if _installed("vllm") else "transformers",
    )
    folder = check.folder("real", cell, runtime, prompt, files)
    run_to_zero([sys.executable, "-m", "training.run", str(folder.root)], folder.root / "train.log")
    rows = [json.loads(x) for x in folder.steps_jsonl.read_text().splitlines()]
    tokens = sum(r["mean_tokens"] * 32 for r in rows)
    speed = f"{tokens / sum(r['seconds'] for r in rows):.0f} tokens/s"
    return f"3 steps, rewards {[r['reward'] for r in rows]}, {speed}, {rows[-1]['gpu']}"


def _installed(name: str) -> bool:
    import importlib.util

    return importlib.util.find_spec(name) is not None


CHECKS: tuple[Callable[[Check], str], ...] = (
    check_device,
    check_same_data,
    check_bf16,
    check_lora,
    check_resume,
    check_engines,
    check_real_cell,
)


def main() -> int:
    """Run every check, whatever the others say; return 1 if one failed."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--device", default="cuda", help="cuda (default), or cpu to try the script")
    parser.add_argument("--mbpp", help="local mbpp.jsonl")
    parser.add_argument("--mbpp-plus", help="local MbppPlus-v0.2.0.jsonl")
    args = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    work = Path(tempfile.mkdtemp(prefix="gpu-check-"))
    check, failed = Check(work, args.device, args.mbpp, args.mbpp_plus), 0
    for one in CHECKS:
        started = time.monotonic()
        try:
            word, detail = "ok  ", one(check)
        except Exception as e:  # noqa: BLE001  one broken part must not hide the others
            word, detail, failed = "FAIL", f"{type(e).__name__}: {e}", failed + 1
        logger.info("%s %s: %s (%.0f s)", word, one.__name__.removeprefix("check_"), detail, time.monotonic() - started)
    if failed:
        logger.info("logs are in %s", work)
    else:
        shutil.rmtree(work)
    logger.info("%d passed, %d failed", len(CHECKS) - failed, failed)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
