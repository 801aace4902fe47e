"""512 reward programs x 3 asserts, as one GRPO step brings them: CPU seconds of the judge and all its children.

python benchmarks/rewards.py --mbpp FILE --mbpp-plus FILE

64 of the 320 training problems a round, 8 programs each, no two the same: the reference, and the reference with one
operator, constant or comparison changed, which mostly fails and at times never ends.
"""

import argparse
import resource
import time
from collections.abc import Iterator
from pathlib import Path

from evaluation.judge import Judge
from evaluation.problems.mbpp import load_mbpp
from evaluation.problems.prepare import load_split
from evaluation.records import Problem, Program

GROUPS, ROLLOUTS = 64, 8
CHANGES = (
    ("", ""),
    ("+", "-"),
    ("<", ">"),
    ("0", "1"),
    ("==", "!="),
    ("return ", "return not "),
    ("", ""),
    ("[", "(["),
)


def programs_of(problem: Problem, mark: int) -> Iterator[Program]:
    for i, (old, new) in enumerate(CHANGES):
        head, _, body = problem.reference.partition("\n")
        source = f"{head}\n{body.replace(old, new, 1) if old else body}\n_n = {mark + i}\n"
        yield Program(problem_id=problem.problem_id, source=source)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mbpp", required=True, type=Path)
    parser.add_argument("--mbpp-plus", required=True, type=Path)
    args = parser.parse_args()
    numbers = set(load_split(str(args.mbpp), str(args.mbpp_plus)).ids.train)
    problems = [p for p in load_mbpp(str(args.mbpp)).problems if p.number in numbers]
    for start in range(0, len(problems), GROUPS):
        chosen = problems[start : start + GROUPS]
        programs = [p for i, problem in enumerate(chosen) for p in programs_of(problem, i * ROLLOUTS)]
        before, began = _cpu(), time.perf_counter()
        with Judge(chosen, suites="reward") as judge:
            verdicts = judge.judge(programs)
        cpu, wall = _cpu() - before, time.perf_counter() - began
        late = sum("timeout" in v.base.value for v in verdicts)
        right = sum(v.passed for v in verdicts)
        print(f"{len(programs)} programs, {right} right, {late} over a limit: {cpu:.2f} CPU-s, {wall:.2f} s, one lane")


def _cpu() -> float:
    mine, theirs = resource.getrusage(resource.RUSAGE_SELF), resource.getrusage(resource.RUSAGE_CHILDREN)
    return mine.ru_utime + mine.ru_stime + theirs.ru_utime + theirs.ru_stime


if __name__ == "__main__":
    main()
