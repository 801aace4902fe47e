"""From a model in memory to a complete, checked Hugging Face folder."""

from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from transformers import AutoModelForCausalLM, GenerationConfig

from evaluation.files import whole_folder
from evaluation.manifests import Provenance, write_manifest
from training.lora import plain, weights

NEEDED = ("config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json")
MAX_SHARD = "1GB"
"""A file is the unit of resuming an upload."""


class NonFiniteWeights(RuntimeError):
    """A tensor holds NaN or infinity: the run has diverged."""


def export_checkpoint(
    model: Any, tokenizer: Any, out: Path, *, dtype: str, stop_ids: tuple[int, ...], provenance: Provenance
) -> None:
    """Write `out` as a complete model directory with its manifest, under another name and renamed when checked.

    Args:
        model: the policy (fp32 weights; left as it is), with adapters or without: published is what they make.
        tokenizer: saved beside it.
        out: `global_step_N`.
        dtype: `bfloat16` or `float32`, of the published weights.
        stop_ids: written into generation_config.json, so that other tools stop where we do.
        provenance: of the manifest.

    Raises:
        NonFiniteWeights: a tensor is not finite.
        ValueError: the written folder does not load completely.
    """
    target = getattr(torch, dtype)
    with whole_folder(out) as partial:
        plain(model).save_pretrained(partial, state_dict=cast_weights(model, target), max_shard_size=MAX_SHARD)
        config = type(model.config).from_dict({**model.config.to_dict(), "dtype": dtype})
        config.save_pretrained(partial)
        stops = stop_ids[0] if len(stop_ids) == 1 else list(stop_ids)
        GenerationConfig(eos_token_id=stops, pad_token_id=tokenizer.pad_token_id).save_pretrained(partial)
        tokenizer.save_pretrained(partial)
        check_folder(partial)
        write_manifest(partial, "checkpoint", provenance)


def cast_weights(model: Any, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """Return the weights in `dtype`, adapters merged; what was tied stays one tensor, or it would be stored twice.

    Tied is what shares its live tensor: a merged one is gone when the next comes, which may take its address.
    """
    state, cast = {}, {}
    for weight in weights(model):
        key = (weight.live.data_ptr(), weight.live.shape)
        if key not in cast:
            cast[key] = weight.merged().to(dtype)
        state[weight.name] = cast[key]
    return state


def check_folder(folder: Path) -> None:
    """Refuse a model folder that lacks a file, holds a non-finite tensor or does not load every weight."""
    absent = [n for n in NEEDED if not (folder / n).is_file()]
    if absent:
        raise ValueError(f"{folder}: lacks {', '.join(absent)}")
    for file in sorted(folder.glob("*.safetensors")):
        with safe_open(file, framework="pt") as tensors:
            for name in tensors.keys():  # noqa: SIM118  safe_open is not a mapping
                if not bool(torch.isfinite(tensors.get_tensor(name)).all()):
                    raise NonFiniteWeights(f"{file.name}: {name} is not finite")
    loaded: Any = AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True)
    _, info = loaded
    wrong = {k: sorted(info[k]) for k in ("missing_keys", "unexpected_keys", "mismatched_keys") if info.get(k)}
    if wrong:
        raise ValueError(f"{folder}: does not load completely: {wrong}")
