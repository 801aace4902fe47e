"""A sampler whose weights are not the learner's: a copy that is refreshed now and then, and rounded on the way.

The copy has fp32 weights and computes as any fp32 model does; only the values are those that a coarser format has.
Where a run is stopped between two refreshes, the copy is part of the resume state, whole: as large as a checkpoint.
"""

from pathlib import Path
from typing import Any, Literal

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from evaluation.errors import InputError
from training.arms import Mismatch
from training.lora import plain, weights

FILE = "sampler.safetensors"
"""In a resume state."""


class SamplerCopy:
    """The model that the rollouts of an arm with a mismatch are drawn from."""

    def __init__(self, mismatch: Mismatch, learner: Any) -> None:
        self.mismatch = mismatch
        bare = plain(learner)
        with torch.random.fork_rng(devices=[]):  # its first weights are drawn at random, and overwritten
            self.model = type(bare)(bare.config).requires_grad_(False).eval()

    def at(self, step: int, learner: Any) -> Any:
        """Return the model to sample from when `step` optimizer steps are done."""
        if step % self.mismatch.refresh_every == 0:
            self.model.to(plain(learner).device)
            target = self.model.state_dict()
            for weight in weights(learner):
                target[weight.name].copy_(rounded(weight.merged(), self.mismatch.rounding))
        return self.model

    def between(self, step: int) -> bool:
        """Say whether the steps after `step` still sample from older weights."""
        return step % self.mismatch.refresh_every != 0

    def save(self, folder: Path, step: int) -> None:
        """Add the copy to a resume state that needs it."""
        if self.between(step):
            save_file({k: v.contiguous() for k, v in self.model.named_parameters()}, folder / FILE)

    def restore(self, folder: Path, step: int) -> None:
        """Take the copy of a resume state up.

        Raises:
            InputError: it is not there, or not all of it.
        """
        if not self.between(step):
            return
        try:
            found = load_file(folder / FILE)
            missing, unknown = self.model.load_state_dict(found, strict=False, assign=False)
        except (OSError, SafetensorError, RuntimeError) as e:
            reason = " ".join(str(e).split())[:200]
            raise InputError("resume", folder / FILE, reason, "remove this resume state") from e
        lacking = {*missing} & {n for n, _ in self.model.named_parameters()}
        if lacking or unknown:
            raise InputError("resume", folder / FILE, "is another model's", "remove this resume state")


def rounded(weight: torch.Tensor, to: Literal["bfloat16", "int8"] | None) -> torch.Tensor:
    """Return fp32 values that a coarser format has.

    bfloat16 rounds every weight to the nearest; int8 rounds each row of a matrix to 255 levels between its largest
    magnitude and its negative (symmetric, a scale a row), and leaves vectors (norms) alone.
    """
    if to == "bfloat16":
        return weight.to(torch.bfloat16).to(weight.dtype)
    if to == "int8" and weight.ndim == 2:
        scale = weight.abs().amax(1, keepdim=True).clamp(min=torch.finfo(weight.dtype).tiny) / 127
        return (weight / scale).round() * scale
    return weight
