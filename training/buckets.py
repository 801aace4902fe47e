"""The rows of one optimizer step in the micro-batches that cost least: sorted by length, cut where padding is least.

TRL pads every micro-batch to the longest completion of the whole step, so one runaway completion is paid for by all.
Here rows are sorted, cut into as many micro-batches as the step has, and trimmed to their own longest. No micro-batch
covers more positions (rows x width) than TRL's largest would, so memory does not grow. Rows without advantage add
nothing to the loss and may be left out. The loss is a sum over rows with one normaliser, so it stays the same to float
rounding, whatever the cut.

Axes: B rows, N cut points.
"""

import itertools
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

Batch = dict[str, Any]
GRAIN = 128
"""At most so many places where a step may be cut: finer ones cost time and save next to nothing."""


def arrange(window: Sequence[Batch], *, drop_zero: bool, bucket: bool) -> list[Batch]:
    """Return the rows of one optimizer step in the same number of micro-batches.

    Args:
        window: micro-batches of one step: tensors with rows first, or scalars that all share.
        drop_zero: leave out rows whose advantage is zero.
        bucket: sort rows by length and cut where padding is least; otherwise rows keep their order.
    """
    rows = {k: _joined([batch[k] for batch in window]) for k in window[0]}
    keep = rows["advantages"] != 0 if drop_zero else torch.ones_like(rows["advantages"], dtype=torch.bool)
    prompts_B = rows["prompt_mask"].sum(1).cpu().numpy()
    completions_B = rows["completion_mask"].sum(1).cpu().numpy()
    kept = keep.nonzero().flatten().cpu().numpy()
    if bucket and len(kept):
        micro = len(window[0]["advantages"])
        kept, bounds = _cheapest(kept, prompts_B, completions_B, len(window), micro)
    else:
        bounds = np.linspace(0, len(kept), len(window) + 1).round().astype(int)
    shortest = int((prompts_B + completions_B).argmin())
    parts = [kept[a:b] for a, b in itertools.pairwise(bounds)]
    return [_taken(rows, part, shortest) for part in parts]


def trim(batch: Batch) -> Batch:
    """Return a micro-batch without the columns that are padding in each of its rows."""
    longest = int(batch["completion_mask"].sum(1).max().clamp(min=1))
    prompt = int(batch["prompt_mask"].sum(1).max().clamp(min=1))
    width = batch["completion_mask"].shape[1]
    out = dict(batch)
    for key, value in batch.items():
        if key in {"prompt_ids", "prompt_mask"}:
            out[key] = value[:, -prompt:]
        elif torch.is_tensor(value) and value.ndim >= 2 and value.shape[1] == width:
            out[key] = value[:, :longest]
    return out


def filled_up(batch: Batch, rows: int) -> Batch:
    """Return a micro-batch with as many rows; the new ones have no token that counts, so they add nothing to a loss."""
    have = len(batch["advantages"])
    if have == rows:
        return batch
    index = torch.tensor([*range(have), *[0] * (rows - have)], device=batch["advantages"].device)
    out = {k: v[index] if torch.is_tensor(v) and v.ndim else v for k, v in batch.items()}
    out["advantages"][have:] = 0
    out["completion_mask"][have:] = 0
    return out


def cut(widths_by_part: np.ndarray, count: int, limit: int) -> np.ndarray:
    """Return the cut points of the partition into `count` parts that covers the fewest positions.

    Args:
        widths_by_part: (N + 1, N + 1) positions of the part from cut point i to j, for i < j.
        count: parts at most.
        limit: positions of the largest part; there must be a partition within it.

    Dynamic programming over the cut points: best[j] is the least that covers everything up to j.
    """
    n = len(widths_by_part) - 1
    if n <= count:  # cutting more never costs more
        return np.append(np.arange(n), np.full(count + 1 - n, n))
    area = np.where(widths_by_part <= limit, widths_by_part.astype(float), np.inf)
    area[np.tril_indices(n + 1)] = np.inf
    best, back = np.full(n + 1, np.inf), []
    best[0] = 0
    for _ in range(count):
        total = best[:, None] + area
        step = total.argmin(0)
        found = total[step, np.arange(n + 1)]
        step = np.where(found <= best, step, np.arange(n + 1))  # an empty part only where one more does harm
        best = np.minimum(best, found)
        back.append(step)
    assert np.isfinite(best[n]), "no partition keeps to the limit"
    points = [n]
    for step in reversed(back):
        points.append(int(step[points[-1]]))
    return np.array(points[::-1])


def _cheapest(
    kept: np.ndarray, prompts_B: np.ndarray, completions_B: np.ndarray, count: int, micro: int
) -> tuple[np.ndarray, np.ndarray]:
    """Return the kept rows in the better of two orders, and where to cut them.

    `count` parts of `micro` rows keep to the limit, so cutting at multiples of a divisor of `micro` can as well.
    """
    limit = micro * int(prompts_B.max() + completions_B.max())
    coarse = -(-len(kept) // max(GRAIN, count))
    grain = max(d for d in range(1, micro + 1) if micro % d == 0 and d <= coarse)
    points = np.unique(np.append(np.arange(0, len(kept), grain), len(kept)))
    tried = []
    for first, second in ((completions_B, prompts_B), (prompts_B + completions_B, completions_B)):
        order = kept[np.lexsort((second[kept], first[kept]))]
        area = _areas(prompts_B[order], completions_B[order], points)
        chosen = cut(area, count, limit)
        spent = sum(area[a, b] for a, b in itertools.pairwise(chosen) if a < b)
        tried.append((spent, order, points[chosen]))
    _, order, bounds = min(tried, key=lambda t: t[0])
    return order, bounds


def _areas(prompts: np.ndarray, completions: np.ndarray, points: np.ndarray) -> np.ndarray:
    """Return rows x (longest prompt + longest completion) between every two cut points."""
    starts = points[:-1]
    longest = []
    for lengths in (prompts, completions):
        blocks = np.maximum.reduceat(lengths, starts)
        table = np.zeros((len(points), len(points)), dtype=np.int64)
        for i in range(len(starts)):
            table[i, i + 1 :] = np.maximum.accumulate(blocks[i:])
        longest.append(table)
    rows = (points[None, :] - points[:, None]).clip(min=0)
    return rows * (longest[0] + longest[1])


def _joined(values: Sequence[Any]) -> Any:
    return torch.cat(list(values)) if torch.is_tensor(values[0]) and values[0].ndim else values[0]


def _taken(rows: Batch, part: np.ndarray, shortest: int) -> Batch:
    """Return some rows; where there is none, the shortest one with no advantage, whose gradient is zero."""
    index = torch.as_tensor(part if len(part) else [shortest], device=rows["advantages"].device)
    batch = {k: v[index] if torch.is_tensor(v) and v.ndim else v for k, v in rows.items()}
    if not len(part):
        batch["advantages"] = torch.zeros_like(batch["advantages"])
    return trim(batch)
