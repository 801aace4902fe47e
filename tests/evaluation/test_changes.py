"""Forgetting and paired differences, counted by hand."""

import pytest

from evaluation.changes import Forgetting, forgetting, paired_difference
from evaluation.scores import Counts, Score


def score(passing: dict[str, int], n: int = 4, errors: dict[str, int] | None = None) -> Score:
    lost = errors or {}
    problems = {p: Counts(n=n - lost.get(p, 0), base=c, plus=None, errors=lost.get(p, 0)) for p, c in passing.items()}
    return Score(
        label="x", cell=None, global_step=0, benchmark="b", n=n, num_problems=len(problems),
        outcomes={"pass": 0, "fail": 0, "timeout": 0, "harness_error": sum(lost.values())},
        pass_at_k={"base": {}, "plus": None}, problems=problems,
        protocol_sha256=None, prompt_sha256=None, judge_version="j",
    )  # fmt: skip


def test_forgetting_by_hand() -> None:
    base = score({"a": 4, "b": 2, "c": 3, "d": 1, "e": 0, "f": 4})
    later = score({"a": 2, "b": 1, "c": 0, "d": 2, "e": 1, "f": 0}, errors={"f": 4})
    # f has no judged sample later: it is not lost, it is not known.
    assert forgetting(base, later) == Forgetting(retained=1, lost=2, gained=1, neither=1)
    assert forgetting(base, base) == Forgetting(retained=4, lost=0, gained=0, neither=2)


def test_a_difference_is_paired() -> None:
    first = score({f"{i}": i % 4 for i in range(40)})
    second = score({f"{i}": i % 4 + 1 for i in range(40)})
    found = paired_difference(first, second)
    assert found is not None and (found.value, found.low, found.high) == (0.25, 0.25, 0.25)
    assert (found.num_problems, found.p) == (40, None)
    back = paired_difference(second, first)
    assert back is not None and back.value == -0.25


def test_greedy_scores_get_mcnemar() -> None:
    first = score({f"{i}": 1 for i in range(8)}, n=1)
    second = score({f"{i}": int(i > 5) for i in range(8)}, n=1)
    found = paired_difference(first, second)
    assert found is not None and found.p == pytest.approx(2 / 64)


def test_nothing_shared_is_no_difference() -> None:
    assert paired_difference(score({"a": 1}), score({"b": 1})) is None
    assert paired_difference(score({"a": 0}, errors={"a": 4}), score({"a": 1})) is None
