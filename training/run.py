"""Train one cell: `python -m training.run FOLDER`, with cell.json (identity) and runtime.json (where and how) in it.

Resumes from the newest whole resume state; a cell that has ended is left alone. Exit codes: 0 ended (finished or
diverged), 1 the judge failed on a rollout, 2 the input is wrong, 3 the machine lacks something, 75 stopped by a signal.
"""

import argparse
import logging
import shutil
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from evaluation.errors import InputError, MachineError, Stopped
from evaluation.files import write_json
from evaluation.manifests import is_complete, read_manifest, write_manifest
from evaluation.problems import read_problems
from evaluation.program import explain, run_program
from evaluation.prompts import PromptSpec, check
from training.cell import MODELS, Cell
from training.folder import CellFile, Result, RunFolder, Runtime

logger = logging.getLogger("training")


def main(argv: list[str] | None = None) -> int:
    """Read the folder, train, and return the exit code."""
    parser = argparse.ArgumentParser(prog="python -m training.run", description="Train the cell in FOLDER.")
    parser.add_argument("folder", type=Path)
    parser.add_argument("--debug", action="store_true", help="show the traceback of a failure")
    args = parser.parse_args(argv)
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s", stream=sys.stderr)
    return run_program(lambda: train(RunFolder(args.folder)), debug=args.debug)


def train(folder: RunFolder) -> int:
    """Bring the cell to its end, from wherever it is."""
    cell_file, runtime = read_folder(folder)
    refuse_other(folder, cell_file)
    if not folder.result_json.exists():
        _train(folder, cell_file, runtime)
    close(folder, cell_file)
    return 0


def read_folder(folder: RunFolder) -> tuple[CellFile, Runtime]:
    """Read and check both files, before anything heavy is imported.

    Raises:
        InputError: a file is missing or says something impossible.
    """
    for path in (folder.cell_json, folder.runtime_json):
        if not path.is_file():
            raise InputError("folder", folder.root, f"has no {path.name}", "name the run directory of a cell")
    try:
        cell_file = CellFile.model_validate_json(folder.cell_json.read_text(encoding="utf-8"))
        runtime = Runtime.model_validate_json(folder.runtime_json.read_text(encoding="utf-8"))
    except ValidationError as error:
        raise explain(error) from error
    if not Path(runtime.problems_path).is_file():
        raise InputError("problems_path", runtime.problems_path, "no such file", "run the split first")
    if Path(runtime.model_path).is_absolute() and not Path(runtime.model_path).is_dir():
        raise InputError("model_path", runtime.model_path, "no such folder", "name a model folder or a hub repository")
    cuda = runtime.device.startswith("cuda")
    if cell_file.cell.grpo.compute_dtype == "bfloat16" and not cuda:
        raise MachineError("device", runtime.device, "bfloat16 cells are trained on a GPU", "set device to cuda")
    return cell_file, runtime


def refuse_other(folder: RunFolder, cell_file: CellFile) -> None:
    """Refuse a folder that another configuration, split, prompt or revision has trained in.

    Raises:
        InputError: with the fields that differ.
    """
    parts = [*map(folder.resume, folder.resumes()), *map(folder.checkpoint, folder.checkpoints())]
    parts += [folder.logs, folder.rollouts]
    for part in parts:
        found = read_manifest(part)
        if found is not None and found.fingerprint != cell_file.identity.fingerprint:
            difference = "; ".join(cell_file.identity.differences(found)[:4])
            raise InputError("cell", part, f"holds another run ({difference})", "use another --runs folder")


@dataclass
class _Owner:
    """What an export needs when there is no trainer."""

    folder: RunFolder
    cell: Cell
    spec: PromptSpec


def _train(folder: RunFolder, cell_file: CellFile, runtime: Runtime) -> None:
    import torch
    from transformers import logging as transformers_logging

    from evaluation.judge import Judge

    transformers_logging.disable_progress_bar()
    transformers_logging.set_verbosity_error()
    torch.set_num_threads(runtime.num_threads)
    if runtime.device.startswith("cuda") and not torch.cuda.is_available():
        raise MachineError("device", runtime.device, "no CUDA device", "train on a GPU host, or set device to cpu")
    cell, spec = cell_file.cell, cell_file.prompt
    resumes = [s for s in folder.resumes() if is_complete(folder.resume(s))]
    resume = folder.resume(max(resumes)) if resumes else None
    model, tokenizer = load_model(str(resume or runtime.model_path), None if resume else runtime.model_revision)
    check(spec, tokenizer, model.config, model.generation_config if resume is None else None)
    if resume is not None:
        logger.info("going on from step %d", max(resumes))
        if max(resumes) in cell.checkpoints:
            from training.callbacks import publish_ready

            publish_ready(model, tokenizer, _Owner(folder, cell, spec), max(resumes))
        if max(resumes) >= cell.steps:
            write_json(folder.result_json, Result(end="finished", last_step=cell.steps, onset_step=None))
            return
    problems = read_problems(Path(runtime.problems_path))
    if len(problems) < cell.grpo.prompts_per_step:
        reason = f"has {len(problems)} problems, fewer than the {cell.grpo.prompts_per_step} of a step"
        raise InputError("problems_path", runtime.problems_path, reason, "use the whole split")
    with Judge(problems, suites="reward", workers=runtime.judge_workers) as judge:
        _steps(folder, cell_file, runtime, problems, judge, model, tokenizer, resume)


def load_model(path: str, revision: str | None) -> tuple[Any, Any]:
    """Load the weights in fp32 (whatever they are stored in) and the tokenizer, padding on the left."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    extra = {} if revision is None else {"revision": revision}
    model, info = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, output_loading_info=True, **extra)
    if info["missing_keys"] or info["mismatched_keys"]:
        lacking = sorted(info["missing_keys"])[:3]
        raise InputError("model", path, f"weights are missing ({', '.join(lacking)})", "use a complete model folder")
    tokenizer = AutoTokenizer.from_pretrained(path, padding_side="left", **extra)
    if tokenizer.pad_token_id is None:
        tokenizer.pad_token = tokenizer.eos_token
    return model, tokenizer


def _steps(
    folder: RunFolder,
    cell_file: CellFile,
    runtime: Runtime,
    problems: list[Any],
    judge: Any,
    model: Any,
    tokenizer: Any,
    resume: Path | None,
) -> None:
    """Run the trainer; a divergence is a result, a signal is an exit."""
    from evaluation.generation import NonFiniteLogits
    from training.callbacks import Diverged, Guard, StepLog
    from training.trainer import CellTrainer

    cell = cell_file.cell
    log, guard = StepLog(folder, cell.steps), Guard(cell.checkpoints, runtime.resume_every)
    trainer = CellTrainer(
        cell=cell,
        spec=cell_file.prompt,
        runtime=runtime,
        folder=folder,
        problems=problems,
        judge=judge,
        model=model,
        tokenizer=tokenizer,
        callbacks=[guard, log],
    )
    log.trainer = guard.trainer = trainer
    if resume is not None:
        trainer.restore(resume)
    guard.install()
    try:
        trainer.train(resume_from_checkpoint=str(resume) if resume else None)
    except Diverged as diverged:
        log.write(diverged.step, float("nan"))
        _end_diverged(folder, diverged.step, diverged.what)
        return
    except NonFiniteLogits:
        _end_diverged(folder, trainer.step_number, "logit")
        return
    if guard.stopped and trainer.state.global_step < cell.steps:
        step = trainer.state.global_step
        raise Stopped(
            f"signal=TERM: stopped after step {step} of {cell.steps}, state saved; run the same command again"
        )
    if trainer.state.global_step != cell.steps:
        raise RuntimeError(f"trained {trainer.state.global_step} of {cell.steps} steps")
    write_json(folder.result_json, Result(end="finished", last_step=cell.steps, onset_step=None))


def _end_diverged(folder: RunFolder, step: int, what: str) -> None:
    logger.warning("diverged: a %s is not finite at step %d", what, step)
    write_json(folder.result_json, Result(end="diverged", last_step=step, onset_step=step))


def close(folder: RunFolder, cell_file: CellFile) -> None:
    """Seal logs and rollouts with their manifests, and drop what only a running cell needs."""
    identity = cell_file.identity
    for path, kind in ((folder.logs, "logs"), (folder.rollouts, "rollouts")):
        if path.is_dir() and not is_complete(path):
            write_manifest(path, kind, identity.provenance(cell_file.cell.name))
    for partial in (folder.root / "resume").glob("*.partial"):
        shutil.rmtree(partial)
    logger.info("%s has ended (%s)", cell_file.cell.name, MODELS[cell_file.cell.model].name)


if __name__ == "__main__":
    sys.exit(main())
