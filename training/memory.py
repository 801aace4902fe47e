"""How many completions a GPU takes at a time: an estimate from the model's shape, for where nothing else is asked.

TRL's fused head never holds the logits of a whole micro-batch, and gradient checkpointing keeps one tensor a layer; so
what grows with the micro-batch are those, and what one layer holds while it is computed again.
"""

import logging
from typing import Any

import torch

from evaluation.errors import MachineError
from training.cell import Cell
from training.folder import Runtime
from training.footprint import VLLM_SHARE, fixed_bytes
from training.processes import agreed

logger = logging.getLogger(__name__)

ON_CPU = 8
SPARE = 0.8
"""Of what is left: the rest is fragmentation, and the error of the estimate."""


def bytes_per_position(config: Any, width: int = 2, top_k: int = 0) -> int:
    """Return what one token of one row holds in the backward pass with gradient checkpointing.

    Args:
        config: of a decoder in Hugging Face's names (hidden_size, intermediate_size, num_hidden_layers,
            num_attention_heads, num_key_value_heads, and head_dim where it is not their quotient).
        width: bytes of a number, 2 in bf16.
        top_k: size of the sampler's head, where the score is centred: a row of the head's weights each.
    """
    hidden, heads = config.hidden_size, config.num_attention_heads
    head = getattr(config, "head_dim", None) or hidden // heads
    kv = getattr(config, "num_key_value_heads", None) or heads
    attention = 3 * hidden + 2 * (heads + kv) * head  # two norms and the output; queries, keys, values, what they give
    mlp = hidden + 4 * config.intermediate_size  # gate, up, activation, product
    layer = 2 * width * (attention + mlp)  # with a gradient for each
    kept = width * config.num_hidden_layers * hidden
    head_in_fp32 = 2 * 4 * hidden
    return kept + layer + head_in_fp32 + (2 * width * (top_k + 1) * hidden if top_k else 0)


def micro_batch_for(
    config: Any,
    *,
    memory: int,
    parameters: int,
    trained: int,
    replay: bool,
    positions: int,
    sampler_share: float = 0.0,
    width: int = 2,
    several: bool = False,
    own_sampler: bool = False,
    top_k: int = 0,
) -> int:
    """Return how many rows of `positions` tokens fit, at least 1 where the weights themselves fit.

    Args:
        config: as of `bytes_per_position`.
        memory: bytes of the device.
        parameters: of the model.
        trained: of them, how many are trained.
        replay: whether the cell has a replay term.
        positions: longest prompt and longest completion together.
        sampler_share: part of the device that a vLLM engine in this process takes for itself.
        width: bytes of a number.
        several: whether several processes train the cell.
        own_sampler: whether the sampler has weights of its own (a mismatch).
        top_k: as of `bytes_per_position`.

    Raises:
        MachineError: weights, gradients and moments alone are more than the device has.
    """
    fixed = fixed_bytes(parameters, trained, replay=replay, several=several, own_sampler=own_sampler)
    left = memory * (1 - sampler_share) - fixed
    if left <= 0:
        share = f"{memory * (1 - sampler_share) / 1e9:.0f} GB" + (" beside vLLM" if sampler_share else "")
        raise MachineError(
            "gpu_memory",
            share,
            f"weights, gradients and moments of {trained / 1e9:.1f} B trained parameters take {fixed / 1e9:.0f} GB",
            "use a larger GPU, or train adapters (`lora_rank` of the experiment)",
        )
    return max(1, int(SPARE * left / (positions * bytes_per_position(config, width, top_k))))


def sized(runtime: Runtime, cell: Cell, model: Any, longest_prompt: int) -> Runtime:
    """Return the runtime with a micro-batch, chosen by the smallest device's memory where none is asked for."""
    if runtime.micro_batch is not None:
        return runtime
    if not runtime.device.startswith("cuda"):
        return runtime.replace(micro_batch=ON_CPU)
    sizes = [(p.numel(), p.requires_grad) for p in model.parameters()]
    rows = micro_batch_for(
        model.config,
        memory=torch.cuda.get_device_properties(torch.device(runtime.device)).total_memory,
        parameters=sum(n for n, _ in sizes),
        trained=sum(n for n, trained in sizes if trained),
        replay=cell.replay is not None,
        positions=longest_prompt + cell.grpo.max_new_tokens,
        sampler_share=VLLM_SHARE if runtime.sampler == "vllm" else 0.0,
        width=2 if cell.grpo.compute_dtype == "bfloat16" else 4,
        several=runtime.num_processes > 1,
        own_sampler=cell.mismatch is not None,
        top_k=cell.center.top_k if cell.center else 0,
    )
    rows = min(agreed(runtime).gather([rows]))
    logger.info("micro-batches of %d completions, by the memory of the device", rows)
    return runtime.replace(micro_batch=rows)
