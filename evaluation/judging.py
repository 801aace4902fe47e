"""Judges a checkpoint's samples while they are drawn, and writes verdicts, score and, last, the manifest."""

import io
import logging
import os
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import BinaryIO

from evaluation.drawing import SAMPLES, problems_of, wanted_of
from evaluation.errors import IncompleteError
from evaluation.exact import Judging, open_judge
from evaluation.files import parse_jsonl, write_json, write_jsonl
from evaluation.manifests import write_manifest
from evaluation.records import Problem, Program, Sample, Verdict
from evaluation.request import DRAWN, Request, Unit, is_drawn
from evaluation.scores import build_score
from evaluation.scoring import verdict_row

logger = logging.getLogger("evaluation")


@dataclass
class _Bench:
    """One benchmark's problems and judge, shared by every unit."""

    problems: list[Problem]
    judge: Judging


@dataclass
class Growing:
    """A file of samples that grows, and may be replaced by one with the same samples; only what is new is read."""

    path: Path
    wanted: frozenset[tuple[str, int]]
    rows: dict[tuple[str, int], Sample] = field(default_factory=dict)
    file: BinaryIO | None = None
    """Held open from look to look: no other file can have its inode as long."""
    lines: int = 0

    @property
    def complete(self) -> bool:
        """Whether every wanted sample has been read."""
        return len(self.rows) == len(self.wanted)

    def more(self) -> list[Sample]:
        """Return the wanted samples that were not there at the last look.

        Raises:
            InputError: a whole line is none.
        """
        if self.complete or not self.path.is_file():
            return []
        lines = list(io.BytesIO(self._whole_lines()))
        rows = [Sample.model_validate(r) for r in parse_jsonl(self.path, lines, self.lines + 1)]
        self.lines += len(lines)
        new = {k: r for r in rows if (k := (r.task_id, r.index)) in self.wanted and k not in self.rows}
        self.rows |= new
        if self.complete:
            self.close()
        return list(new.values())

    def close(self) -> None:
        """Let go of the file."""
        if self.file is not None:
            self.file.close()
            self.file = None

    def _whole_lines(self) -> bytes:
        """Read on to the last line end; from the beginning in a file that took the place of the one before."""
        stat = self.path.stat()
        if self.file is None or not os.path.samestat(stat, os.fstat(self.file.fileno())) or stat.st_size < self._at():
            self.close()
            self.file, self.lines = self.path.open("rb"), 0
        start = self._at()
        whole, end, _ = self.file.read().rpartition(b"\n")
        self.file.seek(start + len(whole + end))
        return whole + end

    def _at(self) -> int:
        return self.file.tell() if self.file is not None else 0


@dataclass
class _Part:
    """What has been judged of a unit."""

    samples: Growing
    verdicts: dict[tuple[str, int], Verdict] = field(default_factory=dict)
    began: float = field(default_factory=time.monotonic)


class Judger:
    """Judges unit after unit, each as far as it is drawn."""

    def __init__(self) -> None:
        self.benches: dict[tuple[str, int | None], _Bench] = {}
        self.parts: dict[str, _Part] = {}

    def left(self, waiting: Sequence[Unit]) -> list[Unit]:
        """Return the units that lack their score: all that wait."""
        return list(waiting)

    def step(self, request: Request, unit: Unit) -> bool:
        """Judge what is new of a unit, and score it once that is all; return whether there was anything to do.

        Raises:
            IncompleteError: the judge itself failed on samples.
        """
        bench, out = self._bench(request, unit), Path(unit.out)
        drawn = is_drawn(out)  # before the look: what is drawn after it is seen by the next one
        if not drawn and not (out / SAMPLES).exists():
            return False
        if unit.out not in self.parts:
            self.parts[unit.out] = _Part(Growing(out / SAMPLES, frozenset(wanted_of(unit, bench.problems))))
        part = self.parts[unit.out]
        new = part.samples.more()
        if new:
            verdicts = bench.judge.judge([Program(problem_id=s.task_id, source=s.solution) for s in new])
            part.verdicts |= {(s.task_id, s.index): v for s, v in zip(new, verdicts, strict=True)}
        if part.samples.complete:
            del self.parts[unit.out]  # a score that fails is tried again from the file
            self._score(request, unit, bench, part)
            return True
        if drawn:
            (out / DRAWN).unlink(missing_ok=True)  # not so: whoever draws looks again
        return bool(new)

    def _score(self, request: Request, unit: Unit, bench: _Bench, part: _Part) -> None:
        out, wanted = Path(unit.out), wanted_of(unit, bench.problems)
        write_jsonl(out / SAMPLES, (part.samples.rows[w] for w in wanted))
        write_jsonl(out / "verdicts.jsonl", (verdict_row(w[1], part.verdicts[w]) for w in wanted))
        score = build_score(
            label=unit.label,
            cell=unit.cell,
            global_step=unit.global_step,
            benchmark=unit.protocol.benchmark,
            ks=unit.protocol.reported_ks,
            problem_ids=[p.problem_id for p in bench.problems],
            verdicts=[(w[1], part.verdicts[w]) for w in wanted],
            has_plus=bench.problems[0].plus_inputs is not None,
            protocol_sha256=unit.protocol.sha256,
            prompt_sha256=request.prompt.sha256,
            judge_version=bench.judge.version,
        ).replace(protocol=unit.protocol)
        write_json(out / "score.json", score)
        if score.num_errors:
            raise IncompleteError(f"judge={unit.label}: {score.num_errors} samples have no verdict")
        write_manifest(out, "score", unit.provenance)
        (out / DRAWN).unlink(missing_ok=True)
        first = score.pass_at_k[score.suite] or {}
        value = next(iter(first.values())).value
        logger.info("%s: pass@1 %s in %.1f s", unit.label, value, time.monotonic() - part.began)

    def _bench(self, request: Request, unit: Unit) -> _Bench:
        """Return the unit's judge, which leaves out the plus suite of what has failed base: only both count here."""
        key = (unit.protocol.benchmark, unit.protocol.num_problems)
        if key not in self.benches:
            problems = problems_of(request, unit)
            cache = Path(request.cache) if request.cache else None
            how = {"workers": request.judge_workers, "cache": cache, "caged": request.caged}
            self.benches[key] = _Bench(problems, open_judge(problems, suites="score", **how))
        return self.benches[key]

    def close(self) -> None:
        """End the judges."""
        for bench in self.benches.values():
            bench.judge.close()
