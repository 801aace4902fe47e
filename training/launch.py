"""Train one cell in as many processes as its runtime.json says: `python -m training.launch FOLDER`.

They are started by `accelerate launch`, with a configuration that is generated from the cell and kept in its folder;
exit code and last line are those of the process that failed first, as if there were only one.
"""

if __name__ == "__main__":  # the imports below take a second
    from evaluation.early import leave_on_signals

    leave_on_signals()

import argparse
import logging
import signal
import sys
import tempfile
from pathlib import Path
from typing import Any

from evaluation.errors import AblationError, MachineError, Stopped
from evaluation.files import write_text
from evaluation.program import INTERNAL, STOPPED, run_program
from training.folder import CellFile, RunFolder, Runtime
from training.processes import Told
from training.run import read_folder, train
from training.started import refuse_other

MOST_TELLING = (2, 3, 1, -signal.SIGKILL, -signal.SIGSEGV, -signal.SIGBUS, STOPPED, INTERNAL)
"""Codes that name a cause, then those of a killed process; the rest have only lost it, or were ended after it."""


class ProcessFailed(AblationError):
    """One of the cell's processes failed, and with it all."""

    def __init__(self, exit_code: int, line: str) -> None:
        self.exit_code = exit_code
        super().__init__(line)


def main(argv: list[str] | None = None) -> int:
    """Read the folder, start the processes, and return the exit code."""
    parser = argparse.ArgumentParser(prog="python -m training.launch", description="Train the cell in FOLDER.")
    parser.add_argument("folder", type=Path)
    parser.add_argument("--config", type=Path, help="an accelerate configuration of your own, e.g. for FSDP2")
    parser.add_argument("--debug", action="store_true", help="show the traceback of a failure")
    args = parser.parse_args(argv)
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s", stream=sys.stderr)
    return run_program(lambda: launch(RunFolder(args.folder), args.config), debug=args.debug)


def launch(folder: RunFolder, config: Path | None = None) -> int:
    """Bring the cell to its end; one process, or none that is left to train, needs no launcher.

    Raises:
        MachineError: fewer GPUs than processes.
        ProcessFailed: a process failed; its own line.
        Stopped: a signal came; the processes have had their time to save.
    """
    cell_file, runtime = read_folder(folder)
    refuse_other(folder, cell_file)
    if runtime.num_processes == 1 or folder.result_json.exists():
        return train(folder)
    check_devices(runtime)
    if config is None:
        config = folder.accelerate_yaml
        write_text(config, accelerate_config(cell_file, runtime))
    _start(config, ["--num_processes", str(runtime.num_processes), "--module", "training.run", str(folder.root)])
    return 0


def check_devices(runtime: Runtime) -> None:
    """Refuse to put two processes on one GPU.

    Raises:
        MachineError: fewer GPUs than processes.
    """
    if runtime.device.startswith("cuda"):
        import torch

        found = torch.cuda.device_count()
        if found < runtime.num_processes:
            reason, action = f"{found} GPUs are visible here", "train on a host with more, or set it to that number"
            raise MachineError("num_processes", runtime.num_processes, reason, action)


def accelerate_config(cell_file: CellFile, runtime: Runtime) -> str:
    """Return the configuration: this host, one copy of the model a process (DDP).

    `accelerate launch` starts several local processes for MULTI_GPU only; with `use_cpu` they meet over gloo
    (MULTI_CPU there). Port 0 is any free one.
    """
    cuda = runtime.device.startswith("cuda")
    bf16 = cuda and cell_file.cell.grpo.compute_dtype == "bfloat16"
    settings = {
        "compute_environment": "LOCAL_MACHINE",
        "distributed_type": "MULTI_GPU",
        "use_cpu": "false" if cuda else "true",
        "num_machines": 1,
        "machine_rank": 0,
        "num_processes": runtime.num_processes,
        "gpu_ids": "all",
        "main_process_port": 0,
        "mixed_precision": "bf16" if bf16 else "'no'",
        "dynamo_config": "{}",
    }
    return "".join(f"{k}: {v}\n" for k, v in settings.items())


def _start(config: Path, rest: list[str]) -> None:
    """Run `accelerate launch` in this process: as a command it would turn every failure into exit code 1."""
    from accelerate.commands.launch import launch_command, launch_command_parser
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

    args = launch_command_parser().parse_args(["--config_file", str(config), *rest])
    try:
        with tempfile.TemporaryDirectory(prefix="ablation-launch-") as args.log_dir:  # the processes' error files
            launch_command(args)
    except SignalException as e:
        raise Stopped(f"signal={e.sigval.name.removeprefix('SIG')}: stopped; run the same command again") from e
    except ChildFailedError as e:
        raise as_one(e.failures.values()) from e


def as_one(failures: Any) -> ProcessFailed:
    """Return the failure that explains the others (`ProcessFailure` of torch)."""

    def telling(failure: Any) -> tuple[int, int]:
        code = failure.exitcode
        return MOST_TELLING.index(code) if code in MOST_TELLING else len(MOST_TELLING), failure.local_rank

    first = min(failures, key=telling)
    if first.exitcode < 0:
        line = f"process={first.local_rank}: ended by {first.signal_name()}; run the same command again"
        return ProcessFailed(128 - first.exitcode, line)
    said = first.message["message"] if isinstance(first.message, dict) else ""
    line = said.removeprefix(f"{Told.__name__}: ") or f"process={first.local_rank}: failed; see its output above"
    return ProcessFailed(first.exitcode, line)


if __name__ == "__main__":
    sys.exit(main())
