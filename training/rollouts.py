"""Rollouts: drawing a step's completions, and the parquet file that keeps each of them with its reward."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pandas as pd
from transformers import PreTrainedModel

from evaluation.files import PARTIAL
from evaluation.generation import Completion, NonFiniteLogits, row_seed, sample
from evaluation.program import naming
from evaluation.prompts import PromptSpec, stopped
from evaluation.records import Outcome
from training.grpo import Grpo
from training.lora import plain
from training.signs import varied_groups


@dataclass(frozen=True)
class Rollout:
    """One training completion with its verdict, as the parquet file has it."""

    problem_id: str
    index: int
    prompt: str
    completion: str
    token_ids: list[int]
    logprobs: list[float]
    finish_reason: str
    outcome: str
    reward: float
    advantage: float


def recorded(
    problem_ids: Sequence[str],
    prompts: Sequence[str],
    texts: Sequence[str],
    completions: Sequence[Completion],
    outcomes: Sequence[Outcome],
    advantages: Sequence[float],
    group: int,
) -> list[Rollout]:
    """Return a step's rollouts as they are kept; groups are adjacent, `group` rollouts each."""
    columns = zip(problem_ids, prompts, texts, completions, outcomes, advantages, strict=True)
    return [
        Rollout(
            problem_id=problem_id,
            index=i % group,
            prompt=prompt,
            completion=text,
            token_ids=c.token_ids,
            logprobs=c.logprobs,
            finish_reason=c.finish_reason,
            outcome=outcome.value,
            reward=float(outcome is Outcome.PASS),
            advantage=advantage,
        )
        for i, (problem_id, prompt, text, c, outcome, advantage) in enumerate(columns)
    ]


def step_figures(rollouts: Sequence[Rollout], entropies: Sequence[float], group: int) -> dict[str, Any]:
    """Return a step's figures for the log, of all its rollouts; `entropies` are sums over a rollout's tokens, nats."""
    count, tokens = len(rollouts), sum(len(r.token_ids) for r in rollouts)
    return {
        "reward": sum(r.reward for r in rollouts) / count,
        "entropy": sum(entropies) / tokens,
        "mean_tokens": tokens / count,
        "truncated_fraction": sum(r.finish_reason == "length" for r in rollouts) / count,
        "varied_groups": varied_groups([r.reward for r in rollouts], group),
        "loss": 0.0,
        "replay": None,
    }


def draw_step(
    sampler: Any,
    tokenizer: Any,
    spec: PromptSpec,
    grpo: Grpo,
    prompts: Sequence[Sequence[int]],
    problem_ids: Sequence[str],
    seed: int,
    step: int,
    on_done: Callable[[int, int, list[int]], None] | None = None,
    top_k: int = 0,
) -> list[list[Completion]]:
    """Draw a group for each prompt; the random stream is a function of (seed, step, problem, index).

    Args:
        sampler: the policy, with adapters or without, or a `vllm.LLM` that has the policy's weights.
        tokenizer: decodes tokens where the specification has stop strings.
        spec: stop ids and strings.
        grpo: group size, lengths and temperature.
        prompts: token ids of each distinct prompt.
        problem_ids: one a prompt.
        seed: the cell's.
        step: optimizer steps done.
        on_done: told (prompt, index, token ids) of rollouts that are finished while others are being drawn.
        top_k: how many of the likeliest tokens are kept at each position.

    Raises:
        NonFiniteLogits: the policy's output is not finite.
    """
    seeds = [[row_seed(seed, f"step {step}", p, i) for i in range(grpo.rollouts_per_prompt)] for p in problem_ids]
    sampler = plain(sampler)
    if not isinstance(sampler, PreTrainedModel):
        return _draw_vllm(sampler, spec, grpo, prompts, seeds, on_done, top_k)
    stop_text = (lambda ids: stopped(spec, tokenizer.decode(ids))) if spec.stop_strings else None
    return sample(
        sampler,
        prompts,
        seeds,
        max_new_tokens=grpo.max_new_tokens,
        temperature=grpo.temperature,
        top_p=grpo.top_p,
        stop_ids=spec.stop_ids,
        pad_id=tokenizer.pad_token_id,
        stop_text=stop_text,
        on_done=on_done,
        top_k=top_k,
    )


def _draw_vllm(
    engine: Any,
    spec: PromptSpec,
    grpo: Grpo,
    prompts: Sequence[Sequence[int]],
    seeds: Sequence[Sequence[int]],
    on_done: Callable[[int, int, list[int]], None] | None,
    top_k: int,
) -> list[list[Completion]]:
    """Draw with TRL's colocated vLLM, a request and a seed a rollout: TRL's own call gives a whole group one seed.

    vLLM reports no entropy; the mean of -log p over the drawn tokens estimates it without bias.
    """
    import vllm  # pyright: ignore[reportMissingImports]

    from evaluation.vllm_engine import draw_seeded

    drawn = draw_seeded(
        vllm,
        engine,
        spec,
        prompts,
        seeds,
        max_new_tokens=grpo.max_new_tokens,
        temperature=grpo.temperature,
        top_p=grpo.top_p,
        on_done=on_done,
        top_k=top_k,
    )
    if not all(math.isfinite(x) for group in drawn for c in group for x in c.logprobs):
        raise NonFiniteLogits("vLLM reports a log-probability that is not finite")
    return [[replace(c, entropy_sum=-sum(c.logprobs)) for c in group] for group in drawn]


def write_rollouts(path: Path, rollouts: Sequence[Rollout]) -> None:
    """Write one step's rollouts, whole or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(path.name + PARTIAL)
    with naming(path):
        pd.DataFrame([vars(r) for r in rollouts]).to_parquet(partial, index=False)
    partial.replace(path)
