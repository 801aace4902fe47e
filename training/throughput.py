"""How fast a step was, where there is a GPU: tokens a second, share of the processor's peak, peak memory."""

from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from training.trainer import CellTrainer

PEAK_BF16_FLOPS = {
    "B200": 2250e12,
    "GH200": 989e12,
    "H200": 989e12,
    "H100 PCIe": 756e12,
    "H100": 989e12,
    "A100": 312e12,
    "L40S": 362e12,
    "L4": 121e12,
    "A10G": 70e12,
    "A10": 125e12,
    "RTX 4090": 165e12,
}
"""Dense bf16 FLOPs a second by a part of the device's name, the longer first; NVIDIA's data sheets."""


def peak_flops(device_name: str) -> float | None:
    """Return the device's dense bf16 peak in FLOPs a second; None of one that is not listed."""
    return next((peak for part, peak in PEAK_BF16_FLOPS.items() if part in device_name), None)


def model_flops(num_parameters: int, *, read: int, trained: int, adapters: bool = False) -> float:
    """Return the FLOPs that the model itself needs, without attention's scores and without anything done twice.

    Two a parameter and token of a forward pass, four of a backward pass, of which two are the gradient of the weights
    that a LoRA cell does not need (Kaplan et al. 2020, section 2.1; PaLM, appendix B).

    Args:
        num_parameters: of the whole model.
        read: tokens of forward passes alone: prompts prefilled once a group, and tokens sampled.
        trained: tokens of forward and backward passes.
        adapters: only adapters are trained.
    """
    return num_parameters * (2.0 * read + (4.0 if adapters else 6.0) * trained)


def gpu_figures(trainer: "CellTrainer", seconds: float) -> dict[str, Any]:
    """Return the figures of the step that took `seconds`, and begin the next one's peak memory.

    `tokens_per_second` counts sampled tokens over the whole step; `mfu` is of bf16 cells on a listed device only.
    """
    device, rollouts = trainer.accelerator.device, trainer.step_rollouts
    prompts = {p: len(ids) for p, ids in trainer.prompt_tokens.items()}
    sampled = sum(len(r.token_ids) for r in rollouts)
    prefilled = sum(prompts[p] for p in {r.problem_id for r in rollouts})
    drop = trainer.runtime.drop_zero and trainer.beta == 0
    trained = sum(prompts[r.problem_id] + len(r.token_ids) for r in rollouts if r.advantage or not drop)
    trained += sum(len(r.prompt_ids) + len(r.token_ids) for r in trainer.replayed)
    model = trainer.accelerator.unwrap_model(trainer.model)
    size = sum(p.numel() for p in model.parameters())
    flops = model_flops(size, read=sampled + prefilled, trained=trained, adapters=trainer.cell.lora_rank is not None)
    bf16 = trainer.cell.grpo.compute_dtype == "bfloat16"
    peak = peak_flops(torch.cuda.get_device_name(device)) if bf16 else None
    figures = {
        "tokens_per_second": round(sampled / seconds, 1),
        "mfu": round(flops / (seconds * peak * trainer.processes.count), 4) if peak else None,
        "peak_memory_gib": round(torch.cuda.max_memory_allocated(device) / 2**30, 2),
    }
    torch.cuda.reset_peak_memory_stats(device)
    return figures
