"""Signs are a pure function of the rows: each by hand, and the onset against the definition, written out again."""

import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from training.signs import ENTROPY_FLOOR, WINDOW, Sign, find_signs, varied_groups

LIMIT = 100
HEALTHY = {"reward": 0.4, "entropy": 0.1, "mean_tokens": 30.0, "truncated_fraction": 0.0, "varied_groups": 0.5}
FLAT = {"reward": 0.0, "varied_groups": 0.0}


def rows(*changes: dict[str, Any]) -> list[dict[str, Any]]:
    return [{"global_step": i, **HEALTHY, **change} for i, change in enumerate(changes, start=1)]


def names(found: tuple[Sign, ...]) -> dict[str, int]:
    return {s.name: s.onset_step for s in found}


def test_a_healthy_run_and_an_empty_log_show_nothing() -> None:
    assert find_signs([], LIMIT) == ()
    assert find_signs(rows(*[{}] * 40), LIMIT) == ()


@pytest.mark.parametrize(
    ("change", "name", "words"),
    [
        (FLAT, "constant_reward", "every reward is 0, from step 3"),
        ({"reward": 1.0, "varied_groups": 0.0}, "constant_reward", "every reward is 1, from step 3"),
        ({"reward": 0.5, "varied_groups": 0.0}, "constant_reward", "every group's rewards are alike, from step 3"),
        ({"entropy": 0.0}, "entropy_collapse", "at most 0 nats a token, from step 3"),
        ({"entropy": 0.0199}, "entropy_collapse", "at most 0.02 nats a token, from step 3"),
        ({"mean_tokens": 90.0}, "length_explosion", "90 of 100 tokens, 0% cut, from step 3"),
        ({"truncated_fraction": 0.9}, "length_explosion", "30 of 100 tokens, 90% cut, from step 3"),
    ],
)
def test_each_sign_starts_with_the_first_step_of_its_window(change: dict[str, float], name: str, words: str) -> None:
    (found,) = find_signs(rows({}, {}, *[change] * WINDOW), LIMIT)
    assert (found.name, found.onset_step, found.detail) == (name, 3, f"{words} to the last")
    assert find_signs(rows({}, {}, *[change] * (WINDOW - 1), {}, *[change] * (WINDOW - 1)), LIMIT) == ()
    (passed,) = find_signs(rows({}, {}, *[change] * (WINDOW + 1), {}, {}), LIMIT)
    assert (passed.onset_step, passed.detail) == (3, f"{words} to step {2 + WINDOW + 1}")


@pytest.mark.parametrize("change", [{"entropy": ENTROPY_FLOOR}, {"mean_tokens": 89.9}, {"truncated_fraction": 0.89}])
def test_what_is_near_a_threshold_is_no_sign(change: dict[str, float]) -> None:
    assert find_signs(rows(*[change] * 20), LIMIT) == ()


@pytest.mark.parametrize("reward", ["NaN", "Infinity", None])
def test_one_step_without_a_judged_rollout_is_enough(reward: object) -> None:
    nothing = dict.fromkeys(HEALTHY, "NaN") | {"reward": reward}
    (found,) = find_signs(rows({}, nothing), LIMIT)
    assert (found.name, found.onset_step) == ("empty_reward", 2)


def test_signs_come_in_the_order_of_their_onset() -> None:
    changes = [{}, *[{"entropy": 0.0}] * 2, *[{"entropy": 0.0, **FLAT}] * 8]
    assert list(names(find_signs(rows(*changes), LIMIT)).items()) == [("entropy_collapse", 2), ("constant_reward", 4)]


def test_logs_written_before_groups_were_counted_are_read_by_their_mean() -> None:
    old = [{k: v for k, v in row.items() if k != "varied_groups"} for row in rows(*[{"reward": 0.0}] * WINDOW)]
    assert names(find_signs(old, LIMIT)) == {"constant_reward": 1}
    assert find_signs([{**row, "reward": 0.5} for row in old], LIMIT) == ()


def test_a_step_that_is_not_in_the_log_ends_a_stretch() -> None:
    found = rows(*[FLAT] * (2 * WINDOW))
    assert names(find_signs([r for r in found if r["global_step"] != 3], LIMIT)) == {"constant_reward": 4}


@given(st.lists(st.tuples(*[st.booleans()] * 3), max_size=24))
def test_the_onset_is_that_of_the_definition_and_never_moves(shown: list[tuple[bool, bool, bool]]) -> None:
    changes = ({"reward": 0.0, "varied_groups": 0.0}, {"entropy": 0.0}, {"mean_tokens": 100.0})
    log = rows(*[{k: v for on, c in zip(step, changes, strict=True) if on for k, v in c.items()} for step in shown])
    told: dict[str, int] = {}
    for last in range(len(log) + 1):  # as the log grows, step by step
        expected = {}
        for i, name in enumerate(("constant_reward", "entropy_collapse", "length_explosion")):
            starts = (s for s in range(last - WINDOW + 1) if all(shown[t][i] for t in range(s, s + WINDOW)))
            if (first := next(starts, None)) is not None:
                expected[name] = first + 1
        found = names(find_signs(log[:last], LIMIT))
        assert found == expected
        assert told.items() <= found.items()
        told = found


def test_groups_are_counted_as_they_lie() -> None:
    assert varied_groups([0, 0, 1, 1], 2) == 0
    assert varied_groups([0, 1, 1, 1], 2) == 0.5
    assert varied_groups([0, 1, 1, 0], 2) == 1
    assert math.isclose(varied_groups([0, 0, 1, 0, 1, 1], 3), 1.0)
