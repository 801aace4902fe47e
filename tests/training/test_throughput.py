"""Figures of a GPU step: formulas against known answers, and the reading of a step with a stand-in for the device."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from training.throughput import gpu_figures, model_flops, peak_flops


@pytest.mark.parametrize(
    ("name", "peak"),
    [
        ("NVIDIA H200", 989e12),
        ("NVIDIA H100 80GB HBM3", 989e12),
        ("NVIDIA H100 PCIe", 756e12),
        ("NVIDIA A100-SXM4-80GB", 312e12),
        ("NVIDIA A10G", 70e12),
        ("NVIDIA L40S", 362e12),
        ("NVIDIA L4", 121e12),
        ("Radeon", None),
    ],
)
def test_the_peak_is_of_the_device_and_of_none_that_is_not_listed(name: str, peak: float | None) -> None:
    assert peak_flops(name) == peak


def test_flops_are_two_a_parameter_and_token_forwards_and_four_backwards() -> None:
    assert model_flops(10, read=3, trained=0) == 60
    assert model_flops(10, read=0, trained=3) == 180
    assert model_flops(10, read=0, trained=3, adapters=True) == 120


@pytest.mark.parametrize(("drop_zero", "trained"), [(True, (3 + 5) + 4), (False, (3 + 5) + (3 + 2) + 4)])
def test_a_step_is_read_off_its_rollouts(monkeypatch: pytest.MonkeyPatch, drop_zero: bool, trained: int) -> None:
    """One prompt of 3 tokens, completions of 5 (with an advantage) and 2 (without), and a replayed rollout of 4."""
    device = {"get_device_name": "NVIDIA H200", "max_memory_allocated": 3 * 2**30, "reset_peak_memory_stats": None}
    for name, value in device.items():
        monkeypatch.setattr(torch.cuda, name, lambda *_, value=value: value)
    model = torch.nn.Linear(9, 11)  # 110 parameters
    trainer: Any = SimpleNamespace(
        accelerator=SimpleNamespace(device="cuda:0", unwrap_model=lambda m: m),
        model=model,
        beta=0,
        runtime=SimpleNamespace(drop_zero=drop_zero),
        processes=SimpleNamespace(count=2),
        cell=SimpleNamespace(lora_rank=None, grpo=SimpleNamespace(compute_dtype="bfloat16")),
        prompt_tokens={"a": [1, 2, 3]},
        step_rollouts=[
            SimpleNamespace(problem_id="a", token_ids=[1] * 5, advantage=1.0),
            SimpleNamespace(problem_id="a", token_ids=[1] * 2, advantage=0.0),
        ],
        replayed=(SimpleNamespace(prompt_ids=(1, 2), token_ids=(3, 4)),),
    )
    seconds = 1e-12
    assert gpu_figures(trainer, seconds) == {
        "tokens_per_second": 7e12,
        "mfu": round(110 * (2 * (7 + 3) + 6 * trained) / (2 * 989), 4),
        "peak_memory_gib": 3.0,
    }
    trainer.cell.grpo.compute_dtype = "float32"
    assert gpu_figures(trainer, seconds)["mfu"] is None
