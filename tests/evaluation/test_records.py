"""Records are closed, frozen and hash by one canonical text."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from evaluation.records import Outcome, Problem, Sample, Verdict, canonical_json, sha256_json

PLAIN = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=12,
)


def verdict(base: Outcome, plus: Outcome | None) -> Verdict:
    return Verdict(problem_id="Mbpp/2", base=base, plus=plus, tests_passed=0, tests_total=0, seconds=0.0)


@given(PLAIN)
def test_canonical_json_reads_back_and_does_not_depend_on_key_order(value: object) -> None:
    text = canonical_json(value)
    assert json.loads(text) == value
    if isinstance(value, dict):
        assert canonical_json(dict(reversed(value.items()))) == text


@pytest.mark.parametrize("number", [float("nan"), float("inf"), float("-inf")])
def test_non_finite_numbers_have_no_canonical_json(number: float) -> None:
    with pytest.raises(ValueError):
        canonical_json({"x": number})


def test_sha256_json_is_that_of_the_text() -> None:
    # printf '{"a":[1,2],"b":null}' | sha256sum
    assert sha256_json({"b": None, "a": [1, 2]}) == "f25109c4111335e4a32d49373585e7a788ff5b10e70023f7004b170e7f84716a"


def test_unknown_keys_and_assignment_are_refused() -> None:
    sample = Sample(task_id="Mbpp/2", index=0, completion="", solution="", finish_reason="stop", num_tokens=1)
    with pytest.raises(ValidationError):
        Sample(**sample.model_dump(), temperature=1)
    with pytest.raises(ValidationError):
        sample.index = 1  # type: ignore[misc]


def test_replace_checks_the_new_value() -> None:
    sample = Sample(task_id="Mbpp/2", index=0, completion="", solution="", finish_reason="stop", num_tokens=1)
    assert sample.replace(index=3).index == 3
    with pytest.raises(ValidationError):
        sample.replace(index="three")
    with pytest.raises(ValidationError):
        sample.replace(unknown=1)


@pytest.mark.parametrize("problem_id", ["Mbpp/17", "Toy/17", "a/b/17"])
def test_problem_number_is_the_last_part(problem_id: str) -> None:
    problem = Problem(problem_id=problem_id, text="", entry_point="f", reference="", asserts=())
    assert problem.number == 17


@pytest.mark.parametrize("base", Outcome)
@pytest.mark.parametrize("plus", [None, *Outcome])
def test_passed_needs_every_suite_and_a_harness_error_is_not_a_wrong_answer(
    base: Outcome, plus: Outcome | None
) -> None:
    found = verdict(base, plus)
    assert found.passed == (base == "pass" and plus in (None, "pass"))
    assert found.errored == ("harness_error" in (base, plus))
    assert not (found.passed and found.errored)
