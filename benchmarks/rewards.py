"""512 reward programs x 3 asserts, as one GRPO step brings them: CPU seconds of the judge and all its children.

python benchmarks/rewards.py --mbpp FILE RECORDED...

The programs are recorded ones of MBPP problems, each with a constant of its own, so that no two are the same.
"""

import argparse
import resource
import time
from pathlib import Path

from made_samples import recorded

from evaluation.judge import Judge
from evaluation.problems.mbpp import load_mbpp
from evaluation.records import Program


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("recorded", type=Path, nargs="+")
    parser.add_argument("--mbpp", required=True, type=Path)
    parser.add_argument("--count", type=int, default=512)
    parser.add_argument("--rounds", type=int, default=3)
    args = parser.parse_args()
    problems = {p.problem_id: p for p in load_mbpp(str(args.mbpp)).problems}
    pairs = [(t, s) for t, sources in recorded(args.recorded).items() for s in sources]
    for number in range(args.rounds):
        chosen = [pairs[(number * args.count + i) % len(pairs)] for i in range(args.count)]
        programs = [
            Program(problem_id=t, source=f"{s}\n_n = {number * args.count + i}\n") for i, (t, s) in enumerate(chosen)
        ]
        before, start = _cpu(), time.perf_counter()
        with Judge([problems[t] for t in {t for t, _ in chosen}], suites="reward") as judge:
            verdicts = judge.judge(programs)
        cpu, wall = _cpu() - before, time.perf_counter() - start
        late = sum("timeout" in v.base.value for v in verdicts)
        right = sum(v.passed for v in verdicts)
        print(f"{args.count} programs, {right} right, {late} over a limit: {cpu:.2f} CPU-s, {wall:.2f} s, one lane")


def _cpu() -> float:
    mine, theirs = resource.getrusage(resource.RUSAGE_SELF), resource.getrusage(resource.RUSAGE_CHILDREN)
    return mine.ru_utime + mine.ru_stime + theirs.ru_utime + theirs.ru_stime


if __name__ == "__main__":
    main()
