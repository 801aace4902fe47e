"""The protocol's identity, its k's, and the combinations that make no sense."""

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from evaluation.protocol import Protocol

BASE = Protocol(benchmark="mbpp_plus", n=160, temperature=0.6, top_p=0.95, max_new_tokens=3072)


def test_the_spec_s_protocol_reports_powers_of_two_and_n() -> None:
    assert BASE.reported_ks == (1, 2, 4, 8, 16, 32, 64, 128, 160)


@given(st.integers(1, 5000))
def test_reported_k_begin_at_one_and_end_at_n(n: int) -> None:
    ks = BASE.replace(n=n).reported_ks
    assert ks[0] == 1 and ks[-1] == n and list(ks) == sorted(set(ks))
    assert all(b <= 2 * a for a, b in pairwise(ks))


@pytest.mark.parametrize("k", [0, -1, 9])
def test_k_outside_of_one_to_n_is_refused_with_the_reason(k: int) -> None:
    with pytest.raises(ValidationError, match=rf"pass@{k} needs 1 <= k <= n=8"):
        BASE.replace(n=8, ks=(1, k))


@pytest.mark.parametrize(
    "change",
    [{"n": 0}, {"temperature": -0.1}, {"top_p": 0}, {"top_p": 1.1}, {"max_new_tokens": 0}, {"temperature": 0}],
)
def test_impossible_protocols_are_refused(change: dict[str, float]) -> None:
    with pytest.raises(ValidationError):
        BASE.replace(**change)


@pytest.mark.parametrize("field", ["temperature", "top_p"])
@pytest.mark.parametrize("number", [float("nan"), float("inf")])
def test_non_finite_sampling_is_refused(field: str, number: float) -> None:
    with pytest.raises(ValidationError):
        BASE.replace(**{field: number})


@pytest.mark.parametrize("number", [0, -5])
def test_scoring_no_problem_at_all_is_refused(number: int) -> None:
    with pytest.raises(ValidationError):
        BASE.replace(num_problems=number)


@pytest.mark.parametrize(
    "change",
    [
        {"benchmark": "mbpp_test276"},
        {"n": 8},
        {"temperature": 0.7},
        {"top_p": 1.0},
        {"max_new_tokens": 64},
        {"prompt": "toy/1"},
        {"seed": 1},
        {"ks": (1,)},
        {"num_problems": 40},
    ],
)
def test_every_field_is_part_of_the_identity(change: dict[str, object]) -> None:
    assert BASE.replace(**change).sha256 != BASE.sha256


def test_the_folder_is_benchmark_and_eight_digits_and_stays_what_it_was() -> None:
    assert BASE.folder == f"mbpp_plus-{BASE.sha256[:8]}"
    # Published score folders carry this name: a change here orphans every one of them.
    assert BASE.sha256[:8] == "8d08b751"


@pytest.mark.parametrize(
    ("changes", "held"),
    [
        ({}, True),
        ({"ks": (1, 10)}, True),
        ({"n": 80}, True),
        ({"n": 161}, False),
        ({"num_problems": 5}, True),
        ({"temperature": 0.7}, False),
        ({"top_p": 1.0}, False),
        ({"max_new_tokens": 3071}, False),
        ({"prompt": "toy/1"}, False),
        ({"seed": 1}, False),
        ({"benchmark": "mbpp_test276"}, False),
    ],
)
def test_samples_hold_those_of_a_protocol_that_draws_the_same_or_fewer(changes, held) -> None:
    assert BASE.holds(BASE.replace(**changes)) is held


@pytest.mark.parametrize(("mine", "other", "held"), [(5, 5, True), (5, 4, True), (5, 6, False), (5, None, False)])
def test_samples_of_the_first_problems_hold_no_others(mine, other, held) -> None:
    assert BASE.replace(num_problems=mine).holds(BASE.replace(num_problems=other)) is held
