"""Loss terms as pure tensor functions. Axes: B sequence, T token, V vocabulary, N = B x T."""

import math
from collections.abc import Iterable, Sequence
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


def next_token_logprobs(logits_BTV: torch.Tensor, ids_BT: torch.Tensor, temperature: float) -> torch.Tensor:
    """Return (B, T) log-probabilities of the tokens, whose logits stand at the same place."""
    if temperature != 1:
        logits_BTV = logits_BTV / temperature
    loss_N = torch.nn.functional.cross_entropy(logits_BTV.flatten(0, 1).float(), ids_BT.flatten(), reduction="none")
    return -loss_N.view_as(ids_BT)


def mean_token_nll(logprobs_BT: torch.Tensor, mask_BT: torch.Tensor, num_tokens: int) -> torch.Tensor:
    """Return a micro-batch's part of the mean negative log-likelihood over all `num_tokens` tokens of the step."""
    return -(logprobs_BT * mask_BT).sum() / num_tokens


class GradientPart:
    """The gradient that is there, set aside while another term's is computed, then added to it."""

    def __init__(self, parameters: Iterable[torch.nn.Parameter]) -> None:
        self.held = [(p, p.grad) for p in parameters if p.requires_grad]
        for p, _ in self.held:
            p.grad = None

    def join(self) -> tuple[float, float | None]:
        """Make each gradient the sum of both; return what the new one is beside the old.

        Returns:
            |new| / |old| (infinite where the old one is zero), and the cosine between them (None where one is zero),
            over all parameters in fp32.
        """
        squares = [torch.zeros((), dtype=torch.float32)] * 3
        for p, old in self.held:
            new = p.grad
            if old is not None and new is not None:
                mine = [(old * old).sum(), (new * new).sum(), (old * new).sum()]
                p.grad = new.add_(old)
            elif old is not None:
                mine, p.grad = [(old * old).sum(), 0.0, 0.0], old
            elif new is not None:
                mine = [0.0, (new * new).sum(), 0.0]
            else:
                continue
            squares = [total.to(p.device) + part for total, part in zip(squares, mine, strict=True)]
        old_2, new_2, dot = torch.stack(squares).double().tolist()
        ratio = math.sqrt(new_2 / old_2) if old_2 else math.inf if new_2 else math.nan
        return ratio, dot / math.sqrt(old_2 * new_2) if old_2 and new_2 else None
