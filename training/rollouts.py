"""Rollouts: drawing a step's completions, and the parquet file that keeps each of them with its reward."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pandas as pd

from evaluation.files import PARTIAL
from evaluation.generation import Completion, row_seed, sample
from evaluation.prompts import PromptSpec, stopped
from training.cell import Grpo


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


def draw_step(
    model: Any,
    tokenizer: Any,
    spec: PromptSpec,
    grpo: Grpo,
    prompts: Sequence[Sequence[int]],
    problem_ids: Sequence[str],
    seed: int,
    step: int,
) -> list[list[Completion]]:
    """Draw a group for each prompt; the random stream is a function of (seed, step, problem, index).

    Args:
        model: the policy.
        tokenizer: decodes tokens where the specification has stop strings.
        spec: stop ids and strings.
        grpo: group size, lengths and temperature.
        prompts: token ids of each distinct prompt.
        problem_ids: one a prompt.
        seed: the cell's.
        step: optimizer steps done.
    """
    seeds = [[row_seed(seed, f"step {step}", p, i) for i in range(grpo.rollouts_per_prompt)] for p in problem_ids]
    stop_text = (lambda ids: stopped(spec, tokenizer.decode(ids))) if spec.stop_strings else None
    return sample(
        model,
        prompts,
        seeds,
        max_new_tokens=grpo.max_new_tokens,
        temperature=grpo.temperature,
        top_p=grpo.top_p,
        stop_ids=spec.stop_ids,
        pad_id=tokenizer.pad_token_id,
        stop_text=stop_text,
    )


def write_rollouts(path: Path, rollouts: Sequence[Rollout]) -> None:
    """Write one step's rollouts, whole or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(path.name + PARTIAL)
    pd.DataFrame([vars(r) for r in rollouts]).to_parquet(partial, index=False)
    partial.replace(path)
