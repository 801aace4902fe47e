"""Choosing a token: exact distributions, exact nuclei, seeds that mean one row, and no number from nothing."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from scipy.stats import chi2

from evaluation.generation import NonFiniteLogits, choose, row_seed, uniforms


def drawn(logits: torch.Tensor, count: int, temperature: float, top_p: float) -> torch.Tensor:
    """Draw many tokens from one row of logits, with evenly spread noise: frequencies are exact to 1 / count."""
    noise = (torch.arange(count, dtype=torch.float64) + 0.5) / count
    return choose(logits.expand(count, -1), noise, temperature, top_p)[0]


def nucleus(probs: np.ndarray, top_p: float) -> np.ndarray:
    """The definition: the likeliest tokens, until their mass reaches top_p; renormalised."""
    kept, mass = np.zeros_like(probs), 0.0
    for i in np.argsort(-probs, kind="stable"):
        if mass >= top_p:
            break
        kept[i] = probs[i]
        mass += probs[i]
    return kept / kept.sum()


@pytest.mark.parametrize("temperature", [0.3, 1.0, 2.0])
@pytest.mark.parametrize("top_p", [0.05, 0.5, 0.95, 1.0])
@pytest.mark.parametrize(("size", "spread"), [(5, 1.0), (200, 3.0), (200, 0.1)])
def test_frequencies_are_those_of_the_truncated_distribution(
    temperature: float, top_p: float, size: int, spread: float
) -> None:
    """The spreads make nuclei that fit the first head, the second, and neither."""
    logits = torch.randn(size, generator=torch.Generator().manual_seed(1)) * spread
    probs = torch.softmax(logits.double() / temperature, -1).numpy()
    wanted = nucleus(probs, top_p)
    count = 20_000
    found = np.bincount(drawn(logits, count, temperature, top_p).numpy(), minlength=size) / count
    assert np.abs(found - wanted).max() < 2 / count + 1e-5
    assert found[wanted == 0].sum() == 0


def test_real_seeds_draw_the_distribution_too() -> None:
    logits = torch.tensor([0.0, 1.0, 2.0, -1.0])
    probs = torch.softmax(logits, -1).numpy()
    seeds = [row_seed(0, "eval", f"Toy/{i // 8}", i % 8) for i in range(4000)]
    noise = torch.from_numpy(uniforms(seeds, 3))
    for t in range(3):
        ids, *_ = choose(logits.expand(4000, -1), noise[:, t], 1.0, 1.0)
        counts = np.bincount(ids.numpy(), minlength=4)
        assert ((counts - 4000 * probs) ** 2 / (4000 * probs)).sum() < chi2.ppf(1 - 1e-4, 3)
    assert abs(np.corrcoef(noise.numpy().T)[0, 1]) < 0.06


@pytest.mark.parametrize("top_p", [0.9, 1.0])
def test_a_token_without_mass_is_never_drawn(top_p: float) -> None:
    """Neither at the start of the CDF (noise 0) nor past its end (the largest noise there is)."""
    logits = torch.tensor([[-200.0, 1.0, 1.0, -200.0]]).expand(2, -1)
    noise = torch.tensor([0.0, (1 - 2.0**-53) * (1 - 2.0**-50)], dtype=torch.float64)
    ids, *_ = choose(logits, noise, 1.0, top_p)
    assert set(ids.tolist()) <= {1, 2}


def test_log_probs_and_entropy_are_of_the_untruncated_distribution() -> None:
    logits = torch.tensor([[2.0, 0.0, -1.0]])
    exact = torch.log_softmax(logits.double() / 0.7, -1)[0]
    ids, logprobs, entropies, *_ = choose(logits, torch.tensor([0.99], dtype=torch.float64), 0.7, 0.5)
    assert ids.tolist() == [0]
    assert logprobs.item() == pytest.approx(exact[0].item(), abs=1e-6)
    assert entropies.item() == pytest.approx(-(exact.exp() * exact).sum().item(), abs=1e-6)


def test_temperature_zero_takes_the_likeliest_whatever_the_noise() -> None:
    logits = torch.tensor([[0.0, 3.0, 1.0], [5.0, 3.0, 1.0]])
    ids, logprobs, *_ = choose(logits, torch.tensor([0.9999, 0.0], dtype=torch.float64), 0.0, 0.3)
    assert ids.tolist() == [1, 0]
    assert logprobs.tolist() == pytest.approx(torch.log_softmax(logits, -1).amax(-1).tolist())


@pytest.mark.parametrize("temperature", [0.0, 0.6, 1.0])
@pytest.mark.parametrize("top_p", [0.95, 1.0])
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("place", [0, 6])
def test_logits_that_are_not_finite_are_refused(temperature: float, top_p: float, bad: float, place: int) -> None:
    logits = torch.zeros(3, 7)
    logits[1, place] = bad
    with pytest.raises(NonFiniteLogits):
        choose(logits, torch.full((3,), 0.5, dtype=torch.float64), temperature, top_p)


def test_a_temperature_too_small_for_the_logits_is_refused_not_filled() -> None:
    with pytest.raises(NonFiniteLogits):
        choose(torch.tensor([[1.0, 2.0]]), torch.tensor([0.5], dtype=torch.float64), 1e-39, 1.0)


@given(st.lists(st.integers(0, 2**64 - 1), min_size=1, max_size=6), st.integers(0, 40))
def test_uniforms_are_a_function_of_the_row_s_own_seed(seeds: list[int], count: int) -> None:
    together = uniforms(seeds, count)
    assert together.shape == (len(seeds), count)
    for row, seed in zip(together, seeds, strict=True):
        assert (row == uniforms([seed], count)[0]).all()
        assert (uniforms([seed], count + 5)[0, :count] == row).all()  # longer answers begin alike
    assert ((together >= 0) & (together < 1)).all()


def test_row_seeds_are_known_numbers() -> None:
    """Stored samples were drawn with them: another formula would draw others under the same protocol."""
    seed = row_seed(0, "eval", "Toy/1", 0)
    assert seed == 0x779DD65C2BDF6965
    assert uniforms([seed], 2)[0].tolist() == pytest.approx([0.5261142281711411, 0.522803290493471], abs=1e-14)


def test_row_seeds_differ_in_every_part() -> None:
    seeds = {
        row_seed(seed, purpose, problem, index)
        for seed in range(3)
        for purpose in ("eval", "step 1", "step 11")
        for problem in ("Toy/1", "Toy/11", "Mbpp/1")
        for index in range(12)
    }
    assert len(seeds) == 3 * 3 * 3 * 12
