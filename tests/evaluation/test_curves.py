"""Classes of runs: the collapse rule by its definition, precedence, and simulated runs whose truth is known."""

import importlib.util
import math
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest

from evaluation.curves import Criterion, RunEvidence, classify, collapse_onset, pass_rates, trailing_means
from evaluation.scores import Counts, Score

RULES = Criterion()
LADDER = Path(__file__).resolve().parents[2].parent / "shared" / "simulation" / "ladder.py"


def score(plus: Sequence[int], n: int = 160, judged: Sequence[int] | None = None) -> Score:
    """Return the score of per-problem counts of passing samples."""
    counts = [(n if judged is None else judged[i], int(c)) for i, c in enumerate(plus)]
    made = {pair: Counts(n=pair[0], base=pair[1], plus=pair[1], errors=n - pair[0]) for pair in set(counts)}
    problems = {f"Mbpp/{i}": made[pair] for i, pair in enumerate(counts)}
    return Score(
        label="x",
        cell="x",
        global_step=0,
        benchmark="mbpp_plus",
        n=n,
        num_problems=len(problems),
        outcomes={"pass": 0, "fail": 0, "timeout": 0, "harness_error": 0},
        pass_at_k={"base": {}, "plus": {}},  # classes rest on the counts alone
        problems=problems,
        protocol_sha256=None,
        prompt_sha256=None,
        judge_version="j",
    )


def run(
    counts: Mapping[Any, Sequence[int]],
    rewards: Sequence[float] | None = None,
    end: Literal["finished", "diverged"] | None = "finished",
    onset: int | None = None,
    steps: int = 30,
    checkpoints: tuple[int, ...] = (10, 20, 30),
) -> RunEvidence:
    """Return evidence of a run with 16 samples a problem."""
    return RunEvidence(
        label="x",
        arm="nobuf",
        lr=1e-6,
        seed=0,
        steps=steps,
        checkpoints=checkpoints,
        rewards=tuple([0.5] * steps if rewards is None else rewards),
        end=end,
        onset_step=onset,
        scores={"mbpp_plus": {s: score(c, 16) for s, c in counts.items()}},
    )


def decide(evidence: RunEvidence, base: Sequence[int] | None = (8,) * 40) -> tuple[str, int | None]:
    found = classify(evidence, score(base, 16) if base is not None else None, "mbpp_plus", RULES)
    return found.run_class, found.onset_step


def onset_by_definition(rewards: Sequence[float]) -> int | None:
    """The first step t >= 3 from which every known mean of min(10, t) rewards is under half the maximum so far."""
    mean = {}
    for t in range(3, len(rewards) + 1):
        known = [r for r in rewards[max(t - 10, 0) : t] if math.isfinite(r)]
        if known:
            mean[t] = np.mean(known)
    low = {t: mean[t] < 0.5 * max(m for u, m in mean.items() if u <= t) for t in mean}
    starts = [t for t in mean if all(low[u] for u in mean if u >= t)]
    return min(starts, default=None) if len(rewards) >= 20 else None


def test_the_collapse_rule_is_its_definition() -> None:
    rng = np.random.default_rng(0)
    found = []
    for _ in range(400):
        length = int(rng.integers(1, 80))
        level = rng.choice([0.0, 0.02, 0.3, 0.8], size=4)
        rewards = np.repeat(level, -(-length // 4))[:length] * rng.random(length)
        rewards[rng.random(length) < rng.choice([0, 0.1, 0.7])] = np.nan
        if rng.random() < 0.3:
            rewards[-int(rng.integers(1, 15)) :] = rng.choice([np.nan, np.inf])
        expected = onset_by_definition(rewards.tolist())
        assert collapse_onset(rewards.tolist(), RULES) == expected
        found.append(expected)
    assert 60 < sum(x is not None for x in found) < 340  # both answers were tested


def test_short_runs_are_never_called_collapsed() -> None:
    fall = [0.75] * 6 + [0.0] * 14
    assert collapse_onset(fall, RULES) == 12 and collapse_onset(fall[:19], RULES) is None
    assert collapse_onset([], RULES) is None


def test_a_dip_that_recovers_is_no_collapse() -> None:
    dip = [0.75] * 20 + [0.0] * 10 + [0.75] * 10
    assert collapse_onset(dip, RULES) is None
    assert collapse_onset([*dip, *[0.0] * 10], RULES) == 46
    assert collapse_onset([0.0] * 40, RULES) is None  # a reward that never was there cannot fall


def test_nan_rewards_neither_start_nor_end_a_collapse() -> None:
    fall = [0.75] * 20 + [0.0] * 20
    onset = collapse_onset(fall, RULES)
    assert onset == 26
    assert collapse_onset(fall + [math.nan] * 15, RULES) == onset
    assert collapse_onset([0.75] * 20 + [math.nan] * 20, RULES) is None
    assert trailing_means([math.nan, 1.0, 0.0], 2)[1:] == [1.0, 0.5]
    assert math.isnan(trailing_means([math.nan], 2)[0])


def test_precedence_the_first_rule_that_holds() -> None:
    good = dict.fromkeys((10, 20, 30), (8,) * 40)
    fallen = [0.75] * 15 + [0.0] * 15
    assert decide(run(good)) == ("stable", None)
    assert decide(run(good, fallen)) == ("collapsed", 21)
    assert decide(run({10: (8,) * 40}, fallen)) == ("incomplete", None)
    assert decide(run(good, fallen, end=None)) == ("incomplete", None)
    assert decide(run(good, fallen[:12])) == ("incomplete", None)  # a log that was lost shows no collapse
    assert decide(run(good), base=None) == ("incomplete", None)
    assert decide(run(dict.fromkeys(good, (2,) * 40), fallen)) == ("collapsed", 21)
    assert decide(run(dict.fromkeys(good, (2,) * 40))) == ("degraded", 10)


def test_a_divergence_ends_what_is_expected() -> None:
    nan_end = [0.5] * 14 + [math.nan]
    evidence = run({10: (8,) * 40}, nan_end, "diverged", 15)
    assert evidence.expected == (10,)
    assert decide(evidence) == ("diverged", 15)
    assert decide(run({}, nan_end, "diverged", 15)) == ("incomplete", None)
    assert decide(run({}, [math.nan], "diverged", 1)) == ("diverged", 1)
    # A checkpoint's step is never one that diverged: the weights of that step do not exist.
    assert run({}, None, "diverged", 10).expected == ()
    assert run({}).expected == (10, 20, 30)


def test_the_last_checkpoint_is_expected_too() -> None:
    """EVAL-125: 500 steps, every 30 and at the end."""
    planned = (*range(30, 481, 30), 500)
    counts = dict.fromkeys(planned[:-1], (8,) * 40)
    evidence = run(counts, steps=500, checkpoints=planned)
    found = classify(evidence, score((8,) * 40, 16), "mbpp_plus", RULES)
    assert found.run_class == "incomplete" and "500" in found.why


def test_degraded_from_the_peak_and_below_the_base() -> None:
    risen = {10: (12,) * 40, 20: (14,) * 40, 30: (10,) * 40}
    assert decide(run(risen)) == ("degraded", 30)
    early = {10: (14,) * 40, 20: (10,) * 40, 30: (10,) * 40}
    assert decide(run(early)) == ("degraded", 20)
    # A small but certain fall is no degradation: the bound must pass two points (here 1 of 64 samples is 1.6).
    counts = dict.fromkeys((10, 20), (32,) * 200) | {30: (31,) * 200}
    evidence = RunEvidence(
        "x", "a", 1e-6, 0, 30, (10, 20, 30), (0.5,) * 30, "finished", None,
        {"mbpp_plus": {s: score(c, 64) for s, c in counts.items()}},
    )  # fmt: skip
    assert classify(evidence, score((32,) * 200, 64), "mbpp_plus", RULES).run_class == "stable"


def test_a_problem_without_judged_samples_leaves_every_checkpoint() -> None:
    full, holes = score([4, 8, 16], 16), score([4, 0, 16], 16, judged=[16, 0, 16])
    assert pass_rates([full, holes]).tolist() == [[0.25, 1.0], [0.25, 1.0]]
    nothing = {s: score([0], 16, judged=[0]) for s in (10, 20, 30)}
    evidence = run({})
    evidence.scores["mbpp_plus"].update(nothing)
    assert classify(evidence, score([8], 16), "mbpp_plus", RULES).run_class == "incomplete"


def load_ladder() -> Any:
    if not LADDER.is_file():
        pytest.skip("the simulation of known runs is not beside this repository")
    spec = importlib.util.spec_from_file_location("simulated_ladder", LADDER)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # its dataclasses look themselves up
    spec.loader.exec_module(module)
    return module


def convert(simulated: Any, checkpoints: Sequence[int]) -> tuple[RunEvidence, Score]:
    """Return the evidence a simulated run would have left, and the base's score."""
    scores = {s: score(simulated.correct[i]) for i, s in enumerate(checkpoints)}
    base = scores.pop(0)
    diverged = not simulated.finite
    onset = simulated.onset + 1 if diverged else None
    evidence = RunEvidence(
        label=f"{simulated.arm}_{simulated.lr:g}_s{simulated.seed}",
        arm=simulated.arm,
        lr=simulated.lr,
        seed=simulated.seed,
        steps=len(simulated.reward),
        checkpoints=tuple(s for s in checkpoints if s),
        rewards=tuple(float(r) for r in simulated.reward),
        end="diverged" if diverged else "finished",
        onset_step=onset,
        scores={"mbpp_plus": scores},
    )
    return evidence, base


def simulate(kind: str, count: int, seed: int, gain: float = 0.8) -> list[tuple[Any, str, int | None]]:
    """Return (truth, class, onset) of runs of one kind, a new benchmark every four runs."""
    module, rng, found = load_ladder(), np.random.default_rng(seed), []
    for index in range(count):
        if index % 4 == 0:
            ability = module.abilities(rng)
        simulated = module.run(rng, ability, kind=kind, gain=gain, seed=index)
        evidence, base = convert(simulated, module.CHECKPOINTS)
        got = classify(evidence, base, "mbpp_plus", RULES)
        found.append((simulated, got.run_class, got.onset_step))
    return found


def check(count: int, seed: int) -> None:
    """Classify `count` runs of each kind."""
    assert all(c == "stable" for _, c, _ in simulate("stable", count, seed, gain=0.0))
    assert all(c == "stable" for _, c, _ in simulate("stable", count, seed + 1))
    degraded = simulate("degraded", count, seed + 2)
    assert sum(c == "degraded" for _, c, _ in degraded) >= count * 11 / 12
    assert {c for _, c, _ in degraded} <= {"degraded", "stable"}
    for truth, found, onset in simulate("collapsed", count, seed + 3):
        assert found == "collapsed" and onset is not None and abs(onset - truth.onset) <= 20
    for truth, found, onset in simulate("diverged", count, seed + 4):
        assert (found, onset) == ("diverged", truth.onset + 1)


def test_simulated_runs_get_their_class() -> None:
    check(12, 0)


@pytest.mark.campaign
def test_many_simulated_runs_get_their_class() -> None:
    check(150, 100)


def test_a_run_is_classified_quickly() -> None:
    """The ladder has dozens of runs, and a report classifies each more than once."""
    module = load_ladder()
    rng = np.random.default_rng(0)
    evidence, base = convert(module.run(rng, module.abilities(rng)), module.CHECKPOINTS)
    classify(evidence, base, "mbpp_plus", RULES)  # the resamples are drawn once
    started = time.process_time()
    classify(evidence, base, "mbpp_plus", RULES)
    assert time.process_time() - started < 0.3
