"""Train one cell: `python -m training.run FOLDER`, with cell.json (identity) and runtime.json (where and how) in it.

Resumes from the newest whole resume state; a cell that has ended is left alone. Exit codes: 0 ended (finished or
diverged), 1 the judge failed on a rollout, 2 the input is wrong, 3 the machine lacks something, 75 stopped by a signal
or at the end of its time, with every whole step saved.
"""

if __name__ == "__main__":  # the imports below take a second
    from evaluation.early import leave_on_signals

    leave_on_signals()

import argparse
import logging
import math
import sys
from pathlib import Path
from typing import Any, Literal

from evaluation.errors import InputError, MachineError, Stopped
from evaluation.files import read_jsonl, write_json
from evaluation.problems import read_problems
from evaluation.program import leave, read_record, run_program
from evaluation.prompts import check
from evaluation.records import Problem
from training.cell import Cell
from training.folder import CellFile, Result, RunFolder, Runtime
from training.processes import Processes, join
from training.reporters import refuse_absent
from training.signs import find_signs
from training.started import begin, close, newest_resume, refuse_damaged, refuse_other, refuse_other_problems

logger = logging.getLogger("training")

TOKENIZERS = ("tokenizer.json", "tokenizer.model", "vocab.json")
"""Files that transformers reads a vocabulary from; without any it makes an empty tokenizer and says nothing."""


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
    ended = folder.result_json.exists()
    processes = Processes() if ended else join(runtime)
    with processes.reporting():
        if ended:
            refuse_damaged(folder)
        else:
            _set_up(runtime)
            train_it = _train_on_service if cell_file.cell.backend == "tinker" else _train
            train_it(folder, cell_file, runtime, processes)
        if processes.main:
            close(folder, cell_file)
    processes.leave()
    return 0


def read_folder(folder: RunFolder) -> tuple[CellFile, Runtime]:
    """Read and check both files, before anything heavy is imported.

    Raises:
        InputError: a file is missing or says something impossible.
    """
    for path in (folder.cell_json, folder.runtime_json):
        if not path.is_file():
            raise InputError("folder", folder.root, f"has no {path.name}", "name the run directory of a cell")
    cell_file = read_record(CellFile, folder.cell_json)
    runtime = read_record(Runtime, folder.runtime_json)
    if not Path(runtime.problems_path).is_file():
        raise InputError("problems_path", runtime.problems_path, "no such file", "run the split first")
    if Path(runtime.model_path).is_absolute() and not Path(runtime.model_path).is_dir():
        raise InputError("model_path", runtime.model_path, "no such folder", "name a model folder or a hub repository")
    refuse_absent(runtime.report_to)
    here = cell_file.cell.backend == "local"
    if here and cell_file.cell.grpo.compute_dtype == "bfloat16" and not runtime.device.startswith("cuda"):
        raise MachineError("device", runtime.device, "bfloat16 cells are trained on a GPU", "set device to cuda")
    runtime.share(cell_file.cell.grpo)
    if cell_file.cell.mismatch and runtime.sampler == "vllm":
        reason = f"the arm {cell_file.cell.arm} has a sampler of its own, which vLLM's weights would not be"
        raise InputError("sampler", runtime.sampler, reason, "use transformers")
    return cell_file, runtime


def _train(folder: RunFolder, cell_file: CellFile, runtime: Runtime, processes: Processes) -> None:
    from evaluation.exact import open_judge

    cell = cell_file.cell
    step = newest_resume(folder)
    resume = None if step is None else folder.resume(step)
    model, tokenizer = load_policy(cell_file, runtime, resume)
    if step is not None:
        logger.info("going on from step %d", step)
        if step in cell.checkpoints:  # killed between the resume state and its checkpoint
            from training.callbacks import make_checkpoint

            processes.on_main(lambda: make_checkpoint(folder, cell_file, model, tokenizer, step))
        if step >= cell.steps:
            from training.callbacks import rewind

            processes.on_main(lambda: rewind(folder, step))
            _end(folder, processes, cell, "finished", cell.steps)
            return
    problems = _problems(folder, cell, runtime)
    with open_judge(problems, suites="reward", workers=runtime.judge_workers, caged=runtime.caged) as judge:
        _steps(folder, cell_file, runtime, problems, judge, model, tokenizer, step)


def _set_up(runtime: Runtime) -> None:
    import torch
    from transformers import logging as theirs

    theirs.disable_progress_bar()
    theirs.set_verbosity_error()
    torch.set_num_threads(runtime.num_threads)
    if runtime.device.startswith("cuda") and not torch.cuda.is_available():
        raise MachineError("device", runtime.device, "no CUDA device", "train on a GPU host, or set device to cpu")


def _train_on_service(folder: RunFolder, cell_file: CellFile, runtime: Runtime, processes: Processes) -> None:
    from evaluation.exact import open_judge
    from training.callbacks import Diverged
    from training.tinker_run import ServiceCell

    cell, step = cell_file.cell, newest_resume(folder)
    problems = _problems(folder, cell, runtime)
    with open_judge(problems, suites="reward", workers=runtime.judge_workers, caged=runtime.caged) as judge:
        try:
            begin(folder, cell_file, Path(runtime.problems_path), step or 0)
            ServiceCell(folder, cell_file, runtime, problems, judge).train(step)
        except Diverged as diverged:
            _end_diverged(folder, processes, cell, diverged.step, diverged.what)
            return
    _end(folder, processes, cell, "finished", cell.steps)


def _problems(folder: RunFolder, cell: Cell, runtime: Runtime) -> list[Problem]:
    """Return the training problems, the ones that the cell began with.

    Raises:
        InputError: they are others, or fewer than those of a step.
    """
    path = Path(runtime.problems_path)
    problems = read_problems(path)
    refuse_other_problems(folder, path)
    if len(problems) < cell.grpo.prompts_per_step:
        reason = f"has {len(problems)} problems, fewer than the {cell.grpo.prompts_per_step} of a step"
        raise InputError("problems_path", path, reason, "use the whole split")
    return problems


def load_policy(cell_file: CellFile, runtime: Runtime, resume: Path | None) -> tuple[Any, Any]:
    """Load what is trained from here on, and its tokenizer: the base, or the weights of a resume state.

    The resume state of a LoRA cell has adapters only; the base is then the same as at the start.

    Raises:
        InputError: something is not there, or the prompt specification is not the model's.
    """
    whole = resume if cell_file.cell.lora_rank is None else None
    model, tokenizer = load_model(str(whole or runtime.model_path), None if whole else runtime.model_revision)
    check(cell_file.prompt, tokenizer, model.config, None if whole else model.generation_config)
    if cell_file.cell.lora_rank is not None:
        from training.lora import adapt

        model = adapt(model, cell_file.cell, resume)
    return model, tokenizer


def load_model(path: str, revision: str | None) -> tuple[Any, Any]:
    """Load the weights in fp32 (whatever they are stored in) and the tokenizer, padding on the left.

    Raises:
        InputError: it is not there, or not all of it.
    """
    import torch
    from safetensors import SafetensorError
    from transformers import AutoModelForCausalLM, AutoTokenizer

    if Path(path).is_dir() and not any((Path(path) / n).is_file() for n in TOKENIZERS):
        raise InputError("model_path", path, "has no tokenizer", "name a whole model folder")  # AutoTokenizer makes one
    extra = {} if revision is None else {"revision": revision}
    try:
        loaded: Any = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, output_loading_info=True, **extra)
        tokenizer = AutoTokenizer.from_pretrained(path, padding_side="left", **extra)
    except (OSError, ValueError, SafetensorError, RuntimeError, LookupError, ArithmeticError) as e:
        reason = " ".join(str(e).split())[:300]
        raise InputError("model_path", path, reason, "name a whole model folder, or a repository in reach") from e
    model, info = loaded
    if info["missing_keys"] or info["mismatched_keys"]:
        lacking = sorted(info["missing_keys"])[:3]
        raise InputError("model_path", path, f"weights are missing ({', '.join(lacking)})", "use a whole model folder")
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
    step: int | None,
) -> None:
    """Run the trainer from the resume state of `step` on; a divergence is a result, a signal is an exit."""
    from evaluation.generation import NonFiniteLogits
    from training.callbacks import Diverged, StepLog
    from training.guard import Guard
    from training.trainer import CellTrainer
    from training.watching import Watchers

    cell = cell_file.cell
    log, guard = StepLog(folder, cell.steps), Guard(cell.checkpoints, runtime.resume_every, runtime.end_by)
    trainer = CellTrainer(
        cell_file=cell_file,
        runtime=runtime,
        folder=folder,
        problems=problems,
        judge=judge,
        model=model,
        tokenizer=tokenizer,
        callbacks=[log, guard],  # the step's line first, then the look at the weights
    )
    log.trainer = guard.trainer = trainer
    guard.processes, trainer.break_off = trainer.processes, guard.break_off
    resume = None if step is None else folder.resume(step)
    if resume is not None:
        trainer.restore(resume)
    trainer.processes.on_main(lambda: begin(folder, cell_file, Path(runtime.problems_path), step or 0))
    guard.install()
    with Watchers(trainer) as log.watchers:
        try:
            trainer.train(resume_from_checkpoint=str(resume) if resume else None)
        except Diverged as diverged:
            if diverged.step > trainer.state.global_step:  # broken off before Trainer logged it
                log.write(diverged.step, math.nan)
            _end_diverged(folder, trainer.processes, cell, diverged.step, diverged.what)
            return
        except NonFiniteLogits:
            log.write(trainer.step_number, math.nan)
            _end_diverged(folder, trainer.processes, cell, trainer.step_number, "logit")
            return
        except Stopped:
            if trainer.state.global_step > guard.saved_step:
                trainer._save_checkpoint(trainer.model, trial=None)
            raise
        finally:
            trainer.rewards.close()
        if trainer.state.global_step != cell.steps:
            raise RuntimeError(f"trained {trainer.state.global_step} of {cell.steps} steps")
        _end(folder, trainer.processes, cell, "finished", cell.steps)  # the reporters' end may take its time


def _end_diverged(folder: RunFolder, processes: Processes, cell: Cell, step: int, what: str) -> None:
    logger.warning("diverged: a %s is not finite at step %d", what, step)
    _end(folder, processes, cell, "diverged", step, onset_step=step)


def _end(
    folder: RunFolder,
    processes: Processes,
    cell: Cell,
    end: Literal["finished", "diverged"],
    last_step: int,
    onset_step: int | None = None,
) -> None:
    """Write how the cell ended, with every sign in its log."""

    def write() -> None:
        rows = read_jsonl(folder.steps_jsonl) if folder.steps_jsonl.is_file() else []
        signs = find_signs(rows, cell.grpo.max_new_tokens)
        write_json(folder.result_json, Result(end=end, last_step=last_step, onset_step=onset_step, signs=signs))

    processes.on_main(write)


if __name__ == "__main__":
    leave(main())
