"""Published checkpoints: complete folders in the published dtype that load alone, or no folder at all."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig, Qwen3Config, Qwen3ForCausalLM

from evaluation.errors import InputError
from evaluation.manifests import Provenance, is_complete, read_manifest
from training.exports import NonFiniteWeights, check_folder, export_checkpoint
from training.run import load_model

SHIPPED = Path(__file__).resolve().parents[2] / "training" / "toy_model"
Export = Callable[..., Path]


def tiny(tied: bool) -> Qwen3ForCausalLM:
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=60,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        max_position_embeddings=64,
        tie_word_embeddings=tied,
    )
    return Qwen3ForCausalLM(config)


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return AutoTokenizer.from_pretrained(SHIPPED)


@pytest.fixture
def export(tokenizer: Any, tmp_path: Path) -> Export:
    """`export(model, dtype=, stop_ids=)`: write global_step_30 and return it."""

    def go(model: Any, dtype: str = "float32", stop_ids: tuple[int, ...] = (1,)) -> Path:
        out = tmp_path / "global_step_30"
        provenance = Provenance(cell="c", global_step=30, fingerprint="f")
        export_checkpoint(model, tokenizer, out, dtype=dtype, stop_ids=stop_ids, provenance=provenance)
        return out

    return go


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("tied", [True, False])
def test_a_folder_is_complete_and_gives_back_the_model_in_the_published_dtype(
    export: Export, tokenizer: Any, dtype: str, tied: bool
) -> None:
    model = tiny(tied)
    out = export(model, dtype)
    assert is_complete(out)
    manifest = read_manifest(out)
    assert manifest is not None
    assert (manifest.kind, manifest.global_step, manifest.cell) == ("checkpoint", 30, "c")
    loaded, info = AutoModelForCausalLM.from_pretrained(out, output_loading_info=True)
    assert not any(info[k] for k in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    assert loaded.dtype == getattr(torch, dtype)
    assert json.loads((out / "config.json").read_text())["dtype"] == dtype
    mine = {k: v.to(loaded.dtype) for k, v in model.state_dict().items()}
    theirs = loaded.state_dict()
    assert mine.keys() == theirs.keys()
    assert all(torch.equal(mine[k], theirs[k]) for k in mine)
    stored = load_file(out / "model.safetensors")
    assert ("lm_head.weight" in stored) is not tied  # a tied head is stored once
    assert (loaded.lm_head.weight.data_ptr() == loaded.model.embed_tokens.weight.data_ptr()) is tied
    assert AutoTokenizer.from_pretrained(out).get_vocab() == tokenizer.get_vocab()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_model_in_training_is_left_as_it_is(export: Export, dtype: str) -> None:
    model = tiny(tied=True)
    before = {k: v.clone() for k, v in model.state_dict().items()}
    export(model, dtype)
    assert model.dtype == torch.float32
    assert all(torch.equal(before[k], v) for k, v in model.state_dict().items())
    assert model.config.dtype in {torch.float32, None, "float32"}


@pytest.mark.parametrize(("stop_ids", "written"), [((1,), 1), ((1, 7), [1, 7])])
def test_other_tools_stop_where_we_do(
    export: Export, tokenizer: Any, stop_ids: tuple[int, ...], written: int | list[int]
) -> None:
    found = GenerationConfig.from_pretrained(export(tiny(tied=True), stop_ids=stop_ids))
    assert found.eos_token_id == written
    assert found.pad_token_id == tokenizer.pad_token_id


@pytest.mark.parametrize("value", [float("nan"), float("inf"), 3.4e38])
def test_what_is_not_finite_in_the_published_dtype_is_never_published(
    export: Export, tmp_path: Path, value: float
) -> None:
    """3.4e38 is a float32 that rounds to infinity in bfloat16."""
    model = tiny(tied=True)
    with torch.no_grad():
        model.model.layers[1].mlp.up_proj.weight[3, 4] = value
    with pytest.raises(NonFiniteWeights, match=r"up_proj\.weight"):
        export(model, "bfloat16")
    assert not (tmp_path / "global_step_30").exists()


def rewrite(out: Path, change: Callable[[dict[str, torch.Tensor]], dict[str, torch.Tensor]]) -> None:
    file = out / "model.safetensors"
    save_file(change(load_file(file)), file, metadata={"format": "pt"})


CHANGES: list[Callable[[dict[str, torch.Tensor]], dict[str, torch.Tensor]]] = [
    lambda s: {f"_orig_mod.{k}": v for k, v in s.items()},
    lambda s: {f"module.{k}": v for k, v in s.items()},
    lambda s: {k: v for k, v in s.items() if ".layers.1." not in k},
]


@pytest.mark.parametrize("change", CHANGES, ids=["compiled prefix", "wrapper prefix", "half of the layers"])
def test_weights_that_transformers_would_make_up_are_refused(
    export: Export, change: Callable[[dict[str, torch.Tensor]], dict[str, torch.Tensor]]
) -> None:
    """CHECKPOINT-093: loading says nothing and fills in random weights; neither export nor training may."""
    out = export(tiny(tied=True))
    rewrite(out, change)
    with pytest.raises(ValueError, match="does not load completely"):
        check_folder(out)
    with pytest.raises(InputError, match="weights are missing"):
        load_model(str(out), None)


def test_a_config_that_unties_a_head_without_weights_is_refused(export: Export) -> None:
    """CHECKPOINT-094."""
    out = export(tiny(tied=True))
    config = json.loads((out / "config.json").read_text())
    (out / "config.json").write_text(json.dumps({**config, "tie_word_embeddings": False}))
    with pytest.raises(InputError, match=r"lm_head\.weight"):
        load_model(str(out), None)


@pytest.mark.parametrize("name", ["config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json"])
def test_a_folder_without_one_of_its_files_is_refused(export: Export, name: str) -> None:
    out = export(tiny(tied=True))
    (out / name).unlink()
    with pytest.raises(ValueError, match=name):
        check_folder(out)


def test_training_starts_from_float32_whatever_is_stored(export: Export) -> None:
    """In bf16 an update at 1e-6 is lost for nearly every weight."""
    model, tokenizer = load_model(str(export(tiny(tied=True), "bfloat16")), None)
    assert {p.dtype for p in model.parameters()} == {torch.float32}
    assert tokenizer.padding_side == "left"
    assert tokenizer.pad_token_id is not None


def test_a_model_that_is_not_there_is_one_line(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="model_path"):
        load_model(str(tmp_path / "nothing"), None)
