"""`ablation score` beside `evalplus.evaluate` on the same samples, in one run, each as its users start it.

python benchmarks/judge.py SAMPLES.jsonl --mbpp FILE --mbpp-plus FILE [--work DIR]

Both have their reference outputs ready; our verdict cache is empty at first. Three files are scored:
  whole    the samples as they are
  quick    Mbpp/599 and every program that runs into a limit replaced by one that fails at once
  light    every program that needs more than 0.02 s replaced as well; then once more with each light program twice
The last two tell what one more light program costs in CPU seconds, start-up and data left out.
"""

import argparse
import json
import os
import resource
import shutil
import subprocess
import sys
import time
from pathlib import Path

BIN = Path(sys.executable).parent
LIGHT_S = 0.02
NOTHING = "pass\n"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("samples", type=Path)
    parser.add_argument("--mbpp", required=True, type=Path)
    parser.add_argument("--mbpp-plus", required=True, type=Path)
    parser.add_argument("--work", type=Path, default=Path("benchmarks/work"), help="kept: reference outputs are slow")
    parser.add_argument("--only-ours", action="store_true")
    args = parser.parse_args()
    bench = Bench(args.work.resolve(), args.mbpp.resolve(), args.mbpp_plus.resolve())
    rows = [json.loads(line) for line in args.samples.read_text().splitlines()]
    rows = [{"task_id": r["task_id"], "solution": r["solution"]} for r in rows]

    print("preparing the reference outputs of both ...", flush=True)
    bench.ours(rows, "warm-up")
    seconds, limited = bench.verdicts("warm-up")
    heavy = {r["task_id"] for r, s in zip(rows, seconds, strict=True) if s > LIGHT_S} | limited | {"Mbpp/599"}
    quick = [replaced(r, limited | {"Mbpp/599"}) for r in rows]
    light = [replaced(r, heavy) for r in rows]
    again = [{**r, "solution": r["solution"] + "\n_again = 1\n"} for r in light if r["task_id"] not in heavy]
    if not args.only_ours:
        bench.evalplus([replaced(r, {r["task_id"]}) for r in rows], "warm-up")

    files = {"whole": rows, "quick": quick, "light": light, "light twice": light + again}
    found: dict[tuple[str, str], tuple[float, float]] = {}
    for name, content in files.items():
        bench.forget()
        workers = () if not name.startswith("light") else ("--workers", "1")
        found["ours", name] = bench.ours(content, name, *workers)
        longest = max(bench.verdicts(name)[0])
        print(f"{name}: ours {told(found['ours', name])}; longest program {longest:.1f} s", flush=True)
        if name == "whole":
            found["ours", "again"] = bench.ours(content, name)
            print(f"{name}, judged before: ours {told(found['ours', 'again'])}", flush=True)
        if not args.only_ours:
            found["evalplus", name] = bench.evalplus(content, name)
            ratio = found["evalplus", name][0] / found["ours", name][0]
            print(f"{name}: evalplus {told(found['evalplus', name])}; {ratio:.1f} x our wall time", flush=True)
    report(found, len(again), args.only_ours)
    return 0


def report(found: dict[tuple[str, str], tuple[float, float]], light_programs: int, only_ours: bool) -> None:
    per = {
        who: (found[who, "light twice"][1] - found[who, "light"][1]) / light_programs
        for who in (["ours"] if only_ours else ["ours", "evalplus"])
    }
    print(f"CPU of one more light program, of {light_programs}: ours {per['ours'] * 1e3:.2f} ms")
    if only_ours:
        return
    print(f"  evalplus {per['evalplus'] * 1e3:.1f} ms: {per['evalplus'] / per['ours']:.0f} x")
    print(f"judged before: evalplus / ours, wall {found['evalplus', 'whole'][0] / found['ours', 'again'][0]:.0f} x")


def replaced(row: dict[str, str], task_ids: set[str]) -> dict[str, str]:
    return {**row, "solution": NOTHING} if row["task_id"] in task_ids else row


def told(figures: tuple[float, float]) -> str:
    return f"{figures[0]:.2f} s wall, {figures[1]:.2f} s CPU"


class Bench:
    """Runs both scorers on files of one folder."""

    def __init__(self, work: Path, mbpp: Path, mbpp_plus: Path) -> None:
        work.mkdir(parents=True, exist_ok=True)
        self.work, self.mbpp, self.mbpp_plus = work, mbpp, mbpp_plus
        self.env = {**os.environ, "HOME": str(work), "XDG_CACHE_HOME": str(work / ".cache")}
        self.env["MBPP_OVERRIDE_PATH"] = str(mbpp_plus)

    def ours(self, rows: list[dict[str, str]], name: str, *flags: str) -> tuple[float, float]:
        path = self._file(rows, f"ours {name}")
        data = ("--mbpp", str(self.mbpp), "--mbpp-plus", str(self.mbpp_plus))
        return self._run(BIN / "ablation", "score", path, "--benchmark", "mbpp_plus", "--partial", *data, *flags)

    def verdicts(self, name: str) -> tuple[list[float], set[str]]:
        """Return each program's own seconds, and the problems whose programs ran into a limit."""
        path = self.work / f"ours {name}" / "verdicts.jsonl"
        rows = [json.loads(line) for line in path.read_text().splitlines()]
        return [r["seconds"] for r in rows], {r["task_id"] for r in rows if "timeout" in (r["base"], r["plus"])}

    def evalplus(self, rows: list[dict[str, str]], name: str) -> tuple[float, float]:
        path = self._file(rows, f"evalplus {name}")
        return self._run(BIN / "evalplus.evaluate", "--dataset", "mbpp", "--samples", path)

    def forget(self) -> None:
        """Empty our verdict cache; reference outputs stay."""
        for path in self.work.rglob("verdicts.sqlite*"):
            path.unlink()

    def _file(self, rows: list[dict[str, str]], name: str) -> Path:
        folder = self.work / name
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir()
        path = folder / "samples.jsonl"
        path.write_text("".join(json.dumps(r) + "\n" for r in rows))
        return path

    def _run(self, *argv: object) -> tuple[float, float]:
        """Return wall and CPU seconds of a command and all its descendants."""
        before, start = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
        done = subprocess.run([*map(str, argv)], env=self.env, capture_output=True, text=True)
        wall, after = time.perf_counter() - start, resource.getrusage(resource.RUSAGE_CHILDREN)
        if done.returncode:
            raise SystemExit(done.stdout + done.stderr)
        return wall, after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


if __name__ == "__main__":
    sys.exit(main())
