"""The rows of one optimizer step in the micro-batches that cost least: sorted by length, cut where padding is least.

TRL pads every micro-batch to the longest completion of the whole step, so one runaway completion is paid for by all.
Here rows are sorted, cut into as many micro-batches as the step has, and trimmed to their own longest. No micro-batch
covers more positions (rows x width) than TRL's largest would, so memory does not grow. Rows without advantage add
nothing to the loss and may be left out. The loss is a sum over rows with one normaliser, so it stays the same to float
rounding, whatever the cut.

Several processes cut alike, by the longest rows that any of them has: TRL gathers a figure a row from all of them, and
who is done with a micro-batch waits for the others.

Axes: B rows, N cut points.
"""

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch

Batch = dict[str, Any]
GRAIN = 128
"""At most so many places where a step may be cut: finer ones cost time and save next to nothing."""


def arrange(
    window: Sequence[Batch], *, drop_zero: bool, bucket: bool, gather: Callable[[list[Any]], list[Any]] = list
) -> list[Batch]:
    """Return the rows of one optimizer step in the same number of micro-batches.

    Args:
        window: micro-batches of one step: tensors with rows first, or scalars that all share.
        drop_zero: leave out rows whose advantage is zero.
        bucket: sort rows by length and cut where padding is least; otherwise rows keep their order.
        gather: returns the items of all processes; each then has as many rows in a micro-batch as the others.
    """
    rows = {k: _joined([batch[k] for batch in window]) for k in window[0]}
    keep = rows["advantages"] != 0 if drop_zero else torch.ones_like(rows["advantages"], dtype=torch.bool)
    lengths_2B = np.stack([rows[k].sum(1).cpu().numpy() for k in ("prompt_mask", "completion_mask")])
    kept = keep.nonzero().flatten().cpu().numpy()
    shortest = int(lengths_2B.sum(0).argmin())
    everybody = gather([(lengths_2B[:, kept], lengths_2B[:, shortest], lengths_2B.max(1).sum())])
    most = max(lengths.shape[1] for lengths, _, _ in everybody)
    if bucket and most:
        micro = len(window[0]["advantages"])
        longest = int(max(longest for _, _, longest in everybody))
        kind, bounds = _cheapest(everybody, most, len(window), micro, micro * longest)
        kept = kept[_order(lengths_2B[:, kept], kind)]
    else:
        bounds = np.linspace(0, most, len(window) + 1).round().astype(int)
    missing = most - len(kept)
    parts = [(kept[max(0, a - missing) : max(0, b - missing)], b - a) for a, b in itertools.pairwise(bounds)]
    return [filled_up(_taken(rows, part, shortest), max(1, count)) for part, count in parts]


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


def _order(lengths_2B: np.ndarray, kind: int) -> np.ndarray:
    """Return the rows sorted by completion (0), or by prompt and completion together (1)."""
    prompts, completions = lengths_2B
    first, second = ((completions, prompts), (prompts + completions, completions))[kind]
    return np.lexsort((second, first))


def _cheapest(
    everybody: Sequence[tuple[np.ndarray, np.ndarray, int]], n: int, count: int, micro: int, limit: int
) -> tuple[int, np.ndarray]:
    """Return the better of two orders, and where to cut the `n` rows of every process, those that fill up first.

    `count` parts of `micro` rows keep to the limit, so cutting at multiples of a divisor of `micro` can as well.
    """
    coarse = -(-n // max(GRAIN, count))
    grain = max(d for d in range(1, micro + 1) if micro % d == 0 and d <= coarse)
    points = np.unique(np.append(np.arange(0, n, grain), n))
    tried = []
    for kind in (0, 1):
        areas = []
        for lengths_2B, filler_2, _ in everybody:
            fillers = np.repeat(filler_2[:, None], n - lengths_2B.shape[1], axis=1)
            prompts, completions = np.hstack([fillers, lengths_2B[:, _order(lengths_2B, kind)]])
            areas.append(_areas(prompts, completions, points))
        area = np.maximum.reduce(areas)
        chosen = cut(area, count, limit)
        spent = sum(area[a, b] for a, b in itertools.pairwise(chosen) if a < b)
        tried.append((spent, kind, points[chosen]))
    _, kind, bounds = min(tried, key=lambda t: t[0])
    return kind, bounds


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
