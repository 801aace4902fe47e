"""The protocol: how every checkpoint of every cell is measured. Hashed; the judge's version is not part of it."""

from typing import Self

from pydantic import Field, model_validator

from evaluation.records import Record, sha256_json


class Protocol(Record):
    """How many samples of which problems are drawn how, and which pass@k is reported."""

    benchmark: str
    """A key of `evaluation.problems.BENCHMARKS`: `mbpp_plus`, `mbpp_test276`, `toy_plus`."""
    n: int = Field(ge=1)
    """Samples a problem."""
    temperature: float = Field(ge=0, allow_inf_nan=False)
    """0 draws greedily."""
    top_p: float = Field(gt=0, le=1)
    max_new_tokens: int = Field(ge=1)
    prompt: str = "mbpp/1"
    """Name of the prompt specification; its resolved form is hashed apart (`prompt_sha256`)."""
    seed: int = 0
    """Draws are a function of (seed, checkpoint-independent problem id, index)."""
    ks: tuple[int, ...] = ()
    """Reported k; empty means 1, 2, 4, ... and n."""
    num_problems: int | None = Field(default=None, ge=1)
    """Score only the first so many problems (ids ascending); None scores all."""

    @model_validator(mode="after")
    def _possible(self) -> Self:
        for k in self.ks:
            if not 1 <= k <= self.n:
                raise ValueError(
                    f"ks={k}: pass@{k} needs 1 <= k <= n={self.n}; draw more samples or ask for a smaller k"
                )
        if self.temperature == 0 and self.n > 1:
            raise ValueError(f"n={self.n}: greedy samples (temperature 0) are all the same; use n=1 or a temperature")
        return self

    @property
    def reported_ks(self) -> tuple[int, ...]:
        """The k of every table: declared ones, else powers of two up to n, and n itself."""
        if self.ks:
            return self.ks
        powers = [1 << i for i in range(self.n.bit_length()) if 1 << i <= self.n]
        return tuple(sorted({*powers, self.n}))

    def holds(self, other: "Protocol") -> bool:
        """Say whether the samples of this protocol include all that `other` would draw, the very same.

        A draw is a function of (seed, problem, index), so fewer samples or problems are a part of more; which k is
        reported changes no draw.
        """
        alike = ("benchmark", "temperature", "top_p", "max_new_tokens", "prompt", "seed")
        if any(getattr(self, f) != getattr(other, f) for f in alike) or self.n < other.n:
            return False
        return self.num_problems is None or (other.num_problems or self.num_problems + 1) <= self.num_problems

    @property
    def sha256(self) -> str:
        """Identity of the protocol."""
        return sha256_json(self)

    @property
    def folder(self) -> str:
        """Name of the score folders: `<benchmark>-<first 8 hex digits of sha256>`."""
        return f"{self.benchmark}-{self.sha256[:8]}"
