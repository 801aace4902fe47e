"""Draws a checkpoint's samples: `samples.jsonl` grows batch by batch, and is judged while it does."""

import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from evaluation.files import append_jsonl, read_jsonl, write_jsonl
from evaluation.problems import read_problems
from evaluation.prompts import extract, prompt_ids, stopped
from evaluation.records import Problem, Sample
from evaluation.request import DRAWN, Request, Unit, is_drawn

logger = logging.getLogger("evaluation")

SAMPLES = "samples.jsonl"


def problems_of(request: Request, unit: Unit) -> list[Problem]:
    """Return the problems that a unit's protocol asks for."""
    protocol = unit.protocol
    return read_problems(Path(request.problems[protocol.benchmark]))[: protocol.num_problems]


def wanted_of(unit: Unit, problems: Sequence[Problem]) -> list[tuple[str, int]]:
    """Return (problem id, index) of every sample of a unit, in order."""
    return [(p.problem_id, i) for p in problems for i in range(unit.protocol.n)]


class Drawer:
    """Draws unit after unit with one engine."""

    def __init__(self) -> None:
        self.engine: Any = None

    def left(self, waiting: Sequence[Unit]) -> list[Unit]:
        """Return the units that samples must still be drawn of."""
        return [u for u in waiting if not is_drawn(Path(u.out))]

    def step(self, request: Request, unit: Unit) -> bool:
        """Draw what a unit lacks; return whether there was anything to do.

        Raises:
            IncompleteError: the checkpoint cannot be sampled.
        """
        if is_drawn(Path(unit.out)):
            return False
        self._draw(request, unit, problems_of(request, unit))
        (Path(unit.out) / DRAWN).touch()
        return True

    def _draw(self, request: Request, unit: Unit, problems: Sequence[Problem]) -> None:
        """Draw n samples of every problem; those drawn before a kill are kept, not drawn again."""
        path, wanted = Path(unit.out) / SAMPLES, wanted_of(unit, problems)
        kept = _kept_samples(path, wanted)
        lacking = [p for p in problems if any((p.problem_id, i) not in kept for i in range(unit.protocol.n))]
        if not lacking:
            return
        engine = self._engine(request)
        engine.load(unit, request.prompt)
        tokens = {p.problem_id: prompt_ids(request.prompt, p, engine.tokenizer) for p in lacking}
        lacking.sort(key=lambda p: len(tokens[p.problem_id]))
        size = max(1, request.batch_size // unit.protocol.n)
        for start in range(0, len(lacking), size):
            part = lacking[start : start + size]
            drawn = engine.draw(unit.protocol, [p.problem_id for p in part], [tokens[p.problem_id] for p in part])
            rows = [
                _sample(request, p, i, c, engine.tokenizer)
                for p, completions in zip(part, drawn, strict=True)
                for i, c in enumerate(completions)
            ]
            append_jsonl(path, rows)
            kept |= {(r.task_id, r.index) for r in rows}
            logger.info("%s: %d of %d samples", unit.label, len(kept), len(wanted))

    def _engine(self, request: Request) -> Any:
        """Import the engine once; torch only comes in here."""
        if self.engine is None:
            from evaluation.engines import open_engine

            self.engine = open_engine(request)
        return self.engine


def _kept_samples(path: Path, wanted: Sequence[tuple[str, int]]) -> set[tuple[str, int]]:
    """Return which samples are there; a line cut by a kill is dropped, so that appending starts on a new one."""
    if not path.exists():
        return set()
    keys = set(wanted)
    rows = [Sample.model_validate(row) for row in read_jsonl(path)]
    kept = {(r.task_id, r.index): r for r in rows if (r.task_id, r.index) in keys}
    if len(kept) < len(wanted):
        write_jsonl(path, kept.values())
    return set(kept)


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
