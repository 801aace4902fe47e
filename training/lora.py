"""LoRA: adapters on every linear layer but the head train, in fp32; the base stays as it was; what leaves is whole.

Weights are merged out of place only: W + alpha / rank x B A, in new tensors. peft's `merge_adapter`, and with it TRL's
vLLM sync, merges into the live weights and takes the product off again, which rounds the base a little every time (of
a bf16 base 59 % has moved after 100 syncs, of a fp32 one by 1e-7). Left out: adapters on embeddings, dropout, quantised
bases.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, PeftModel, get_peft_model, get_peft_model_state_dict, set_peft_model_state_dict
from peft.tuners.lora import LoraLayer
from safetensors import SafetensorError
from safetensors.torch import load_file

from evaluation.errors import InputError
from evaluation.generation import row_seed
from training.cell import Cell

CONFIG, ADAPTER = "adapter_config.json", "adapter_model.safetensors"
"""peft's files; Trainer leaves the second in a resume state."""


def adapt(model: Any, cell: Cell, resume: Path | None = None) -> PeftModel:
    """Give a base model (on the CPU) the cell's adapters: new ones, or those of a resume state.

    New ones add nothing yet (B is zero). Each A is a function of the cell's seed and the layer's name alone, with the
    distribution that peft gives it.

    Raises:
        InputError: the resume state has other adapters than the cell.
    """
    assert cell.lora_rank is not None and cell.lora_alpha is not None
    config = LoraConfig(
        r=cell.lora_rank,
        lora_alpha=cell.lora_alpha,
        lora_dropout=0.0,
        bias="none",
        target_modules="all-linear",  # but for the head, which peft leaves out and TRL refuses
        task_type="CAUSAL_LM",
    )
    adapted: Any = get_peft_model(model, config)
    # With a name peft would ask the hub at every save whether the vocabulary has grown; it cannot have.
    adapted.peft_config["default"].base_model_name_or_path = ""
    adapted.create_or_update_model_card = lambda output_dir: None  # a resume state is not for the hub
    for name, weight in adapted.named_parameters():
        if ".lora_A." in name:
            key = torch.Generator().manual_seed(row_seed(cell.seed, "adapter", name, 0))
            torch.nn.init.kaiming_uniform_(weight, a=math.sqrt(5), generator=key)
    if resume is not None:
        _load(adapted, resume / ADAPTER)
    return adapted


def _load(adapted: PeftModel, file: Path) -> None:
    """Take the adapters of a resume state; peft itself would pass over one that is missing."""
    try:
        found = load_file(file)
    except (OSError, SafetensorError) as e:
        raise InputError("resume", file, " ".join(str(e).split())[:200], "remove this resume state") from e
    expected = get_peft_model_state_dict(adapted, save_embedding_layers=False)
    if {k: v.shape for k, v in found.items()} != {k: v.shape for k, v in expected.items()}:
        raise InputError("resume", file, "has other adapters than the cell", "remove this resume state")
    set_peft_model_state_dict(adapted, found)


def exported(model: Any, cell: Cell, folder: Path) -> PeftModel:
    """Give a base model the adapters that somebody else has trained for a cell, in peft's format.

    They may sit in other layers than ours; a layer that the folder does not name keeps the base's weight.

    Raises:
        InputError: there are none, one is for the head or a layer that the base does not have, or they count otherwise
            than the cell's.
    """
    for name in (CONFIG, ADAPTER):
        if not (folder / name).is_file():
            raise InputError("adapters", folder, f"has no {name}", "name a folder of peft's")
    adapted = PeftModel.from_pretrained(model, str(folder))
    lost = load_file(folder / ADAPTER).keys() - get_peft_model_state_dict(adapted, save_embedding_layers=False).keys()
    if lost:  # peft only warns
        raise InputError("adapters", folder, f"has adapters of other layers ({min(lost)})", "use another base")
    if isinstance(plain(adapted).get_output_embeddings(), LoraLayer):
        raise InputError("adapters", folder, "has an adapter of the head, which may be tied", "train without it")
    config: Any = adapted.peft_config["default"]
    if (config.r, config.lora_alpha) != (cell.lora_rank, cell.lora_alpha):
        found = f"has rank {config.r} and alpha {config.lora_alpha}, the cell {cell.lora_rank} and {cell.lora_alpha}"
        raise InputError("adapters", folder, found, "train with the cell's")
    return adapted


def plain(model: Any) -> Any:
    """Return the transformers model that the adapters sit in, or what was given if there are none."""
    return model.get_base_model() if isinstance(model, PeftModel) else model


@dataclass(frozen=True)
class Weight:
    """One weight of the policy, by its name in the model without adapters."""

    name: str
    live: torch.Tensor
    """As it is in training; the base's own where there is an adapter."""
    layer: Any = None
    """The layer whose adapter changes it, if any."""

    def merged(self) -> torch.Tensor:
        """Return the weight with its adapter's part in a new tensor; without one, the live tensor."""
        if self.layer is None:
            return self.live
        delta: torch.Tensor = self.layer.get_delta_weight("default")
        return self.live + delta.detach()


def weights(model: Any) -> Iterator[Weight]:
    """Yield everything that a complete model folder holds, tied weights under each of their names."""
    bare = plain(model)
    layers = {f"{n}.weight": m for n, m in bare.named_modules() if isinstance(m, LoraLayer)}
    for name, tensor in bare.state_dict().items():
        if ".lora_" not in name:
            own = _own_name(name)
            yield Weight(own, tensor.detach(), layers.get(own))


def _own_name(name: str) -> str:
    return name.replace(".base_layer.", ".")


def sync_out_of_place(generation: Any, model: Any) -> None:
    """Let TRL's `VLLMGeneration` read merged copies, one at a time, where it would merge into the live weights.

    Each parameter once, as vLLM wants it: a tied head comes with the embedding.
    """

    def named_params() -> Iterator[tuple[str, torch.Tensor]]:
        once = {_own_name(name) for name, _ in plain(model).named_parameters()}
        for weight in weights(model):
            if weight.name in once:
                yield generation._fix_param_name_to_vllm(weight.name), weight.merged()

    if isinstance(model, PeftModel):
        generation._iter_named_params = named_params
