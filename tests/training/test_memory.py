"""The micro-batch of a GPU: within what is known to fit, and as the reasons of the estimate say."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from evaluation.errors import MachineError
from flows.experiments import EXPERIMENTS
from training import memory
from training.folder import Runtime
from training.memory import bytes_per_position, micro_batch_for, sized

QWEN3_1P7B = SimpleNamespace(
    hidden_size=2048,
    intermediate_size=6144,
    num_hidden_layers=28,
    num_attention_heads=16,
    num_key_value_heads=8,
    head_dim=128,
)
SIZE = 1_720_574_976
FULL: dict[str, Any] = {"parameters": SIZE, "trained": SIZE, "replay": True, "positions": 3072 + 400}


def test_a_position_is_its_checkpoints_one_layer_and_the_heads_input() -> None:
    checkpoints, head = 28 * 2048 * 2, 2 * 2048 * 4
    layer = (3 * 2048 + 2 * (16 + 8) * 128 + 2048 + 4 * 6144) * 2 * 2
    assert bytes_per_position(QWEN3_1P7B) == checkpoints + layer + head
    del_head = SimpleNamespace(**{k: v for k, v in vars(QWEN3_1P7B).items() if k != "head_dim"})
    assert bytes_per_position(del_head) == bytes_per_position(QWEN3_1P7B)


@pytest.mark.parametrize(("gib", "rows"), [(39, 1), (40, 1), (80, 36), (141, 88)])
def test_rows_that_fit_a_device(gib: int, rows: int) -> None:
    """At 22 bytes a parameter 1.7 B take 35 GiB; a row of 3,472 positions of 286,720 bytes takes 0.93 GiB."""
    assert micro_batch_for(QWEN3_1P7B, memory=gib << 30, **FULL) == rows


@pytest.mark.parametrize(("gib", "share", "size"), [(24, 0.0, SIZE), (48, 0.3, SIZE), (80, 0.3, 3_085_938_688)])
def test_a_device_too_small_for_the_weights_is_refused_before_anything_is_sampled(gib, share, size) -> None:
    """By arithmetic: 22 bytes a parameter are 35 and 63 GiB, and 3 GiB more; 0.7 of 48 and 80 GiB are 33.6 and 56."""
    of_size = {**FULL, "parameters": size, "trained": size}
    with pytest.raises(MachineError, match=r"gpu_memory=\d+ GB.*lora_rank"):
        micro_batch_for(QWEN3_1P7B, memory=gib << 30, sampler_share=share, **of_size)


def test_several_processes_leave_room_for_the_gradients_that_they_send() -> None:
    """4 bytes a parameter are 6.4 GiB; four fifths of that are 5.5 rows of 0.93 GiB."""
    assert micro_batch_for(QWEN3_1P7B, memory=80 << 30, **FULL, several=True) == 30


def test_less_is_left_beside_a_sampler_and_more_without_replay_or_with_adapters() -> None:
    plain = micro_batch_for(QWEN3_1P7B, memory=80 << 30, **FULL)
    assert micro_batch_for(QWEN3_1P7B, memory=80 << 30, sampler_share=0.3, **FULL) < plain
    assert micro_batch_for(QWEN3_1P7B, memory=80 << 30, width=4, **FULL) < plain
    assert micro_batch_for(QWEN3_1P7B, memory=80 << 30, **{**FULL, "replay": False}) > plain
    assert micro_batch_for(QWEN3_1P7B, memory=80 << 30, **{**FULL, "trained": 10**7}) > 1.5 * plain


def test_what_is_asked_for_stays_and_the_device_decides_the_rest(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    cell = next(c for c in EXPERIMENTS["full"].cells() if c.terms)
    model: Any = SimpleNamespace(
        config=QWEN3_1P7B, parameters=lambda: [torch.nn.Parameter(torch.empty(SIZE, device="meta"))]
    )
    runtime = Runtime(model_path="m", problems_path="p", device="cuda", sampler="vllm")
    monkeypatch.setattr(memory.torch.cuda, "get_device_properties", lambda _: SimpleNamespace(total_memory=80 << 30))
    expected = micro_batch_for(QWEN3_1P7B, memory=80 << 30, sampler_share=0.3, **{**FULL, "positions": 100 + 3072})
    assert sized(runtime, cell, model, 100).micro_batch == expected
    assert sized(runtime.replace(micro_batch=7), cell, model, 100).micro_batch == 7
    assert sized(runtime.replace(device="cpu"), cell, model, 100).micro_batch == memory.ON_CPU
