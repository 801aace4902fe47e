"""An experiment: a grid of cells, one or more protocols applied to every checkpoint, and a criterion. Pure data."""

from collections.abc import Sequence
from typing import Any, Literal, Self

from pydantic import Field, SerializerFunctionWrapHandler, model_serializer, model_validator

from evaluation.errors import InputError
from evaluation.findings import Criterion
from evaluation.protocol import Protocol
from evaluation.records import Record, sha256_json
from training.arms import ARMS, Replay, Term
from training.cell import MODELS, Cell
from training.grpo import Grpo


class Experiment(Record):
    """The question, the grid, how it is measured and how it is answered: all declared before anything trains."""

    name: str
    question: str
    model: str
    """Default model; the flow parameter `model` may name another."""
    benchmark: str
    """Token of the training benchmark: `mbpp`, `toy`, `gsm8k` or `sums`."""
    data_seed: int = 0
    """Seed of generated problems (`toy` and `sums`)."""
    num_training_problems: int = Field(ge=1)
    arms: tuple[str, ...]
    lrs: tuple[float, ...]
    num_seeds: int = Field(default=1, ge=1)
    steps: int
    stride: int
    replay_draws: int = 128
    grpo: Grpo = Grpo()
    lora_rank: int | None = Field(default=None, ge=1)
    """Of every cell; None trains all weights."""
    protocols: tuple[Protocol, ...] = Field(min_length=1)
    """The first is the primary one: the finding rests on it."""
    criterion: Criterion
    departures: tuple[str, ...] = ()
    """Where what is declared departs from what was asked, told with every finding."""
    budget_minutes: int | None = Field(default=None, ge=1)
    """Wall time of all runs together; what is not trained by then is incomplete."""
    needs_gpu: bool
    scale: Literal["full", "demo"] = "demo"

    @model_serializer(mode="wrap")
    def _without_later_fields(self, handler: SerializerFunctionWrapHandler) -> dict[str, Any]:
        """Leave out later fields that say nothing, as cells do: what was registered before stays what it was."""
        later = {"lora_rank", "departures", "budget_minutes"}
        return {k: v for k, v in handler(self).items() if v or k not in later}

    @model_validator(mode="after")
    def _possible(self) -> Self:
        for arm in self.arms:
            if arm not in ARMS:
                raise ValueError(f"arm={arm}: unknown; use one of {', '.join(sorted(ARMS))}")
        if self.criterion.rule == "drop" and len(self.arms) % 2:
            raise ValueError(
                f"arms={len(self.arms)}: the rule drop compares pairs, plain arm first; name an even number"
            )
        names = [c.name for c in self.cells()]
        if twice := sorted({n for n in names if names.count(n) > 1}):
            raise ValueError(f"cells={twice[0]}: planned twice; name every arm and rate once")
        return self

    def cells(
        self,
        model: str | None = None,
        num_seeds: int | None = None,
        names: Sequence[str] | None = None,
        backend: Literal["local", "tinker"] = "local",
    ) -> tuple[Cell, ...]:
        """Return the grid: arm x rate x seed, rates ascending; `names` keeps those cells only.

        Raises:
            InputError: a name that is not in the grid, an unknown model, or no seed at all.
        """
        model = model or self.model
        if model not in MODELS:
            raise InputError("model", model, "unknown model", f"use one of {', '.join(sorted(MODELS))}")
        seeds = self.num_seeds if num_seeds is None else num_seeds
        if seeds < 1:
            raise InputError("seeds", seeds, "at least one seed is needed", "use seeds=1 or more")
        grid = tuple(
            Cell(
                model=model,
                benchmark=self.benchmark,
                arm=arm,
                lr=lr,
                seed=seed,
                steps=self.steps,
                stride=self.stride,
                terms=tuple(_sized(t, self.replay_draws) for t in ARMS[arm].terms),
                grpo=self.grpo,
                mismatch=ARMS[arm].mismatch,
                backend=backend,
                lora_rank=self.lora_rank,
            )
            for seed in range(seeds)
            for lr in sorted(self.lrs)
            for arm in self.arms
        )
        if not names:
            return grid
        known = {c.name: c for c in grid}
        for name in names:
            if name not in known:
                raise InputError(
                    "cells", name, f"not a cell of {self.name}", f"use names of `ablation plan {self.name}`"
                )
        return tuple(known[n] for n in dict.fromkeys(names))

    @property
    def pairs(self) -> tuple[tuple[str, str], ...]:
        """(plain, treated) arms of the rule "drop": the question's pair first, then the controls'."""
        return tuple(zip(self.arms[::2], self.arms[1::2], strict=True)) if self.criterion.rule == "drop" else ()

    @property
    def sha256(self) -> str:
        """Identity of what was registered before training."""
        return sha256_json(self)


def _sized(term: Term, draws: int) -> Term:
    return term.replace(draws=draws) if isinstance(term, Replay) else term
