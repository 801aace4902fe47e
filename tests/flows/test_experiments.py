"""The registered experiments say what the specification says."""

import pytest
from pydantic import ValidationError

from evaluation.errors import InputError
from evaluation.problems import BENCHMARKS
from flows.experiments import EXPERIMENTS
from flows.experiments.score_centering import SCORE_CENTERING, SCORE_CENTERING_CONTROLS, SCORE_CENTERING_SMOKE
from flows.parameters import Parameters
from training.arms import ARMS
from training.cell import CellName
from training.experiment import Experiment

FULL, LADDER, SMOKE = EXPERIMENTS["full"], EXPERIMENTS["ladder"], EXPERIMENTS["smoke"]


def test_the_registered_experiments() -> None:
    assert {"full", "ladder", "smoke", "micro", "smol"} <= set(EXPERIMENTS)
    assert all(name == e.name for name, e in EXPERIMENTS.items())


@pytest.mark.parametrize("name", EXPERIMENTS)
def test_every_experiment_survives_its_own_json_and_its_protocols_fit_its_problems(name: str) -> None:
    spec = EXPERIMENTS[name]
    assert Experiment.model_validate_json(spec.model_dump_json()).sha256 == spec.sha256
    for protocol in spec.protocols:
        assert BENCHMARKS[protocol.benchmark].training == spec.benchmark
        assert protocol.prompt == f"{spec.benchmark}/1"


@pytest.mark.parametrize("name", EXPERIMENTS)
def test_cell_names_are_distinct_and_give_back_their_cells(name: str) -> None:
    cells = EXPERIMENTS[name].cells(num_seeds=3)
    assert len({c.name for c in cells}) == len(cells)
    for cell in cells:
        found = CellName.parse(cell.name)
        assert (found.model, found.benchmark, found.arm, found.lr, found.seed) == (
            cell.model,
            cell.benchmark,
            cell.arm,
            cell.lr,
            cell.seed,
        )


def test_full_is_three_rates_in_two_arms_of_the_spec() -> None:
    cells = FULL.cells()
    assert {c.name for c in cells} == {
        f"qwen3_1p7b_base_mbpp_{arm}_{lr}" for arm in ("nobuf", "hardcd_lam0p1") for lr in ("lr6e7", "lr3e6", "lr6e6")
    }
    for cell in cells:
        assert (cell.steps, cell.stride, len(cell.checkpoints)) == (500, 30, 17)
        assert cell.epochs(FULL.num_training_problems) == 100
        assert (cell.grpo.prompts_per_step, cell.grpo.rollouts_per_prompt, cell.grpo.max_new_tokens) == (64, 8, 3072)
        assert (cell.grpo.temperature, cell.grpo.top_p, cell.grpo.beta) == (1.0, 1.0, 0.0)
        for term in cell.terms:
            assert (term.rule, term.weight, term.draws, term.cooldown, term.max_age, term.max_reuse) == (
                "hard_cooldown",
                0.1,
                128,
                5,
                100,
                8,
            )
    assert [p.benchmark for p in FULL.protocols] == ["mbpp_plus", "mbpp_test276"]
    assert all((p.n, p.temperature, p.top_p, p.max_new_tokens) == (160, 0.6, 0.95, 3072) for p in FULL.protocols)


def test_cells_of_an_experiment_differ_in_arm_rate_and_seed_alone() -> None:
    varied = {"arm", "terms", "mismatch", "lr", "seed"}
    for spec in EXPERIMENTS.values():
        assert len({c.model_dump_json(exclude=varied) for c in spec.cells(num_seeds=2)}) == 1


def test_ladder_is_seven_rates_in_numeric_order_two_arms_four_seeds() -> None:
    """REPORT-128: text sorting gives 1e-6, 3e-6, 6e-6, 6e-7."""
    cells = LADDER.cells()
    assert len(cells) == 7 * 2 * 4
    assert list(dict.fromkeys(c.lr for c in cells)) == [6e-7, 1e-6, 3e-6, 6e-6, 1e-5, 1e-4, 1e-3]
    assert {c.seed for c in cells} == {0, 1, 2, 3}


def test_score_centering_is_the_document_s_four_runs() -> None:
    """Spec B; and the arms of a pair differ by the term alone, whatever their sampler."""
    spec = SCORE_CENTERING
    cells = spec.cells()
    assert [c.name for c in cells] == [
        "qwen35_0p8b_gsm8k_plain_lr1e4",
        "qwen35_0p8b_gsm8k_center_lr1e4",
        "qwen35_0p8b_gsm8k_plain_lr1e4_s1",
        "qwen35_0p8b_gsm8k_center_lr1e4_s1",
    ]
    assert cells[0].epochs(spec.num_training_problems) == 1 and cells[0].checkpoints == tuple(range(10, 101, 10))
    g = cells[0].grpo
    assert (g.prompts_per_step, g.rollouts_per_prompt, g.max_new_tokens, cells[0].lora_rank) == (32, 8, 512, 32)
    assert (g.scale_rewards, g.importance, cells[1].center and cells[1].center.top_k) == ("none", "one", 32)
    protocol = spec.protocols[0]
    assert (protocol.benchmark, protocol.num_problems, protocol.n, protocol.temperature) == ("gsm8k", 500, 1, 0)
    assert (spec.criterion.rule, spec.budget_minutes) == ("drop", 120) and "w = 1" in spec.departures[0]
    for e in (SCORE_CENTERING, SCORE_CENTERING_CONTROLS, SCORE_CENTERING_SMOKE):
        for plain, treated in e.pairs:
            assert ARMS[plain].terms == () and [t.kind for t in ARMS[treated].terms] == ["center"]
            assert ARMS[plain].mismatch == ARMS[treated].mismatch
    assert SCORE_CENTERING_SMOKE.pairs[0] == ("plain", "center") and len(SCORE_CENTERING_SMOKE.pairs) == 2
    with pytest.raises(ValueError, match="even number"):
        SCORE_CENTERING_SMOKE.replace(arms=("plain", "center", "plain_int8"))


def test_later_fields_leave_registered_hashes_alone() -> None:
    assert {"budget_minutes", "departures", "lora_rank"}.isdisjoint(SMOKE.model_dump())
    assert SCORE_CENTERING.model_dump()["budget_minutes"] == 120


def test_smoke_and_micro_are_the_demo_s_sizes() -> None:
    assert [c.lr for c in SMOKE.cells()][::2] == [3e-4, 1e-3, 2e-3, 3e-3]
    assert {(c.steps, c.stride, c.checkpoints) for c in SMOKE.cells()} == {(40, 20, (20, 40))}
    assert {t.draws for c in SMOKE.cells() for t in c.terms} == {16}
    micro = EXPERIMENTS["micro"].cells()
    assert len(micro) == 2 and {c.checkpoints for c in micro} == {(2, 4)}


def test_another_model_and_fewer_cells() -> None:
    names = [c.name for c in FULL.cells(model="q25_3b")]
    assert all(n.startswith("q25_3b_mbpp_") for n in names)
    some = [names[3], names[0], names[3]]
    assert [c.name for c in FULL.cells("q25_3b", None, some)] == [names[3], names[0]]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"arms": ("nobuf", "nobuf")}, "planned twice"),
        ({"lrs": (1e-6, 1e-6)}, "planned twice"),
        ({"lrs": (0.0,)}, "lr"),
        ({"arms": ("other",)}, "arm=other"),
        ({"model": "toy"}, "model=toy"),
        ({"model": "gpt"}, "gpt"),
        ({"stride": 0}, "stride"),
        ({"steps": 10}, "stride=30"),
        ({"num_seeds": 0}, "num_seeds"),
        ({"protocols": ()}, "protocols"),
        ({"num_training_problems": 0}, "num_training_problems"),
        ({"replay_draws": 0}, "draws"),
    ],
)
def test_impossible_experiments_are_refused_when_built(change: dict[str, object], message: str) -> None:
    with pytest.raises((ValidationError, InputError), match=message):
        FULL.replace(**change)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"experiment": "nope"}, "use one of .*full, ladder"),
        ({"experiment": "full", "model": "gpt"}, "unknown model"),
        ({"experiment": "full", "seeds": 0}, "greater than or equal to 1"),
        ({"experiment": "full", "cells": ("toy_toy_nobuf_lr3e4",)}, "not a cell of full"),
        ({"experiment": "full", "max_parallel_cells": 0}, "greater than or equal to 1"),
        ({"experiment": "full", "steps": 3}, "Extra inputs"),
    ],
)
def test_parameters_are_refused_before_anything_starts(change: dict[str, object], message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        Parameters.model_validate(change)
