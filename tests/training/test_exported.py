"""Adapters that a service has trained, over our base: all of them count, or none do."""

from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from evaluation.errors import InputError
from training.cell import Cell
from training.exports import cast_weights
from training.lora import ADAPTER, CONFIG, exported

SHIPPED = Path(__file__).resolve().parents[2] / "training" / "toy_model"
CELL = Cell(model="toy", benchmark="toy", arm="nobuf", lr=1e-3, steps=2, stride=2, lora_rank=4)


def base() -> Any:
    return AutoModelForCausalLM.from_pretrained(SHIPPED, dtype=torch.float32)


def export(folder: Path, **words: Any) -> dict[str, torch.Tensor]:
    """Write adapters that say something, as peft does; return what the whole model then weighs."""
    given = {"r": 4, "lora_alpha": 4, "target_modules": "all-linear", "task_type": "CAUSAL_LM", **words}
    model: Any = get_peft_model(base(), LoraConfig(**given))
    torch.manual_seed(0)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if ".lora_B." in name:
                weight.normal_(0, 0.02)
    model.save_pretrained(folder, save_embedding_layers=False)
    return cast_weights(model, torch.float32)


@pytest.mark.parametrize("layers", ["all-linear", ["q_proj", "down_proj"]])
def test_the_adapters_of_an_export_are_merged_whatever_layers_they_sit_in(tmp_path: Path, layers: Any) -> None:
    expected = export(tmp_path, target_modules=layers)
    found, shipped = cast_weights(exported(base(), CELL, tmp_path), torch.float32), base().state_dict()
    assert found.keys() == expected.keys() and all(torch.equal(found[k], expected[k]) for k in expected)
    moved = {k for k in found if not torch.equal(found[k], shipped[k])}
    assert {k.split(".")[-2] for k in moved} >= {"q_proj", "down_proj"}


def rename(folder: Path, old: str, new: str) -> None:
    found = load_file(folder / ADAPTER)
    save_file({k.replace(old, new): v for k, v in found.items()}, folder / ADAPTER)


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize(
    ("spoil", "reason"),
    [
        (lambda folder: (folder / CONFIG).unlink(), "has no adapter_config.json"),
        (lambda folder: (folder / ADAPTER).unlink(), "has no adapter_model.safetensors"),
        (lambda folder: rename(folder, "layers.1.", "layers.9."), "has adapters of other layers"),
        (lambda folder: rename(folder, "model.layers", "language_model.layers"), "has adapters of other layers"),
        (lambda folder: export(folder, r=8, lora_alpha=8), "has rank 8 and alpha 8, the cell 4 and 4"),
        (lambda folder: export(folder, lora_alpha=32), "has rank 4 and alpha 32, the cell 4 and 4"),
        (lambda folder: export(folder, target_modules=["q_proj", "lm_head"]), "has an adapter of the head"),
    ],
)
def test_an_export_that_is_not_the_cell_s_is_refused(tmp_path: Path, spoil: Any, reason: str) -> None:
    """peft drops what it does not know, with a warning at most, and we would publish a model that was not trained."""
    export(tmp_path)
    spoil(tmp_path)
    with pytest.raises(InputError, match=reason):
        exported(base(), CELL, tmp_path)
