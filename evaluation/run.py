"""Draw, judge and score checkpoints: `python -m evaluation.run FOLDER`, by the request.json in FOLDER.

One process serves every unit of the request, and those appended while it runs, so that start-up is paid once. Samples
are kept as they are drawn: a killed run goes on with the same samples, and what is scored is not scored again.
Exit codes: 0 every unit is scored; 1 a unit failed, or the judge failed on a sample; 2, 3, 75 as everywhere.
"""

if __name__ == "__main__":  # the imports below take a second
    from evaluation.early import leave_on_signals

    leave_on_signals()

import argparse
import logging
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from evaluation.errors import IncompleteError, InputError
from evaluation.exact import Judging, open_judge
from evaluation.files import append_jsonl, read_jsonl, write_json, write_jsonl, write_text
from evaluation.manifests import is_complete, write_manifest
from evaluation.problems import read_problems
from evaluation.program import read_record, run_program
from evaluation.prompts import extract, prompt_ids, stopped
from evaluation.records import Problem, Program, Sample, Verdict
from evaluation.request import FAILURE, REQUEST, Request, Unit
from evaluation.scores import build_score
from evaluation.scoring import verdict_row

logger = logging.getLogger("evaluation")


def main(argv: list[str] | None = None) -> int:
    """Serve the folder's request; return the exit code."""
    parser = argparse.ArgumentParser(prog="python -m evaluation.run", description="Score the units of FOLDER.")
    parser.add_argument("folder", type=Path)
    parser.add_argument("--debug", action="store_true", help="show the traceback of a failure")
    args = parser.parse_args(argv)
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s", stream=sys.stderr)
    return run_program(lambda: serve(args.folder), debug=args.debug)


def serve(folder: Path) -> int:
    """Score unit after unit until none is left and no more are to come."""
    request = load_request(folder)
    server = _Server()
    failures: dict[str, str] = {}
    for unit in request.units:
        _failure(unit).unlink(missing_ok=True)  # an earlier run gave it up; this one tries again
    idle_since = time.monotonic()
    try:
        while True:
            todo = (u for u in request.units if not _failure(u).exists() and not is_complete(Path(u.out)))
            unit = next(todo, None)
            if unit is not None:
                try:
                    server.score(request, unit)
                    failures.pop(unit.out, None)
                except IncompleteError as e:
                    failures[unit.out] = str(e)
                    write_text(_failure(unit), f"{e}\n")
                    logger.warning("%s: %s", unit.label, e)
                idle_since = time.monotonic()
            elif request.closed or time.monotonic() - idle_since > request.linger_s:
                break
            else:
                time.sleep(0.2)
            request = load_request(folder)
    finally:
        server.close()
    if failures:
        raise IncompleteError(f"units={len(failures)}: {next(iter(failures.values()))}; run the same command again")
    return 0


def _failure(unit: Unit) -> Path:
    return Path(unit.out) / FAILURE


def load_request(folder: Path) -> Request:
    """Read and check request.json, before anything heavy is imported.

    Raises:
        InputError: it is missing, says something impossible, or names problems that are not there.
    """
    if not (folder / REQUEST).is_file():
        raise InputError("folder", folder, f"has no {REQUEST}", "name the folder of a request")
    request = read_record(Request, folder / REQUEST)
    for unit in request.units:
        path = request.problems.get(unit.protocol.benchmark)
        if path is None or not Path(path).is_file():
            raise InputError("problems", path, f"no problems of {unit.protocol.benchmark}", "name their file")
    return request


@dataclass
class _Bench:
    """One benchmark's problems and judge, shared by every unit."""

    problems: list[Problem]
    judge: Judging


@dataclass
class _Server:
    """What outlives a unit."""

    benches: dict[tuple[str, int | None], _Bench] = field(default_factory=dict)
    engine: Any = None

    def close(self) -> None:
        for bench in self.benches.values():
            bench.judge.close()

    def score(self, request: Request, unit: Unit) -> None:
        """Draw what is missing, judge what is not, and write the score, the manifest last."""
        started = time.monotonic()
        bench = self._bench(request, unit)
        out = Path(unit.out)
        samples = draw(lambda: self._engine(request), request, unit, bench.problems, out)
        verdicts = judge(bench, samples, out)
        score = build_score(
            label=unit.label,
            cell=unit.cell,
            global_step=unit.global_step,
            benchmark=unit.protocol.benchmark,
            ks=unit.protocol.reported_ks,
            problem_ids=[p.problem_id for p in bench.problems],
            verdicts=verdicts,
            has_plus=bench.problems[0].plus_inputs is not None,
            protocol_sha256=unit.protocol.sha256,
            prompt_sha256=request.prompt.sha256,
            judge_version=bench.judge.version,
        ).replace(protocol=unit.protocol)
        write_json(out / "score.json", score)
        if score.num_errors:
            raise IncompleteError(f"judge={unit.label}: {score.num_errors} samples have no verdict")
        write_manifest(out, "score", unit.provenance)
        first = score.pass_at_k[score.suite] or {}
        value = next(iter(first.values())).value
        logger.info("%s: pass@1 %s in %.1f s", unit.label, value, time.monotonic() - started)

    def _bench(self, request: Request, unit: Unit) -> _Bench:
        key = (unit.protocol.benchmark, unit.protocol.num_problems)
        if key not in self.benches:
            problems = read_problems(Path(request.problems[unit.protocol.benchmark]))[: unit.protocol.num_problems]
            self.benches[key] = _Bench(problems, self._judge(request, problems))
        return self.benches[key]

    @staticmethod
    def _judge(request: Request, problems: Sequence[Problem]) -> Judging:
        """Return a judge that leaves out the plus suite of what has failed base: only passing both counts here."""
        cache = Path(request.cache) if request.cache else None
        how = {"workers": request.judge_workers, "cache": cache, "caged": request.caged}
        return open_judge(problems, suites="score", **how)

    def _engine(self, request: Request) -> Any:
        """Import the engine once; torch only comes in here."""
        if self.engine is None:
            from evaluation.engines import open_engine

            self.engine = open_engine(request)
        return self.engine


def draw(
    open_engine: Callable[[], Any], request: Request, unit: Unit, problems: Sequence[Problem], out: Path
) -> list[Sample]:
    """Return n samples of every problem, in order; those drawn before a kill are read, not drawn again."""
    path = out / "samples.jsonl"
    wanted = [(p.problem_id, i) for p in problems for i in range(unit.protocol.n)]
    kept = _kept_samples(path, unit, wanted)
    lacking = [p for p in problems if any((p.problem_id, i) not in kept for i in range(unit.protocol.n))]
    if lacking:
        engine = open_engine()
        engine.load(unit, request.prompt)
        tokens = {p.problem_id: prompt_ids(request.prompt, p, engine.tokenizer) for p in lacking}
        lacking.sort(key=lambda p: len(tokens[p.problem_id]))
        rows_per_problem = max(1, unit.protocol.n)
        size = max(1, request.batch_size // rows_per_problem)
        for start in range(0, len(lacking), size):
            part = lacking[start : start + size]
            drawn = engine.draw(unit.protocol, [p.problem_id for p in part], [tokens[p.problem_id] for p in part])
            rows = [
                _sample(request, p, i, c, engine.tokenizer)
                for p, completions in zip(part, drawn, strict=True)
                for i, c in enumerate(completions)
            ]
            append_jsonl(path, rows)
            kept |= {(r.task_id, r.index): r for r in rows}
            logger.info("%s: %d of %d samples", unit.label, len(kept), len(wanted))
    samples = [kept[w] for w in wanted]
    write_jsonl(path, samples)
    return samples


def _kept_samples(path: Path, unit: Unit, wanted: Sequence[tuple[str, int]]) -> dict[tuple[str, int], Sample]:
    if not path.exists():
        return {}
    rows = [Sample.model_validate(r) for r in read_jsonl(path)]
    keys = set(wanted)
    kept = {(r.task_id, r.index): r for r in rows if (r.task_id, r.index) in keys}
    if len(kept) < len(wanted):
        write_jsonl(path, kept.values())  # drops a line cut by a kill, so that appending starts on a new one
    return kept


def _sample(request: Request, problem: Problem, index: int, completion: Any, tokenizer: Any) -> Sample:
    text = tokenizer.decode(completion.token_ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)
    finish = "stop" if completion.finish_reason == "stop" or stopped(request.prompt, text) else "length"
    return Sample(
        task_id=problem.problem_id,
        index=index,
        completion=text,
        solution=extract(request.prompt, text, problem),
        finish_reason=finish,
        num_tokens=len(completion.token_ids),
    )


def judge(bench: _Bench, samples: Sequence[Sample], out: Path) -> list[tuple[int, Verdict]]:
    """Judge every sample and write verdicts.jsonl, in the samples' order."""
    programs = [Program(problem_id=s.task_id, source=s.solution) for s in samples]
    verdicts = bench.judge.judge(programs)
    write_jsonl(out / "verdicts.jsonl", (verdict_row(s.index, v) for s, v in zip(samples, verdicts, strict=True)))
    return [(s.index, v) for s, v in zip(samples, verdicts, strict=True)]


if __name__ == "__main__":
    sys.exit(main())
