"""Score a made file of 60,480 samples with an empty verdict cache: time, floor, and what the judge adds to the tests.

python benchmarks/scoring_at_scale.py --mbpp FILE --mbpp-plus FILE --distinct 0.2 RECORDED...

The floor is the processor time of the tests alone, each up to the first that fails, as the cage measures it on every
recorded program once, on as many lanes as later; a program that runs into a limit counts as its limit. Nine tenths of
all time are tests, so a machine that is a little faster or slower later would drown the rest: the floor is scaled by
how the programs' own seconds (verdicts.jsonl) in the large run compare with those when the floor was taken. Everything
else is the judge's: start-up, data, forks, comparing, writing.
"""

import argparse
import json
import resource
import subprocess
import sys
import time
from pathlib import Path

from made_samples import ROWS, make, recorded

from evaluation.judge.judge import Judge
from evaluation.judge.lanes import Lane
from evaluation.judge.suites import Inputs
from evaluation.problems import load_benchmark
from evaluation.records import Problem, Program, Verdict

BIN = Path(sys.executable).parent


class Accept:
    """Takes every value for right, exceptions too."""

    def matches(self, index: int, payload: bytes) -> int:
        return 0

    def accepts(self, index: int, raw: bytes) -> bool:
        return True

    def accepts_in_full(self, index: int, raw: bytes) -> bool:
        return True


class First(Inputs):
    """The first tests of a suite, timed."""

    def timed(self, zygote: object, source: str, count: int) -> float:
        job, _ = self.job(zygote, source)
        import dataclasses
        import marshal

        inputs = marshal.dumps(self.inputs[:count], 2)
        short = dataclasses.replace(job, inputs=inputs, limits_s=job.limits_s[:count], timed=True)
        return sum(zygote.run(short, Accept()).times_s)


def floor_of(problem: Problem, source: str, verdict: Verdict, lane: Lane, cache: Path) -> float:
    """Return the seconds that this program's tests need by themselves."""
    if "timeout" in {verdict.base.value, verdict.plus and verdict.plus.value}:
        return verdict.seconds
    total = 0.0
    for name, inputs in (("base", problem.base_inputs), ("plus", problem.plus_inputs)):
        suite = First(problem, inputs, cache)
        count = suite.size
        for part in verdict.detail.split("; "):
            if part.startswith(f"{name}: "):
                words = part.split()
                count = int(words[2].rstrip(":")) + 1 if words[1] == "test" else 0
        if count:
            total += suite.timed(lane.zygote(numpy="numpy" in source), source, count)
    return total


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("recorded", type=Path, nargs="+")
    parser.add_argument("--mbpp", required=True, type=Path)
    parser.add_argument("--mbpp-plus", required=True, type=Path)
    parser.add_argument("--distinct", type=float, default=0.2)
    parser.add_argument("--rows", type=int, default=ROWS)
    parser.add_argument("--work", type=Path, default=Path("benchmarks/work"))
    parser.add_argument("--most-ms", type=float, help="fail if the judge adds more to a distinct program")
    args = parser.parse_args()
    work = args.work.resolve()
    work.mkdir(parents=True, exist_ok=True)
    cache = work / ".cache/rl-ablation/references"
    problems = {p.problem_id: p for p in load_benchmark("mbpp_plus", str(args.mbpp), str(args.mbpp_plus))}
    programs = recorded(args.recorded)

    for path in cache.glob("verdicts.sqlite*"):
        path.unlink()
    floors: dict[tuple[str, str], float] = {}
    sources = [Program(problem_id=t, source=s) for t, ss in programs.items() for s in ss]
    with Judge([problems[t] for t in programs], workers=2, cache=cache) as judge:
        verdicts = judge.judge(sources)

        def measure(lane: Lane, item: tuple[Program, Verdict]) -> None:  # on all lanes, as later
            p, v = item
            floors[p.problem_id, p.source] = floor_of(problems[p.problem_id], p.source, v, lane, cache)

        judge.lanes.each(zip(sources, verdicts, strict=True), measure)
    seconds = {(p.problem_id, p.source): v.seconds for p, v in zip(sources, verdicts, strict=True)}

    path, distinct, floor, then, firsts = work / "made.jsonl", set(), 0.0, 0.0, set()
    with path.open("w", encoding="utf-8") as f:
        for number, row in enumerate(make(programs, args.rows, args.distinct)):
            f.write(json.dumps(row) + "\n")
            original, _, variant = row["solution"].rpartition("\n# copy ")
            key = row["task_id"], original, variant.rpartition("= ")[2]
            if key not in distinct:
                distinct.add(key)
                firsts.add(number)
                floor += floors[key[:2]]
                then += seconds[key[:2]]
    for old in cache.glob("verdicts.sqlite*"):
        old.unlink()
    before, start = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
    data = ("--mbpp", str(args.mbpp), "--mbpp-plus", str(args.mbpp_plus), "--out", str(work / "made"))
    command = (str(BIN / "ablation"), "score", str(path), "--benchmark", "mbpp_plus", "--partial", "--debug", *data)
    done = subprocess.run(command, env={"HOME": str(work), "PATH": "/usr/bin:/bin"}, capture_output=True, text=True)
    wall, after = time.perf_counter() - start, resource.getrusage(resource.RUSAGE_CHILDREN)
    if done.returncode:
        print(done.stdout + done.stderr)
        return 1
    cpu = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    with (work / "made" / "verdicts.jsonl").open() as f:
        now = sum(json.loads(line)["seconds"] for number, line in enumerate(f) if number in firsts)
    added = (cpu - floor * now / then) / len(distinct) * 1e3
    again = [line for line in done.stderr.splitlines() if "again, alone" in line]
    print(*(line.strip() for line in again), sep="\n")
    print(f"{args.rows} samples, {len(distinct)} distinct programs: {wall:.0f} s wall, {cpu:.0f} s CPU")
    print(f"floor, the tests alone: {floor:.0f} s CPU, times {now / then:.3f} in the run: {floor * now / then:.0f} s")
    print(f"the judge adds {added:.2f} ms a distinct program")
    return 0 if args.most_ms is None or added <= args.most_ms else 1


if __name__ == "__main__":
    sys.exit(main())
