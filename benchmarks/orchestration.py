"""What the DAG costs: the demo's wall time beside the work in it, and a second run with nothing to do.

python benchmarks/orchestration.py [EXPERIMENT] [--folder DIR]

The command of the README runs with a Prefect home of its own. Every process below it is watched: trainers, evaluators
and judges are the work; the flow and its Prefect server are the orchestration. Printed:

    start         from the command to the first trainer: imports, the server's first start and its database
    orchestration CPU seconds of flow and server from there on, and their share of wall time from there on
    makespan      wall time from the first trainer to the end, beside max(critical path, CPU work / cores): the
                  critical path is the steps of the longest cell (a bound from below: starts and scores left out)
    second run    the same command again
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

TICKS = os.sysconf("SC_CLK_TCK")
LOOK_EVERY_S = 0.1


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("experiment", nargs="?", default="smoke")
    parser.add_argument("--folder", type=Path)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        folder = args.folder or Path(scratch) / "runs"
        env = {k: v for k, v in os.environ.items() if not k.startswith(("PREFECT_", "ABLATION_"))}
        env["PREFECT_HOME"] = str(Path(scratch) / "prefect")
        argv = [sys.executable, "-m", "flows.cli", "run", args.experiment, "--runs", str(folder)]
        first = Watched(argv, env)
        first.tell(folder)
        again = time.monotonic()
        subprocess.run(argv, env=env, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        print(f"second run: {time.monotonic() - again:.1f} s")
    return 0


class Watched:
    """Runs a command to its end, and adds up the CPU seconds of every process below it by kind."""

    def __init__(self, argv: list[str], env: dict[str, str]) -> None:
        self.kinds: dict[int, str] = {}
        """What each process is; one that has ended and waits to be reaped no longer tells its command line."""
        self.cpu: dict[int, float] = {}
        """CPU seconds of a process as last seen."""
        self.before: dict[int, float] = {}
        """The same when the first trainer had started."""
        self.started, self.trained_from = time.monotonic(), 0.0
        process = subprocess.Popen(argv, env=env, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        while process.poll() is None:
            self._look(process.pid)
            time.sleep(LOOK_EVERY_S)
        self.ended = time.monotonic()
        assert process.returncode == 0, f"the command ended with {process.returncode}"

    def _look(self, root: int) -> None:
        parents, told = {}, {}
        for entry in Path("/proc").glob("[0-9]*"):
            try:
                fields = (entry / "stat").read_text().rpartition(")")[2].split()
                parents[int(entry.name)] = int(fields[1])
                told[int(entry.name)] = [int(x) / TICKS for x in fields[11:15]]
            except (OSError, IndexError):
                continue
        kinds = {root: "flow"}
        more = True
        while more:
            more = False
            for pid, parent in parents.items():
                if pid not in kinds and parent in kinds:
                    kinds[pid] = _kind(pid) or self.kinds.get(pid) or kinds[parent]
                    more = True
        self.kinds |= kinds
        for pid, kind in kinds.items():
            if pid in told:  # a judge's children live for milliseconds: they are seen in what it has reaped
                self.cpu[pid] = sum(told[pid][: 4 if kind == "judge" else 2])
        if not self.trained_from and any(kind == "train" for kind in kinds.values()):
            self.trained_from, self.before = time.monotonic(), dict(self.cpu)

    def seconds(self, *kinds: str, since_training: bool = False) -> float:
        """Return the CPU seconds of these kinds of processes."""
        found = ((pid, value) for pid, value in self.cpu.items() if self.kinds[pid] in kinds)
        return sum(value - (self.before.get(pid, 0.0) if since_training else 0.0) for pid, value in found)

    def tell(self, folder: Path) -> None:
        """Print the figures of the first run."""
        cores, wall = os.cpu_count() or 1, self.ended - self.trained_from
        work, flow = self.seconds("train", "evaluate", "judge"), self.seconds("flow", "leash", since_training=True)
        server = self.seconds("server", since_training=True)
        path = critical_path(folder)
        floor = max(path, work / cores)
        print(f"start, to the first trainer: {self.trained_from - self.started:.1f} s")
        print(f"work: {work:.1f} s CPU on {cores} cores; critical path {path:.1f} s")
        share = (flow + server) / cores / wall
        print(f"orchestration: flow {flow:.1f} s CPU, server {server:.1f} s CPU; {share:.1%} of the cores' time")
        print(
            f"makespan: {wall:.1f} s, {wall / floor:.2f} x max(critical path, work / cores) = {floor:.1f} s", flush=True
        )


def _kind(pid: int) -> str:
    """Return what a process is by its command line; "" where that does not tell: it is what its parent is."""
    try:
        words = Path(f"/proc/{pid}/cmdline").read_bytes().decode(errors="replace").split("\0")
    except OSError:
        return ""
    if any(w.endswith("judge/child.py") for w in words):
        return "judge"
    for module, kind in (("tasks.leash", "leash"), ("training.run", "train"), ("evaluation.run", "evaluate")):
        if module in words:
            return kind
    return "server" if "uvicorn" in words else ""


def critical_path(folder: Path) -> float:
    """Return the seconds of the longest cell's steps, one after the other."""
    longest = 0.0
    for log in folder.glob("*/logs/steps.jsonl"):
        longest = max(longest, sum(json.loads(line)["seconds"] for line in log.read_text().splitlines()))
    return longest


if __name__ == "__main__":
    sys.exit(main())
