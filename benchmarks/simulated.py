"""Simulated runs whose truth is known, as evidence: what the benchmarks of the statistics feed to the product.

The simulation itself (`--ladder FILE`: RATES, CHECKPOINTS, run, ladder) is no part of the repository, so that no rule
is tuned on what it is tested on.
"""

import importlib.util
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from evaluation.curves import RunEvidence
from evaluation.scores import Counts, Score

BENCHMARK = "mbpp_plus"
LADDER = Path(__file__).resolve().parents[1].parent / "shared" / "simulation" / "ladder.py"


def load_ladder(path: Path) -> Any:
    """Import the simulation from its file."""
    spec = importlib.util.spec_from_file_location("simulated_ladder", path)
    assert spec is not None and spec.loader is not None, path
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # its dataclasses look themselves up
    spec.loader.exec_module(module)
    return module


def score_of(passing: Sequence[int], n: int, ids: Sequence[str] | None = None, plus: bool = True) -> Score:
    """Return a score from each problem's number of passing samples; pass@k is left out."""
    made = {c: Counts(n=n, base=c, plus=c if plus else None, errors=0) for c in {int(c) for c in passing}}
    names = ids or [f"Mbpp/{i}" for i in range(len(passing))]
    problems = {p: made[int(c)] for p, c in zip(names, passing, strict=True)}
    good = int(sum(passing))
    return Score(
        label="simulated", cell=None, global_step=0, benchmark=BENCHMARK, n=n, num_problems=len(problems),
        outcomes={"pass": good, "fail": n * len(problems) - good, "timeout": 0, "harness_error": 0},
        pass_at_k={"base": {}, "plus": {} if plus else None}, problems=problems,
        protocol_sha256=None, prompt_sha256=None, judge_version="simulated",
    )  # fmt: skip


def evidence_of(run: Any, module: Any) -> tuple[RunEvidence, Score]:
    """Return what a simulated run would have left, and the base's score.

    A diverged run ends at its first NaN, one step after its onset: `reward[onset]` is the reward of step onset + 1.
    """
    scores = {s: score_of(run.correct[i], module.SAMPLES) for i, s in enumerate(module.CHECKPOINTS)}
    base = scores.pop(0)
    evidence = RunEvidence(
        label=f"{run.arm}_{run.lr:g}_s{run.seed}", arm=run.arm, lr=run.lr, seed=run.seed, steps=len(run.reward),
        checkpoints=module.CHECKPOINTS[1:], rewards=tuple(map(float, run.reward)),
        end="finished" if run.finite else "diverged", onset_step=None if run.finite else run.onset + 1,
        scores={BENCHMARK: scores},
    )  # fmt: skip
    return evidence, base
