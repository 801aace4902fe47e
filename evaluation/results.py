"""`result.json`: the numbers of a drop experiment under the keys of the document that registered it.

`base` is the plain arm and `sc` the treated one; accuracies are pass@1 of the primary benchmark, means are over seeds.
What cannot be computed yet is null: the means of an arm as soon as one of its runs lacks its curve.
"""

import math
from collections.abc import Callable, Sequence
from statistics import fmean
from typing import Any

from evaluation.curves import RunEvidence
from evaluation.drops import RunEnding, run_ending
from evaluation.scores import Score

LAST = 10
"""Steps that `_last10` averages over."""
DIGITS = 6
"""Significant ones: a gap of 2e-7 is not 0."""


def drop_result(
    runs: Sequence[RunEvidence],
    base: Score | None,
    benchmark: str,
    pair: tuple[str, str],
    *,
    top_k: int | None,
    wall_minutes: float | None,
) -> dict[str, Any]:
    """Return the document's numbers.

    Args:
        runs: every planned cell.
        base: the base model's score, step 0 of every curve.
        benchmark: the primary one.
        pair: plain arm, treated arm.
        top_k: size of the sampler's head that the treatment uses.
        wall_minutes: of all runs together.
    """
    arms = {p: sorted((r for r in runs if r.arm == a), key=_seed) for p, a in zip(("base", "sc"), pair, strict=True)}
    ends = {p: [run_ending(r, base, benchmark) for r in arm] for p, arm in arms.items()}
    found: dict[str, float | None] = {}
    for p, arm in ends.items():
        found |= {f"{p}_peak_acc": _mean(arm, "peak"), f"{p}_final_acc": _mean(arm, "final")}
        found[f"{p}_drop"] = _mean(arm, "drop")
    found["drop_diff_base_minus_sc"] = _difference(found["base_drop"], found["sc_drop"])
    found["final_diff_sc_minus_base"] = _difference(found["sc_final_acc"], found["base_final_acc"])
    for field in ("drop", "final"):
        for p in arms:
            values = zip(arms[p], ends[p], strict=True)
            found |= {f"{p}_s{run.seed}_{field}": getattr(end, field) for run, end in values}
    per_arm: dict[str, Callable[[Sequence[RunEvidence]], float | None]] = {
        "grad_norm_mean": lambda arm: _over(arm, "grad_norm", fmean),
        "grad_norm_max": lambda arm: _over(arm, "grad_norm", max),
        "logprob_gap_abs": lambda arm: _over(arm, "logprob_gap", fmean),
        "entropy_last10": lambda arm: _over(arm, "entropy", fmean, LAST),
        "reward_last10": lambda arm: _over(arm, "reward", fmean, LAST),
    }
    found |= {f"{p}_init_acc": _mean(ends[p], "initial") for p in arms}
    found |= {f"{p}_{name}": of(arm) for name, of in per_arm.items() for p, arm in arms.items()}
    rounded = {k: None if v is None else float(f"{v:.{DIGITS}g}") for k, v in found.items()}
    minutes = None if wall_minutes is None else round(wall_minutes, 1)
    return {"schema": "drop_result/1", **rounded, "sc_topk_k": top_k, "wall_minutes": minutes}


def figure(run: RunEvidence, name: str, of: Callable[[Sequence[float]], float], last: int = 0) -> float | None:
    """Return a figure of one run over its (last) steps with a finite value; None if there is none."""
    return _over([run], name, of, last)


def _over(
    runs: Sequence[RunEvidence], name: str, of: Callable[[Sequence[float]], float], last: int = 0
) -> float | None:
    steps = [run.rewards if name == "reward" else run.figures.get(name, ()) for run in runs]
    values = [x for row in steps for x in row[-last:] if math.isfinite(x)]
    return of(values) if values else None


def _seed(run: RunEvidence) -> int:
    return run.seed


def _mean(arm: Sequence[RunEnding], field: str) -> float | None:
    values = [getattr(end, field) for end in arm]
    return fmean(values) if values and None not in values else None


def _difference(one: float | None, other: float | None) -> float | None:
    return None if one is None or other is None else one - other
