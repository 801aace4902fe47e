"""What a cell holds on a device before its first row: arithmetic alone, so that it can be known before torch is."""

VLLM_SHARE = 0.3
"""Of a device, for the engine in TRL's colocate mode: TRL's default."""
WEIGHT_BYTES = 4 + 4 + 8 + 2
"""A trained parameter: fp32 weight and gradient, AdamW's two moments, its bf16 copy under autocast."""
REPLAY_BYTES = 4
"""A trained parameter, where replay's gradient is computed beside GRPO's."""
SAMPLER_BYTES = 4
"""A parameter, where the sampler has weights of its own."""
DDP_BYTES = 4
"""A trained parameter, where several processes average their gradients: the buffers that are sent."""
FROZEN_BYTES = 4 + 2
"""A parameter that is not trained."""
CONSTANT_BYTES = 3 << 30
"""CUDA's context, the fused head's chunk of logits in fp32 and its gradient, sampling's buffers."""


def fixed_bytes(
    parameters: int, trained: int, *, replay: bool, several: bool = False, own_sampler: bool = False
) -> int:
    """Return the bytes that a cell takes whatever its micro-batch.

    Args:
        parameters: of the model.
        trained: of them, how many are trained.
        replay: whether the cell has a replay term.
        several: whether several processes train the cell.
        own_sampler: whether the sampler has weights of its own (a mismatch).
    """
    each = WEIGHT_BYTES + (REPLAY_BYTES if replay else 0) + (DDP_BYTES if several else 0)
    sampler = parameters * SAMPLER_BYTES if own_sampler else 0
    return trained * each + (parameters - trained) * FROZEN_BYTES + sampler + CONSTANT_BYTES
