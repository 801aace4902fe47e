"""Loss terms as pure tensor functions. Axes: B sequence, T token."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class ReplayBatch:
    """Some of a step's replayed rollouts, prompts padded left and completions right."""

    ids_BT: torch.Tensor
    attention_BT: torch.Tensor
    completion_mask_BT: torch.Tensor
    """(B, longest completion)."""


def collate(rollouts: Sequence[tuple[Sequence[int], Sequence[int]]], pad_id: int, device: torch.device) -> ReplayBatch:
    """Pad (prompt ids, completion ids) pairs."""
    width = max(len(p) for p, _ in rollouts)
    length = max(len(c) for _, c in rollouts)
    ids = torch.full((len(rollouts), width + length), pad_id, dtype=torch.long)
    attention = torch.zeros_like(ids)
    for row, (p, c) in enumerate(rollouts):
        ids[row, width - len(p) : width + len(c)] = torch.tensor([*p, *c])
        attention[row, width - len(p) : width + len(c)] = 1
    return ReplayBatch(ids.to(device), attention.to(device), attention[:, width:].to(device))


def mean_token_nll(logprobs_BT: torch.Tensor, mask_BT: torch.Tensor, num_tokens: int) -> torch.Tensor:
    """Return a micro-batch's part of the mean negative log-likelihood over all `num_tokens` tokens of the step."""
    return -(logprobs_BT * mask_BT).sum() / num_tokens
