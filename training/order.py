"""The order of the data, and the seeds of random streams, as functions of the seed and the place in the run alone."""

import hashlib
from collections.abc import Iterator

import torch
from trl.trainer.utils import RepeatSampler


def stream_seed(seed: int, step: int, stream: str) -> int:
    """Return the seed of a random stream at one step: no stream depends on another's history."""
    return int.from_bytes(hashlib.sha256(f"{seed}/{step}/{stream}".encode()).digest()[:7], "big")


def step_order(num_problems: int, per_step: int, seed: int, step: int) -> list[int]:
    """Return the places of the problems of step `step` (from 0), as `EpochSampler` deals them out."""
    epoch, part = divmod(step, num_problems // per_step)
    generator = torch.Generator().manual_seed(stream_seed(seed, epoch, "data"))
    return torch.randperm(num_problems, generator=generator).tolist()[part * per_step : (part + 1) * per_step]


class EpochSampler(RepeatSampler):
    """TRL's sampler with an order that is a function of (seed, epoch), so that a resumed run sees the same data."""

    epoch = 0

    def set_epoch(self, epoch: int) -> None:
        """Set by accelerate at the start of every epoch, also after a resume."""
        self.epoch = epoch

    def __iter__(self) -> Iterator[int]:
        self.generator.manual_seed(stream_seed(self.seed or 0, self.epoch, "data"))
        return super().__iter__()
