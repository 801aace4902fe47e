"""Arms: named tuples of loss terms, and what makes an arm's sampler differ from the policy it trains. Pure data."""

from typing import Annotated, Any, Literal, Self

from pydantic import Field, SerializerFunctionWrapHandler, model_serializer, model_validator

from evaluation.records import Record


class Replay(Record):
    """SFT replay of past rollouts with reward 1 (spec `hard_cooldown/1` and its controls)."""

    kind: Literal["replay"] = "replay"
    version: Literal["hard_cooldown/1"] = "hard_cooldown/1"
    rule: Literal["hard_cooldown", "hard", "uniform"] = "hard_cooldown"
    """`hard` drops the cooldown, `uniform` also the weights."""
    weight: float = Field(default=0.1, gt=0, allow_inf_nan=False)
    """lambda: loss = GRPO loss + lambda x mean-token NLL of the drawn completions."""
    draws: int = Field(default=128, ge=1)
    """Rollouts replayed a step."""
    cooldown: int = Field(default=5, ge=0)
    """Steps before a problem is eligible again."""
    max_age: int = Field(default=100, ge=1)
    max_reuse: int = Field(default=8, ge=1)
    stock_per_problem: int = Field(default=32, ge=1)
    draws_per_problem: int = Field(default=4, ge=1)

    @property
    def variant(self) -> str:
        """What an arm's name stands for; the rest are sizes."""
        return f"{self.rule}/{self.weight}"


class Center(Record):
    """Score centering (arXiv 2609.20807, equations 9, 12 and 14): see `training.centering.centered_loss`."""

    kind: Literal["center"] = "center"
    version: Literal["score_centering/1"] = "score_centering/1"
    top_k: int = Field(default=32, ge=1)
    """Size of the head: how many of the sampler's most probable tokens are kept at each position."""

    @property
    def variant(self) -> str:
        """What an arm's name stands for."""
        return f"{self.version}/{self.top_k}"


Term = Annotated[Replay | Center, Field(discriminator="kind")]


class Mismatch(Record):
    """A declared difference between the sampler's weights and the learner's, in place of the one of other engines."""

    rounding: Literal["bfloat16", "int8"] | None = None
    """Format each matrix is rounded to and back (int8: a scale a row, its largest magnitude / 127)."""
    refresh_every: int = Field(default=1, ge=1)
    """Optimizer steps that share one copy of the weights: with 4, steps 1 to 4 sample from the base, 5 to 8 from step
    4's. The same as one generation for four optimizer steps, but each step's prompts are drawn when it is taken."""

    @model_validator(mode="after")
    def _differs(self) -> Self:
        if self.rounding is None and self.refresh_every == 1:
            raise ValueError("refresh_every=1: without a rounding that is no mismatch; leave it out, or use 2 or more")
        return self


class Arm(Record):
    """A named tuple of loss terms, and the sampler's mismatch if it declares one; the control arm has neither."""

    name: str
    terms: tuple[Term, ...] = ()
    label: str
    """The words of tables and plots."""
    mismatch: Mismatch | None = None

    @model_serializer(mode="wrap")
    def _without_mismatch(self, handler: SerializerFunctionWrapHandler) -> dict[str, Any]:
        return leave_out_none(handler(self), "mismatch")


def leave_out_none(data: dict[str, Any], *fields: str) -> dict[str, Any]:
    """Drop fields that are None: what was hashed before there were such fields keeps its hash."""
    return {k: v for k, v in data.items() if k not in fields or v is not None}


STALE, INT8, BF16 = Mismatch(refresh_every=4), Mismatch(rounding="int8"), Mismatch(rounding="bfloat16")

ARMS: dict[str, Arm] = {
    a.name: a
    for a in (
        Arm(name="nobuf", label="no replay"),
        Arm(name="hardcd_lam0p1", terms=(Replay(),), label="replay"),
        Arm(name="hard_lam0p1", terms=(Replay(rule="hard"),), label="replay, no cooldown"),
        Arm(name="unif_lam0p1", terms=(Replay(rule="uniform"),), label="replay, uniform"),
        Arm(name="plain", label="plain"),
        Arm(name="center", terms=(Center(),), label="score centering"),
        Arm(name="plain_stale4", label="plain, stale sampler", mismatch=STALE),
        Arm(name="center_stale4", terms=(Center(),), label="score centering, stale sampler", mismatch=STALE),
        Arm(name="plain_int8", label="plain, int8 sampler", mismatch=INT8),
        Arm(name="center_int8", terms=(Center(),), label="score centering, int8 sampler", mismatch=INT8),
        Arm(name="plain_bf16", label="plain, bf16 sampler", mismatch=BF16),
        Arm(name="center_bf16", terms=(Center(),), label="score centering, bf16 sampler", mismatch=BF16),
    )
}
