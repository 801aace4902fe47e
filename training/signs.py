"""Signs that a run has gone wrong, read off its own log: a pure function of the rows of `steps.jsonl`.

They describe and decide nothing: a run's class is the declared criterion's (evaluation/curves.py), and a non-finite
number ends the cell by itself (`end` and `onset_step` of result.json). A collapse trains on.

A sign's onset is the first step of the first stretch of at least `window` consecutive steps that all show it. So an
onset, once found, never moves: what the log told while training and what is found at the end are the same step.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from evaluation.records import Record

WINDOW = 5
"""Steps: an epoch of `full`, in which every training problem has been drawn once, so that no draw of them explains it.
Also: at a pass rate of 3 % eight groups of eight are all alike in one step of seven, but in five running once in
17,000 times."""
ENTROPY_FLOOR = 0.02
"""Nats a token: a completion of 35 tokens then carries 0.7 nats, some two texts; the rollouts of a group are copies.
Healthy runs of the demo stay within 0.07 and 0.14; a base model on code has some tenths."""
LENGTH_FRACTION = 0.9
"""Share of the completion limit: a mean so near to it leaves no room for completions that end by themselves."""
TRUNCATED_FRACTION = 0.9
"""Share of completions cut off by the limit: whatever the others do, nine of ten cannot be programs."""

HEAD_MASS = 0.99
"""Of the sampler's probability on the tokens that score centering keeps: what is outside of them is only modelled."""

SignName = Literal["empty_reward", "constant_reward", "entropy_collapse", "length_explosion", "thin_head"]
Row = Mapping[str, Any]


class Sign(Record):
    """One thing that went wrong, and since when."""

    name: SignName
    onset_step: int
    """First step of the first sustained stretch."""
    detail: str


@dataclass(frozen=True)
class _Rule:
    name: SignName
    window: int
    shows: Callable[[Row], bool]
    words: Callable[[Sequence[Row]], str]
    """What was seen, from the rows of the stretch."""


def find_signs(rows: Sequence[Row], max_new_tokens: int) -> tuple[Sign, ...]:
    """Return every sign in the rows of a `steps.jsonl`, each once, ordered by onset.

    Args:
        rows: one a step, ascending; non-finite numbers are strings, as in the file.
        max_new_tokens: the completion limit of the cell.
    """
    found = [sign for rule in _rules(max_new_tokens) if (sign := _find(rule, rows))]
    return tuple(sorted(found, key=lambda s: s.onset_step))


def varied_groups(rewards: Sequence[float], group: int) -> float:
    """Return the share of groups (adjacent, `group` rewards each) whose rewards differ: only these have advantages."""
    starts = range(0, len(rewards), group)
    return sum(len(set(rewards[i : i + group])) > 1 for i in starts) / len(starts)


def _rules(max_new_tokens: int) -> tuple[_Rule, ...]:
    limit = LENGTH_FRACTION * max_new_tokens

    def long(row: Row) -> bool:
        return _number(row, "mean_tokens") >= limit or _number(row, "truncated_fraction") >= TRUNCATED_FRACTION

    return (
        # One step is enough: a step without a judged rollout does not happen to a healthy run.
        _Rule("empty_reward", 1, lambda r: not math.isfinite(_number(r, "reward")), lambda _: "no rollout was judged"),
        _Rule("constant_reward", WINDOW, _constant, _constant_words),
        _Rule(
            "entropy_collapse",
            WINDOW,
            lambda r: _number(r, "entropy") < ENTROPY_FLOOR,
            lambda rs: f"at most {max(_number(r, 'entropy') for r in rs):.2g} nats a token",
        ),
        _Rule(
            "length_explosion",
            WINDOW,
            long,
            lambda rs: (
                f"{_mean(rs, 'mean_tokens'):.0f} of {max_new_tokens} tokens, {_mean(rs, 'truncated_fraction'):.0%} cut"
            ),
        ),
        # A declared threshold, not an estimate: one step below it is enough.
        _Rule(
            "thin_head",
            1,
            lambda r: _head_mass(r) < HEAD_MASS,
            lambda rs: f"the kept tokens have {min(map(_head_mass, rs)):.4f} of the sampler's probability",
        ),
    )


def _find(rule: _Rule, rows: Sequence[Row]) -> Sign | None:
    """Return the rule's first sustained stretch as a sign; a step that is not in the log ends a stretch."""
    stretch: list[Row] = []
    for row in rows:
        goes_on = not stretch or row["global_step"] == stretch[-1]["global_step"] + 1
        if rule.shows(row) and goes_on:
            stretch.append(row)
            continue
        if len(stretch) >= rule.window:
            break
        stretch = [row] if rule.shows(row) else []
    if len(stretch) < rule.window:
        return None
    first, last = stretch[0]["global_step"], stretch[-1]["global_step"]
    until = "the last" if stretch[-1] is rows[-1] else f"step {last}"
    return Sign(name=rule.name, onset_step=first, detail=f"{rule.words(stretch)}, from step {first} to {until}")


def _constant(row: Row) -> bool:
    """Whether no group of the step had an advantage; logs without that figure show it where all rewards are alike."""
    varied = _number(row, "varied_groups")
    return varied == 0 if math.isfinite(varied) else _number(row, "reward") in {0.0, 1.0}


def _constant_words(stretch: Sequence[Row]) -> str:
    seen = {_number(row, "reward") for row in stretch}
    return f"every reward is {seen.pop():g}" if seen in ({0.0}, {1.0}) else "every group's rewards are alike"


def _head_mass(row: Row) -> float:
    """Return the mean mass of the sampler's head; NaN where none was kept."""
    return _number(row.get("sampler") or {}, "head_mass")


def _mean(rows: Sequence[Row], key: str) -> float:
    return sum(_number(row, key) for row in rows) / len(rows)


def _number(row: Row, key: str) -> float:
    """Return a figure of a row; NaN where it is missing, null or not finite in the file's words."""
    value = row.get(key)
    return float(value) if isinstance(value, int | float | str) else math.nan
