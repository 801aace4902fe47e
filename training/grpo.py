"""The GRPO objective and its optimiser: what `training/config.py` says in TRL's words, as hashed data."""

from typing import Any, Literal, Self

from pydantic import Field, SerializerFunctionWrapHandler, model_serializer, model_validator

from evaluation.records import Record
from training.arms import leave_out_none

ADAM_EPS = 1e-8
"""torch's, and that of every cell before there was the field."""


class Grpo(Record):
    """The GRPO objective and optimiser: verl's defaults made explicit (spec A; reasons in docs/training.md)."""

    prompts_per_step: int = Field(default=64, ge=1)
    rollouts_per_prompt: int = Field(default=8, ge=2)
    """A group; the advantage is relative to it, so one rollout has none."""
    max_new_tokens: int = Field(default=3072, ge=1)
    temperature: float = Field(default=1.0, gt=0, allow_inf_nan=False)
    top_p: float = Field(default=1.0, gt=0, le=1)
    beta: float = Field(default=0.0, ge=0, allow_inf_nan=False)
    """KL weight; 0 loads no reference model."""
    loss_type: Literal["dapo"] = "dapo"
    """Token mean over all completions of the optimizer step."""
    scale_rewards: Literal["group", "none"] = "group"
    importance: Literal["one", "tis2"] | None = None
    """None: PPO's clipped ratio. Else the policy-gradient loss -A w(p/q) log p without clipping, p the learner's and q
    the sampler's probability of the token: w = 1 (REINFORCE on the sampler's tokens), or `tis2`, min(p/q, 2)."""
    epsilon: float = Field(default=0.2, gt=0, lt=1)
    """PPO's clip."""
    adam_beta1: float = Field(default=0.9, ge=0, lt=1)
    adam_beta2: float = Field(default=0.999, ge=0, lt=1)
    adam_eps: float = Field(default=ADAM_EPS, gt=0, lt=1)
    weight_decay: float = Field(default=0.01, ge=0, allow_inf_nan=False)
    max_grad_norm: float = Field(default=1.0, gt=0, allow_inf_nan=False)
    lr_schedule: Literal["constant"] = "constant"
    warmup_steps: Literal[0] = 0
    mask_truncated: Literal[False] = False
    """Truncated completions are kept and judged as they are."""
    compute_dtype: Literal["bfloat16", "float32"] = "bfloat16"
    """Weights are always fp32; this is what the matrix products run in."""

    @model_serializer(mode="wrap")
    def _without_later_fields(self, handler: SerializerFunctionWrapHandler) -> dict[str, Any]:
        data = handler(self)
        if self.adam_eps == ADAM_EPS:
            data.pop("adam_eps", None)
        return leave_out_none(data, "importance")

    @model_validator(mode="after")
    def _possible(self) -> Self:
        if self.top_p != 1:
            raise ValueError(f"top_p={self.top_p}: truncated sampling biases the likelihood ratios; train with top_p=1")
        if self.importance is not None and self.beta:
            raise ValueError(f"beta={self.beta}: the policy-gradient loss (importance) has no KL term; use beta=0")
        return self
