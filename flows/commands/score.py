"""`ablation score SAMPLES.jsonl --benchmark NAME`: judges anybody's samples in EvalPlus's format, both suites."""

import argparse
import os
import re
from pathlib import Path
from typing import TYPE_CHECKING

from tqdm import tqdm

from evaluation.errors import InputError
from evaluation.files import check_readable, check_writable
from evaluation.problems import BENCHMARKS, load_benchmark, read_problems
from evaluation.records import Problem
from flows.commands.answer import Answer, table
from flows.commands.flags import add_data, add_gsm8k
from tasks.settings import settings

if TYPE_CHECKING:
    from evaluation.scores import Score


def configure(parser: argparse.ArgumentParser) -> None:
    """Declare the flags."""
    parser.add_argument("samples", help="JSONL with task_id and exactly one of solution, completion")
    parser.add_argument("--benchmark", required=True, help=", ".join(BENCHMARKS))
    parser.add_argument("--problems", metavar="FILE", help="problems to judge by; default: the benchmark's own")
    parser.add_argument("--out", metavar="DIR", help="default: the folder of the samples")
    parser.add_argument("--k", metavar="K[,K]", help="default: 1, 2, 4, ... and n")
    parser.add_argument("--workers", type=int, metavar="N", help="programs judged at a time; default: the cores")
    parser.add_argument("--no-cache", action="store_true", help="judge again what was judged before")
    parser.add_argument("--partial", action="store_true", help="score what is there, and say how much that is")
    add_data(parser)
    add_gsm8k(parser)


def execute(args: argparse.Namespace) -> Answer:
    """Judge, and answer with the score; exit 1 if a sample has no verdict."""
    samples = Path(args.samples)
    check_readable("samples", samples, "a JSONL file of samples")
    ks = parse_ks(args.k)
    workers = len(os.sched_getaffinity(0)) if args.workers is None else args.workers
    if workers < 1:
        raise InputError("workers", workers, "nothing is judged by fewer than one", "use 1 or more")
    problems = problems_of(args.benchmark, args.problems, args.mbpp, args.mbpp_plus, args.gsm8k)
    out = Path(args.out) if args.out else samples.parent
    check_writable("out", out)
    from evaluation.scoring import score_samples

    with tqdm(desc=f"judging {samples.name}", unit=" samples", disable=None) as bar:

        def progress(done: int, total: int) -> None:
            bar.total = total
            bar.update(done - bar.n)

        score = score_samples(
            samples,
            args.benchmark,
            problems,
            out,
            ks=ks,
            workers=workers,
            partial=args.partial,
            cache=None if args.no_cache else cache_folder(),
            caged=settings().caged,
            progress=progress,
        )
    return score_answer(score, out)


def cache_folder() -> Path | None:
    """Return where reference outputs are kept (by content, so for every file and benchmark); None if nowhere."""
    folder = Path.home() / ".cache" / "rl-ablation" / "references"
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError:
        return None
    return folder


def parse_ks(text: str | None) -> tuple[int, ...]:
    """Return the k of `--k 1,10`, ascending; none means the protocol's own.

    Raises:
        InputError: not a list of whole numbers from 1.
    """
    if text is None:
        return ()
    if not re.fullmatch(r" *[1-9][0-9]{0,8} *(, *[1-9][0-9]{0,8} *)*", text):
        raise InputError("k", text, "not a list of whole numbers from 1", "write --k 1,10")
    return tuple(sorted({int(k) for k in text.split(",")}))


def problems_of(
    benchmark: str, path: str | None, mbpp: str | None, mbpp_plus: str | None, gsm8k: str | None = None
) -> list[Problem]:
    """Return a benchmark's problems: from a file of ours, from the benchmark's own file, or from its home.

    Raises:
        InputError: no such benchmark or file, or a file that is not the benchmark's.
        MachineError: a home that cannot be reached.
    """
    if benchmark not in BENCHMARKS:
        raise InputError("benchmark", benchmark, "unknown", f"use one of {', '.join(BENCHMARKS)}")
    if path is None:
        return load_benchmark(benchmark, mbpp, mbpp_plus, gsm8k=gsm8k)
    if benchmark == "gsm8k" and Path(path).is_dir():
        return load_benchmark(benchmark, gsm8k=path)
    check_readable("problems", Path(path), "a file of problems")
    with Path(path).open(encoding="utf-8", errors="replace") as f:
        ours = '"problem_id"' in f.readline()
    if ours:
        return read_problems(path)
    own = {"mbpp_plus": "mbpp_plus", "humaneval_plus": "humaneval_plus"}.get(benchmark, "mbpp")
    return load_benchmark(benchmark, **{"mbpp": mbpp, "mbpp_plus": mbpp_plus, own: path})


def score_answer(score: "Score", out: Path) -> Answer:
    """Return the answer for a score: pass@k of each suite with its interval; exit 1 if the judge failed on a sample."""
    rows: list[tuple[str, ...]] = [("suite", "k", "pass@k", "95 % interval")]
    for suite, curve in score.pass_at_k.items():
        for k, found in (curve or {}).items():
            told = ("-", "not every problem has k judged samples")
            if found.value is not None:
                told = (f"{found.value:.4f}", f"{found.low:.4f} .. {found.high:.4f}")
            rows.append((suite, k, *told))
    outcomes = ", ".join(f"{count} {word}" for word, count in score.outcomes.items())
    told = [table(rows), *_told_apart(score)]
    of = f" of {score.num_planned}" if score.num_planned else ""
    least = min(p.n for p in score.problems.values())
    each = f"{score.n}" if least == score.n else f"{least} to {score.n}"
    if score.num_unknown:
        told.append(f"{score.num_unknown} samples left out: their problems are not in {score.benchmark}")
    told.append(f"{score.num_problems}{of} problems x {each}: {outcomes}\nwritten to {out}")
    return Answer.of(score, "\n".join(told), 1 if score.num_errors else 0)


def _told_apart(score: "Score") -> list[str]:
    """Tell the problems on which EvalPlus itself depends on the machine, or whose gold is disputed; pass@1 without."""
    if score.excepted is None:
        return []
    passing = ", ".join(f"{p} {score.passes(p, score.suite)}/{score.problems[p].n}" for p in score.excepted.problems)
    rest = score.excepted.pass_at_1[score.suite]
    value = "-" if rest is None or rest.value is None else f"{rest.value:.4f}"
    why = "whose gold is disputed" if score.benchmark == "gsm8k" else "decided by the machine's speed in EvalPlus"
    return [f"{why}: {passing}; pass@1 without them {value}"]
