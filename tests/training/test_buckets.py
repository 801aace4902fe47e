"""Micro-batches of like length: every row once, no more memory, and the least padding that a cut can have."""

import itertools
from typing import Any

import numpy as np
import pytest
import torch

from training.buckets import arrange, cut, filled_up, trim


def step_of(prompts: list[int], completions: list[int], micro: int, zero: tuple[int, ...] = ()) -> list[dict[str, Any]]:
    """Return a step's micro-batches as TRL splits them: all padded to the step's longest, rows numbered from 1."""
    count, p, c = len(prompts), max(prompts), max(completions)
    ids = torch.arange(1, count + 1)
    rows = {
        "prompt_mask": torch.stack([torch.arange(p) >= p - n for n in prompts]).long(),
        "completion_mask": torch.stack([torch.arange(c) < n for n in completions]).long(),
        "advantages": torch.tensor([0.0 if i in zero else 1.0 for i in range(count)]),
    }
    rows["prompt_ids"] = rows["prompt_mask"] * ids[:, None]
    rows["completion_ids"] = rows["completion_mask"] * ids[:, None]
    rows["old_per_token_logps"] = rows["completion_ids"] / 8
    scalar = {"num_items_in_batch": torch.tensor(float(sum(completions)))}
    return [{k: v[i : i + micro] for k, v in rows.items()} | scalar for i in range(0, count, micro)]


def area(batches: list[dict[str, Any]]) -> int:
    """Return the positions that a forward pass covers, the rows that stand in for an empty micro-batch left out."""
    return sum(b["prompt_ids"].numel() + b["completion_ids"].numel() for b in batches if b["advantages"].any())


def rows_of(batches: list[dict[str, Any]]) -> list[int]:
    return sorted(int(r) for b in batches for r, a in zip(b["completion_ids"][:, 0], b["advantages"], strict=True) if a)


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("micro", [1, 2, 3, 4, 6, 12, 24])
def test_every_row_comes_once_whole_and_no_micro_batch_grows(seed: int, micro: int) -> None:
    rng = np.random.default_rng(seed)
    prompts, completions = rng.integers(1, 9, 24).tolist(), (rng.pareto(1.0, 24) * 4 + 1).astype(int).tolist()
    zero = tuple(np.flatnonzero(rng.random(24) < 0.3).tolist())
    window = step_of(prompts, completions, micro, zero)
    found = arrange(window, drop_zero=True, bucket=True)
    assert len(found) == len(window)
    assert rows_of(found) == [i + 1 for i in range(24) if i not in zero]
    assert all(area([b]) <= micro * (max(prompts) + max(completions)) for b in found)
    assert area(found) <= area([trim(b) for b in arrange(window, drop_zero=True, bucket=False)])
    for batch in found:
        assert batch["num_items_in_batch"] == sum(completions)
        for row, advantage in enumerate(batch["advantages"]):
            number = int(batch["completion_ids"][row, 0])
            assert int(batch["completion_mask"][row].sum()) == completions[number - 1]
            assert int(batch["prompt_mask"][row].sum()) == prompts[number - 1]
            assert bool((batch["prompt_ids"][row] == batch["prompt_mask"][row] * number).all())
            assert torch.equal(batch["old_per_token_logps"][row], batch["completion_ids"][row] / 8)
            assert not advantage or number - 1 not in zero


def test_one_runaway_is_paid_for_once() -> None:
    window = step_of([4] * 32, [*[10] * 31, 1000], 8)
    found = arrange(window, drop_zero=False, bucket=True)
    assert area(window) == 32 * 1004
    assert area(found) == 31 * 14 + 1004


def test_with_neither_option_rows_keep_their_order() -> None:
    window = step_of([3, 1, 2, 1], [5, 2, 9, 2], 2)
    found = arrange(window, drop_zero=False, bucket=False)
    assert [b["completion_ids"][:, 0].tolist() for b in found] == [[1, 2], [3, 4]]


@pytest.mark.parametrize("bucket", [True, False])
def test_a_step_without_advantage_keeps_one_row_a_micro_batch(bucket: bool) -> None:
    window = step_of([3, 1, 2, 1], [5, 2, 9, 2], 2, zero=(0, 1, 2, 3))
    found = arrange(window, drop_zero=True, bucket=bucket)
    assert [len(b["advantages"]) for b in found] == [1, 1]
    assert all(b["completion_ids"].shape == (1, 2) and not b["advantages"].any() for b in found)


@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize("count", [1, 2, 3, 5, 9])
def test_the_cut_is_the_best_of_all(seed: int, count: int) -> None:
    rng = np.random.default_rng(seed)
    n = 7
    lengths = np.sort(rng.integers(1, 50, n))
    table = np.array(
        [[max(0, j - i) * (lengths[i:j].max() if j > i else 0) for j in range(n + 1)] for i in range(n + 1)]
    )
    limit = int(-(-n // count) * lengths.max())

    def covered(inner: tuple[int, ...]) -> float:
        parts = list(itertools.pairwise((0, *inner, n)))
        sizes = [table[a, b] for a, b in parts]
        return sum(sizes) if max(sizes) <= limit else np.inf

    best = min(covered(inner) for k in range(min(count, n)) for inner in itertools.combinations(range(1, n), k))
    points = cut(table, count, limit)
    assert len(points) == count + 1 and points[0] == 0 and points[-1] == n
    assert sum(table[a, b] for a, b in itertools.pairwise(points)) == best


def arranged_by_all(windows: list[list[dict[str, Any]]], **how: bool) -> list[list[dict[str, Any]]]:
    """Return what each process makes of its window, having heard of the others'."""
    told: list[Any] = []
    for window in windows:
        arrange(window, **how, gather=lambda mine: told.append(mine[0]) or mine)
    return [arrange(window, **how, gather=lambda _: told) for window in windows]


@pytest.mark.parametrize("bucket", [True, False])
@pytest.mark.parametrize("drop_zero", [True, False])
@pytest.mark.parametrize("seed", range(8))
def test_processes_cut_alike_and_none_takes_more_than_the_largest_that_any_would(
    seed: int, drop_zero: bool, bucket: bool
) -> None:
    """One has long rows, one short ones and a runaway, one a heavy tail; each leaves out another number of rows."""
    rng = np.random.default_rng(seed)
    micro, kinds = 4, (rng.integers(60, 80, 24), [*rng.integers(1, 4, 23), 75], rng.pareto(1.0, 24).clip(0, 16) * 4 + 1)
    prompts = [rng.integers(1, 9, 24).tolist() for _ in kinds]
    completions = [[int(n) for n in kind] for kind in kinds]
    zero = [tuple(np.flatnonzero(rng.random(24) < share).tolist()) for share in (0.7, 0.1, 1.0)]
    windows = [step_of(p, c, micro, z) for p, c, z in zip(prompts, completions, zero, strict=True)]
    limit = micro * max(max(p) + max(c) for p, c in zip(prompts, completions, strict=True))
    found = arranged_by_all(windows, drop_zero=drop_zero, bucket=bucket)
    for alike in zip(*found, strict=True):
        assert len({len(b["advantages"]) for b in alike}) == 1
        assert all(b["prompt_ids"].numel() + b["completion_ids"].numel() <= limit for b in alike)
    for batches, left_out in zip(found, zero, strict=True):
        assert len(batches) == 6
        assert rows_of(batches) == [i + 1 for i in range(24) if i not in left_out]


def test_rows_that_fill_up_count_for_nothing_and_the_others_stay() -> None:
    """`num_items_in_batch` is the step's, so the normaliser does not move either."""
    batch = {
        "advantages": torch.tensor([1.0, -1.0]),
        "completion_ids": torch.tensor([[1, 2], [3, 4]]),
        "completion_mask": torch.tensor([[1, 1], [1, 0]]),
        "num_items_in_batch": torch.tensor(7),
    }
    out = filled_up(batch, 4)
    assert out["advantages"].tolist() == [1, -1, 0, 0]
    assert out["completion_mask"].tolist() == [[1, 1], [1, 0], [0, 0], [0, 0]]
    assert out["completion_ids"].tolist() == [[1, 2], [3, 4], [1, 2], [1, 2]]
    assert out["num_items_in_batch"] == 7
    assert filled_up(batch, 2) is batch
    assert batch["completion_mask"].tolist() == [[1, 1], [1, 0]]
