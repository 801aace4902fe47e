"""Whole ladders of known truth through the declared rules: classes, onsets, false claims, and power against seeds.

python benchmarks/ladder_power.py [--ladders 200] [--seeds 4,8] [--shifts 0,1,2] [--runs 300]

Prints Markdown; exit 1 where an aim of docs/statistics.md is missed. One core; 8 seeds take a second a ladder.
"""

import argparse
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
from simulated import BENCHMARK, LADDER, evidence_of, load_ladder

from evaluation.curves import Classified, Criterion, classify
from evaluation.ladders import compare

RULES = Criterion()
LABELS = {"nobuf": "no replay", "hardcd_lam0p1": "replay"}
ONSET_WITHIN = 20


def classified(run: Any, module: Any) -> Classified:
    evidence, base = evidence_of(run, module)
    return classify(evidence, base, BENCHMARK, RULES)


def kinds(module: Any, count: int, seed: int) -> bool:
    """Classify runs of each kind, a new benchmark every four of them; return whether every aim is met."""
    print("| truth | runs | right class | called | onset within 20 steps |")
    print("|---|---|---|---|---|")
    met = True
    for kind, gain in (("stable", 0.8), ("flat", 0.0), ("degraded", 0.8), ("collapsed", 0.8), ("diverged", 0.8)):
        rng, called, near = np.random.default_rng([seed, len(kind)]), Counter(), []
        for index in range(count):
            if index % 4 == 0:
                ability = module.abilities(rng)
            truth = "stable" if kind == "flat" else kind
            run = module.run(rng, ability, kind=truth, gain=gain, seed=index)
            found = classified(run, module)
            called[found.run_class] += 1
            if kind in {"collapsed", "diverged"}:
                near.append(found.onset_step is not None and abs(found.onset_step - run.onset) <= ONSET_WITHIN)
        right = called["stable" if kind == "flat" else kind] / count
        onset = f"{np.mean(near):.3f}" if near else ""
        print(f"| {kind} | {count} | {right:.3f} | {dict(called)} | {onset} |", flush=True)
        met &= right >= 0.95 and (not near or float(np.mean(near)) >= 0.95)
        if kind in {"stable", "flat"}:
            met &= called["degraded"] <= 0.05 * count and called["collapsed"] <= 0.01 * count
    return met


def power(module: Any, shift: float, seeds: int, ladders: int, seed: int) -> Counter[str]:
    """Return how often each word is said of ladders whose second arm breaks `shift` rungs higher."""
    rng, said = np.random.default_rng([seed, seeds, int(10 * shift)]), Counter()
    for _ in range(ladders):
        runs = [classified(r, module) for r in module.ladder(rng, seeds=seeds, shift=shift)]
        said[compare(runs, *LABELS, LABELS, RULES).shift] += 1
    return said


def aim(shift: float, seeds: int) -> float:
    """Return the least power that was asked for."""
    return 0.85 if shift == 1 and seeds >= 8 else 0.9 if shift == 2 and seeds >= 4 else 0.0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ladder", type=Path, default=LADDER)
    parser.add_argument("--ladders", type=int, default=200)
    parser.add_argument("--seeds", default="1,2,3,4,5,6,8")
    parser.add_argument("--shifts", default="0,1,2")
    parser.add_argument("--runs", type=int, default=300)
    parser.add_argument("--random-state", type=int, default=20261203)
    args = parser.parse_args()
    module = load_ladder(args.ladder)
    met = kinds(module, args.runs, args.random_state)
    print("\n| shift, rungs | seeds | ladders | moved up | moved down | not detectable | not identified |")
    print("|---|---|---|---|---|---|---|")
    for shift in map(float, args.shifts.split(",")):
        for seeds in map(int, args.seeds.split(",")):
            said = power(module, shift, seeds, args.ladders, args.random_state)
            shares = {k: said[k] / args.ladders for k in ("up", "down", "not_detectable", "not_identified")}
            print(f"| {shift:g} | {seeds} | {args.ladders} | " + " | ".join(f"{x:.3f}" for x in shares.values()) + " |")
            sys.stdout.flush()
            false = shares["down"] + (shares["up"] if shift == 0 else 0)
            met &= false <= 0.05 and shares["up"] >= aim(shift, seeds)
    print(f"\nevery aim met: {met}")
    return 0 if met else 1


if __name__ == "__main__":
    sys.exit(main())
