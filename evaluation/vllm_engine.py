"""vLLM as a sampling engine: one request a sample, each with its own seed, so that batches do not matter.

On GPUs nothing here is special. On the CPU build (facts measured with 0.31): fp32, eager, no chunked prefill, because
seeded requests need it off there.
"""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from evaluation.engines import load_tokenizer, seeds_of
from evaluation.errors import MachineError
from evaluation.generation import Completion, Head
from evaluation.prompts import PromptSpec
from evaluation.protocol import Protocol
from evaluation.request import Unit

LOGPROBS = 1
_CPU = {
    "dtype": "float32",
    "enforce_eager": True,
    "enable_chunked_prefill": False,
    "max_num_batched_tokens": 32768,
}


class VllmEngine:
    """Draws from one checkpoint at a time; a new checkpoint is a new engine."""

    def __init__(self, device: str) -> None:
        try:
            import vllm  # pyright: ignore[reportMissingImports]
        except ImportError as e:
            raise MachineError("engine", "vllm", "vLLM is not installed", "use --engine transformers") from e
        self.vllm, self.device = vllm, device
        self.tokenizer: Any = None
        self.engine: Any = None
        self.spec: PromptSpec | None = None
        self.loaded: str | None = None

    def load(self, unit: Unit, spec: PromptSpec) -> None:
        """Build the engine for the unit's checkpoint."""
        if self.loaded == unit.label:
            return
        self.tokenizer = load_tokenizer(unit)
        options = _CPU if self.device == "cpu" else {"dtype": "auto"}
        self.engine = None  # frees the old one's memory before the new one takes its own
        self.engine = self.vllm.LLM(
            unit.model_path,
            revision=unit.model_revision,
            max_logprobs=32,
            seed=0,
            **options,
        )
        self.spec, self.loaded = spec, unit.label

    def draw(
        self, protocol: Protocol, problem_ids: Sequence[str], prompts: Sequence[Sequence[int]]
    ) -> list[list[Completion]]:
        """Draw n samples a prompt, each a request with its own seed."""
        assert self.spec is not None
        return draw_seeded(
            self.vllm,
            self.engine,
            self.spec,
            prompts,
            seeds_of(protocol, problem_ids),
            max_new_tokens=protocol.max_new_tokens,
            temperature=protocol.temperature,
            top_p=protocol.top_p,
        )


def draw_seeded(
    vllm: Any,
    engine: Any,
    spec: PromptSpec,
    prompts: Sequence[Sequence[int]],
    seeds: Sequence[Sequence[int]],
    *,
    max_new_tokens: int,
    temperature: float,
    top_p: float,
    on_done: Callable[[int, int, list[int]], None] | None = None,
    top_k: int = 0,
) -> list[list[Completion]]:
    """Send U x n single requests and sort the answers back.

    Args:
        vllm: the module.
        engine: a `vllm.LLM`.
        spec: stop ids and strings.
        prompts: U lists of token ids.
        seeds: U x n row seeds (taken modulo 2^63: vLLM's are signed).
        max_new_tokens: longest completion.
        temperature: 0 is greedy.
        top_p: nucleus mass.
        on_done: told (prompt, index, token ids) of each sample as it is finished, while others are being drawn.
        top_k: size of the head to keep at each position; 0 keeps none.
    """
    n = len(seeds[0]) if seeds else 0
    if top_k:
        _allow(engine, top_k)
    common = {
        "n": 1,
        "max_tokens": max_new_tokens,
        "temperature": temperature,
        "top_p": top_p,
        "stop_token_ids": list(spec.stop_ids),
        "stop": list(spec.stop_strings) or None,
        "include_stop_str_in_output": True,
        "ignore_eos": False,
        "logprobs": max(LOGPROBS, top_k),
    }
    requests, parameters = [], []
    for prompt, row in zip(prompts, seeds, strict=True):
        requests += [{"prompt_token_ids": list(prompt)} for _ in row]
        parameters += [vllm.SamplingParams(seed=seed % (1 << 63), **common) for seed in row]
    # The engine makes ids unique by a suffix that its answers do not carry.
    ids = engine.enqueue(requests, parameters, use_tqdm=False)
    place = {id_.partition("-")[0]: row for row, id_ in enumerate(ids)}
    answers: dict[int, Completion] = {}
    while engine.llm_engine.has_unfinished_requests():
        for answer in engine.llm_engine.step():
            if not answer.finished:
                continue
            row = place[answer.request_id]
            answers[row] = _completion(answer.outputs[0], top_k)
            if on_done is not None:
                on_done(row // n, row % n, answers[row].token_ids)
    drawn = [answers[row] for row in range(len(requests))]
    return [drawn[u * n : (u + 1) * n] for u in range(len(prompts))]


def _allow(engine: Any, top_k: int) -> None:
    """Let the engine answer with so many log-probs: its limit is 20 unless whoever built it has raised it."""
    config = engine.llm_engine.model_config
    config.max_logprobs = max(config.max_logprobs, top_k)


def _completion(output: Any, top_k: int) -> Completion:
    """Take the sampled token's log-prob by its id, the first by rank need not be it; and the head by rank."""
    ids = list(output.token_ids)
    logprobs = [float(at[token].logprob) for token, at in zip(ids, output.logprobs, strict=True)]
    reason = "stop" if output.finish_reason == "stop" else "length"
    return Completion(ids, logprobs, reason, head=_head(output.logprobs, top_k) if top_k else None)


def _head(positions: Sequence[Any], top_k: int) -> Head:
    """Return the `top_k` likeliest tokens; beside them a position also has the sampled one, wherever it ranks."""
    ranked = [sorted(at.items(), key=lambda entry: entry[1].rank)[:top_k] for at in positions]
    ids = np.array([[token for token, _ in at] for at in ranked], dtype=np.int32)
    return Head(ids, np.array([[entry.logprob for _, entry in at] for at in ranked], dtype=np.float32))
