"""The policy-gradient form of a step's loss, centred where the arm says so: what lies between rollouts and objectives.

The sampler's log-probs, and its head where the score is centred, travel with the rows of a step as tensors; TRL and
`training/buckets.py` shuffle, cut and trim them like everything that has rows first and positions second.

Axes: B sequence, T token, K the sampler's head.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch

from evaluation.generation import Completion
from training.lora import plain
from training.objectives import Weight, centering, policy_gradient
from training.processes import Processes


class PolicyGradient:
    """-A w(p/q) log p on the sampler's tokens, with its centering; and how far sampler and learner are apart."""

    def __init__(self, weight: Weight, top_k: int) -> None:
        self.weight: Weight = weight
        self.top_k = top_k
        """Size of the head; 0: the score is not centred."""
        self._gaps: list[tuple[float, float, int]] = []

    def tensors(self, completions: Sequence[Completion], width: int, device: torch.device) -> dict[str, torch.Tensor]:
        """Return what the sampler said, a row a completion, padded on the right to `width` positions."""
        sampled = [np.asarray(c.logprobs, dtype=np.float32) for c in completions]
        out = {"sampled_logprobs": _padded(sampled, width)}
        if self.top_k:
            heads = [c.head for c in completions if c.head is not None]
            assert len(heads) == len(completions)
            out["head_ids"] = _padded([h.ids.astype(np.int64) for h in heads], width)
            out["head_logprobs"] = _padded([h.logprobs for h in heads], width)
        return {k: v.to(device) for k, v in out.items()}

    def loss(
        self, inputs: dict[str, torch.Tensor], logprobs_BT: torch.Tensor, head_BTK: torch.Tensor | None
    ) -> torch.Tensor:
        """Return the sum of a micro-batch's token losses, and note its gaps.

        Args:
            inputs: the micro-batch, with `tensors`.
            logprobs_BT: the learner's, of the tokens.
            head_BTK: the learner's, of the sampler's head; None where the score is not centred.
        """
        sampled, mask, advantages = inputs["sampled_logprobs"], inputs["completion_mask"], inputs["advantages"]
        counted = mask * (advantages != 0)[:, None]  # which others are in a forward pass is a matter of speed
        gaps = ((logprobs_BT.detach() - sampled).abs() * counted).double()
        self._gaps.append((gaps.sum().item(), gaps.max().item(), int(counted.sum())))
        loss_BT = policy_gradient(logprobs_BT, sampled, advantages, self.weight)
        if head_BTK is not None:
            loss_BT = loss_BT + centering(head_BTK, inputs["head_logprobs"], advantages, self.weight)
        return (loss_BT * mask).sum()

    def figures(self, completions: Sequence[Completion], processes: Processes) -> dict[str, float | None]:
        """Return a step's figures, those of all processes, and begin anew.

        Returns:
            `logprob_gap` and `logprob_gap_max`, |log p - log q| over the tokens of rows with an advantage, before the
            step's update (None where there is no such row); `head_mass`, the sampler's mean mass on its head.
        """
        mass = [(float(np.exp(c.head.logprobs).sum()), len(c.token_ids)) for c in completions if c.head is not None]
        gaps, self._gaps = processes.gather(self._gaps), []
        mass = processes.gather(mass)
        count, tokens = sum(n for _, _, n in gaps), sum(n for _, n in mass)
        return {
            "logprob_gap": sum(total for total, _, _ in gaps) / count if count else None,
            "logprob_gap_max": max(most for _, most, _ in gaps) if count else None,
            "head_mass": sum(m for m, _ in mass) / tokens if tokens else None,
        }


@contextmanager
def hidden_states(model: Any) -> Iterator[list[torch.Tensor]]:
    """Collect what the policy's head is given, in the graph, at each pass of the `with` block."""
    seen: list[torch.Tensor] = []
    hook = plain(model).base_model.register_forward_hook(lambda _, __, out: seen.append(out.last_hidden_state))
    try:
        yield seen
    finally:
        hook.remove()


def _padded(rows: Sequence[np.ndarray], width: int) -> torch.Tensor:
    """Return (B, width, ...) with zeros behind each row; what stands there is masked wherever it is used."""
    out = np.zeros((len(rows), width, *rows[0].shape[1:]), dtype=rows[0].dtype)
    for row, values in zip(out, rows, strict=True):
        row[: len(values)] = values
    return torch.from_numpy(out)
