"""Loss terms as pure tensor functions. Axes: B sequence, T token, V vocabulary, K the sampler's head, N = B x T.

Score centering (arXiv 2609.20807, equations 9, 12, 14), p the learner's and q the sampler's probabilities, y the token:

    loss = -A [ sg(w(p_y / q_y)) log p_y - sum over v in H of sg(q_v w(p_v / q_v) - alpha p_v) log p_v ]

The sum is what the first part is expected to be over the sampler's tokens, with the tail outside of H modelled as the
learner's own times rho. Where p = q it is zero. With w(r) = r it is zero whatever p and q are.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

import torch

Weight = Literal["one", "tis2"]
TRUNCATED_AT = 2.0
TAIL_FLOOR = 1e-6
"""The paper's epsilon: neither tail is taken for less."""


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


def token_and_head_logprobs(
    logits_BTV: torch.Tensor, ids_BT: torch.Tensor, head_BTK: torch.Tensor, temperature: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (B, T) log-probabilities of the tokens and (B, T, K) of the head's, in one pass over the vocabulary.

    A head's token differs from the one that was drawn by the difference of two logits. Both are taken from one fp32
    copy: from bf16 logits the parts of the gradient are then added before they are rounded, and where the policy is
    sure of a token they nearly cancel.
    """
    logits_BTV = logits_BTV.float()
    logprobs_BT = next_token_logprobs(logits_BTV, ids_BT, temperature)
    both_BTK = logits_BTV.gather(-1, torch.cat([head_BTK, ids_BT[..., None]], -1)) / temperature
    return logprobs_BT, both_BTK[..., :-1] - both_BTK[..., -1:] + logprobs_BT[..., None]


def head_logprobs_from_hidden(
    hidden_BTD: torch.Tensor,
    head_weight_VD: torch.Tensor,
    ids_BT: torch.Tensor,
    logprobs_BT: torch.Tensor,
    head_BTK: torch.Tensor,
    temperature: float,
) -> torch.Tensor:
    """Return the same where the logits of the whole vocabulary are never there (TRL's fused head).

    All K + 1 logits come from one product, in the hidden states' dtype as the fused head's are: their rounding then
    cancels in the difference where it is that of the sum.
    """
    rows_BTKD = head_weight_VD[torch.cat([head_BTK, ids_BT[..., None]], -1)].to(hidden_BTD.dtype)
    both_BTK = torch.einsum("btd,btkd->btk", hidden_BTD, rows_BTKD).float() / temperature
    return both_BTK[..., :-1] - both_BTK[..., -1:] + logprobs_BT[..., None]


def importance(ratio: torch.Tensor, weight: Weight) -> torch.Tensor:
    """Return w(ratio): 1, or the ratio truncated at 2."""
    return torch.ones_like(ratio) if weight == "one" else ratio.clamp(max=TRUNCATED_AT)


def policy_gradient(
    logprobs_BT: torch.Tensor, sampled_BT: torch.Tensor, advantages_B: torch.Tensor, weight: Weight
) -> torch.Tensor:
    """Return each token's -A w(p/q) log p, w without a gradient; `sampled` are the sampler's log q."""
    ratio = (logprobs_BT.detach() - sampled_BT).exp()
    return -advantages_B[:, None] * importance(ratio, weight) * logprobs_BT


def centering(
    learner_BTK: torch.Tensor, sampler_BTK: torch.Tensor, advantages_B: torch.Tensor, weight: Weight
) -> torch.Tensor:
    """Return what centering adds to each token's loss; only its gradient has a meaning.

    Args:
        learner_BTK: log p of the head's tokens.
        sampler_BTK: log q of them.
        advantages_B: not divided by the group's standard deviation, which the paper's derivation does not have.
        weight: the w of the policy gradient.
    """
    with torch.no_grad():
        p, q = learner_BTK.exp(), sampler_BTK.exp()
        rho = (1 - q.sum(-1)).clamp(min=TAIL_FLOOR) / (1 - p.sum(-1)).clamp(min=TAIL_FLOOR)
        alpha = rho * importance(1 / rho, weight)
        ratio = (learner_BTK - sampler_BTK).exp()
        coefficients = q * importance(ratio, weight) - alpha[..., None] * p
    return advantages_B[:, None] * (coefficients * learner_BTK).sum(-1)


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
