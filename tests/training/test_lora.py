"""LoRA cells: adapters alone train, the base never moves, and what is published is a complete, merged model."""

import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoTokenizer, Qwen3Config, Qwen3ForCausalLM
from trl.generation.vllm_generation import VLLMGeneration

from evaluation.errors import InputError
from evaluation.judge import Judge
from evaluation.manifests import Provenance
from evaluation.problems import read_problems
from training.callbacks import Diverged
from training.cell import Cell
from training.exports import export_checkpoint
from training.folder import RunFolder
from training.guard import Guard
from training.lora import ADAPTER, adapt, plain, sync_out_of_place, weights
from training.run import main, read_folder
from training.trainer import CellTrainer

Make = Callable[..., RunFolder]
SHIPPED = Path(__file__).resolve().parents[2] / "training" / "toy_model"
CELL = Cell(model="toy", benchmark="toy", arm="nobuf", lr=1e-3, steps=4, stride=2, lora_rank=4)
LINEAR = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


@pytest.fixture(autouse=True)
def our_process() -> Iterator[None]:
    """These cells train in this process: give its signal handlers and threads back."""
    handlers = {s: signal.getsignal(s) for s in (signal.SIGTERM, signal.SIGINT)}
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    for number, handler in handlers.items():
        signal.signal(number, handler)
    torch.set_num_threads(threads)


def tiny(tied: bool = True, layers: int = 2) -> Qwen3ForCausalLM:
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=60,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        max_position_embeddings=64,
        tie_word_embeddings=tied,
    )
    return Qwen3ForCausalLM(config).eval()


def moved(cell: Cell = CELL, tied: bool = True, layers: int = 2) -> PeftModel:
    """Return a tiny model whose adapters have some weight, as after training."""
    adapted = adapt(tiny(tied, layers), cell).eval()
    torch.manual_seed(1)
    with torch.no_grad():
        for name, weight in adapted.named_parameters():
            if ".lora_B." in name:
                weight.normal_(0, 0.05)
    return adapted


def copied(model: Any) -> dict[str, torch.Tensor]:
    return {k: v.clone() for k, v in model.state_dict().items()}


def same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[k], other[k]) for k in one)


def adapters(model: Any) -> dict[str, torch.Tensor]:
    return {k: v for k, v in copied(model).items() if ".lora_" in k}


def logits(model: Any) -> torch.Tensor:
    with torch.no_grad():
        return model(input_ids=torch.arange(40).reshape(2, 20)).logits


def export(model: Any, out: Path, dtype: str = "float32") -> Path:
    tokenizer, provenance = AutoTokenizer.from_pretrained(SHIPPED), Provenance(cell="c", global_step=2, fingerprint="f")
    export_checkpoint(model, tokenizer, out, dtype=dtype, stop_ids=(1,), provenance=provenance)
    return out


def test_adapters_are_a_function_of_the_seed_alone_and_begin_by_adding_nothing() -> None:
    first = adapt(tiny(), CELL)
    torch.manual_seed(12345)
    torch.rand(7)
    assert same(adapters(first), adapters(adapt(tiny(), CELL)))
    other = adapters(adapt(tiny(), CELL.replace(seed=1)))
    for name, tensor in adapters(first).items():
        if ".lora_A." in name:
            assert not torch.equal(tensor, other[name])
            assert 0 < tensor.abs().max() <= tensor.shape[1] ** -0.5  # peft's: uniform within 1 / sqrt(inputs)
        else:
            assert not tensor.any()
    assert torch.equal(logits(first.eval()), logits(tiny()))


def test_only_float32_adapters_of_every_linear_layer_but_the_head_are_trained() -> None:
    trained = {n: p for n, p in adapt(tiny(), CELL).named_parameters() if p.requires_grad}
    expected = {
        f"base_model.model.model.layers.{i}.{'mlp' if x.endswith(('e_proj', 'up_proj', 'down_proj')) else 'self_attn'}"
        f".{x}.lora_{part}.default.weight"
        for i in range(2)
        for x in LINEAR
        for part in "AB"
    }
    assert trained.keys() == expected
    assert {p.dtype for p in trained.values()} == {torch.float32}
    assert {p.shape[0] for n, p in trained.items() if ".lora_A." in n} == {4}


def test_alpha_over_rank_scales_what_the_adapters_add() -> None:
    base = {w.name: w.merged() for w in weights(tiny())}
    once = {w.name: w.merged() for w in weights(moved())}
    twice = {w.name: w.merged() for w in weights(moved(CELL.replace(lora_alpha=8)))}
    assert base.keys() == once.keys() == twice.keys()
    adapted = [n for n in base if any(x in n for x in LINEAR)]
    assert len(adapted) == 14
    for name in adapted:
        assert (once[name] - base[name]).norm() > 0
        torch.testing.assert_close(twice[name] - base[name], 2 * (once[name] - base[name]), atol=1e-6, rtol=1e-5)
    assert all(torch.equal(once[n], base[n]) for n in base.keys() - set(adapted))


@pytest.mark.parametrize("tied", [True, False])
def test_the_published_model_is_complete_and_says_what_the_live_one_says(tmp_path: Path, tied: bool) -> None:
    live = moved(tied=tied)
    before = copied(live)
    out = export(live, tmp_path / "global_step_2")
    assert same(copied(live), before)  # bit for bit
    loaded, info = AutoModelForCausalLM.from_pretrained(out, output_loading_info=True)
    assert not any(info[k] for k in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    assert type(loaded) is Qwen3ForCausalLM
    assert (logits(loaded) - logits(live)).abs().max() <= 1e-5
    assert (logits(live) - logits(tiny(tied))).abs().max() > 1e-2
    stored = load_file(out / "model.safetensors")
    assert ("lm_head.weight" in stored) is not tied
    assert (loaded.lm_head.weight.data_ptr() == loaded.model.embed_tokens.weight.data_ptr()) is tied
    assert not any("lora" in k or "base_layer" in k for k in stored)
    assert not list(out.glob("adapter*"))


def test_published_in_another_dtype_every_weight_is_its_own(tmp_path: Path) -> None:
    """A merged weight is gone once it is cast, and the next of its shape may be put at its address."""
    live = moved(tied=False, layers=12)
    loaded = AutoModelForCausalLM.from_pretrained(export(live, tmp_path / "global_step_2", "bfloat16"))
    assert loaded.dtype == torch.bfloat16
    expected = {w.name: w.merged().bfloat16() for w in weights(live)}
    assert same(loaded.state_dict(), expected)
    assert next(live.parameters()).dtype == torch.float32


def test_a_resume_state_gives_back_the_adapters_and_another_cells_are_refused(tmp_path: Path) -> None:
    live = moved()
    live.save_pretrained(tmp_path)
    assert {p.name for p in tmp_path.iterdir()} == {ADAPTER, "adapter_config.json"}
    assert same(adapters(adapt(tiny(), CELL, tmp_path)), adapters(live))
    with pytest.raises(InputError, match="other adapters than the cell"):
        adapt(tiny(), CELL.replace(lora_rank=8), tmp_path)
    tensors = load_file(tmp_path / ADAPTER)
    tensors.popitem()
    save_file(tensors, tmp_path / ADAPTER)
    with pytest.raises(InputError, match="other adapters than the cell"):
        adapt(tiny(), CELL, tmp_path)
    (tmp_path / ADAPTER).write_bytes(b"{")
    with pytest.raises(InputError, match="resume="):
        adapt(tiny(), CELL, tmp_path)


class Engine:
    """What TRL's sync touches of a colocated vLLM; keeps the weights that it is given."""

    def __init__(self) -> None:
        self.llm_engine = self.model_executor = self.driver_worker = self.model_runner = self.model = self
        self.got: list[tuple[str, torch.Tensor]] = []

    def load_weights(self, pairs: list[tuple[str, torch.Tensor]]) -> None:
        self.got += [(n, t.clone()) for n, t in pairs]

    def reset_prefix_cache(self) -> None:
        """Forget nothing."""


@pytest.mark.parametrize("tied", [True, False])
def test_vllm_gets_merged_weights_and_the_live_ones_are_left_alone(tied: bool) -> None:
    """TRL's own sync of the same model, which merges and unmerges, is the reference for names and values."""
    found = []
    for ours in (True, False):
        live = moved(tied=tied)
        generation: Any = VLLMGeneration.__new__(VLLMGeneration)
        generation.mode, generation.enable_sleep_mode = "colocate", False
        generation.model, generation.llm, generation.accelerator = live, Engine(), None
        generation._dist = Undistributed()
        if ours:
            sync_out_of_place(generation, live)
        before = copied(live)
        generation.sync_weights()
        found.append(dict(generation.llm.got))
        assert len(found[-1]) == len(generation.llm.got)
        if ours:
            assert same(copied(live), before)
    mine, theirs = found
    assert mine.keys() == theirs.keys()
    for name in mine:
        torch.testing.assert_close(mine[name], theirs[name], atol=1e-6, rtol=0)


class Undistributed:
    """One process: nothing to gather."""

    is_fsdp = False

    def gather_params(self, params: list[Any]) -> "Undistributed":
        return self

    def __enter__(self) -> None:
        """Do nothing."""

    def __exit__(self, *_: object) -> None:
        """Do nothing."""


def test_a_model_without_adapters_is_synced_as_trl_does() -> None:
    generation: Any = VLLMGeneration.__new__(VLLMGeneration)
    sync_out_of_place(generation, tiny())
    assert generation._iter_named_params.__func__ is VLLMGeneration._iter_named_params


@pytest.fixture
def build(
    make_run: Make, make_trainer: Callable[..., CellTrainer], tmp_path: Path
) -> Iterator[Callable[..., CellTrainer]]:
    """`build(**cell fields)`: a trainer at its first step, rank 4 on the shipped model, with replay."""
    judges: list[Judge] = []

    def go(**changes: Any) -> CellTrainer:
        folder = make_run(tmp_path / "run", **{"arm": "hardcd_lam0p1", "lora_rank": 4, "lr": 5e-3, **changes})
        _, runtime = read_folder(folder)
        problems = read_problems(Path(runtime.problems_path))
        judges.append(Judge(problems, suites="reward", workers=1).__enter__())
        return make_trainer(folder, judges[-1])

    yield go
    for judge in judges:
        judge.__exit__(None, None, None)


def test_training_moves_every_adapter_and_no_weight_of_the_base(build: Callable[..., CellTrainer]) -> None:
    """Through sampling, replay, a save and a checkpoint; the last of them says what the live model says."""
    trainer = build(steps=3, stride=3)
    before, given = copied(trainer.model), load_file(SHIPPED / "model.safetensors")
    trainer.train()
    after = copied(trainer.model)
    for name, tensor in after.items():
        assert torch.equal(tensor, before[name]) is (".lora_" not in name), name
    live = {w.name: w.live for w in weights(trainer.model)}
    assert all(torch.equal(live[k], given[k].float()) for k in given)
    adapted = sum(p.numel() for n, p in trainer.model.named_parameters() if ".lora_" in n)
    held = trainer.optimizer.state  # accelerate's wrapper shows the optimizer's own
    assert sum(s["exp_avg"].numel() for s in held.values()) == adapted
    assert {s["exp_avg"].dtype for s in held.values()} == {torch.float32}
    published = AutoModelForCausalLM.from_pretrained(trainer.folder.checkpoint(3))
    assert (logits(published) - logits(trainer.model.eval())).abs().max() <= 1e-5
    assert (logits(published) - logits(AutoModelForCausalLM.from_pretrained(SHIPPED))).abs().max() > 1e-4


def test_rollouts_are_drawn_from_the_adapted_model(build: Callable[..., CellTrainer]) -> None:
    """The log-probs that the sampler wrote are those of the model with its adapters."""
    trainer = build()
    with torch.no_grad():
        torch.manual_seed(0)
        for name, weight in trainer.model.named_parameters():
            if ".lora_B." in name:
                weight.normal_(0, 0.02)
    rows = list(trainer.train_dataset)[:4]
    trainer._generate_and_score_completions([row for row in rows for _ in range(4)])
    gaps = {"adapted": 0.0, "base": 0.0}
    for rollout in trainer.step_rollouts[::4]:
        prompt = trainer.prompt_tokens[rollout.problem_id]
        ids, drawn = torch.tensor([[*prompt, *rollout.token_ids]]), torch.tensor(rollout.token_ids)
        for which in gaps:
            with torch.no_grad(), trainer.model.disable_adapter() if which == "base" else torch.no_grad():
                found = trainer.model(input_ids=ids).logits[0, len(prompt) - 1 : -1].log_softmax(-1)
            mine = found.gather(1, drawn[:, None])[:, 0]
            gaps[which] = max(gaps[which], float((mine - torch.tensor(rollout.logprobs)).abs().max()))
    assert gaps["adapted"] < 1e-4 < 1e-2 < gaps["base"]


def test_the_guard_looks_at_adapters_and_their_gradients(build: Callable[..., CellTrainer]) -> None:
    trainer = build()
    guard = next(c for c in trainer.callback_handler.callbacks if isinstance(c, Guard))
    trainer.row["loss"] = 0.0
    weight = next(p for n, p in trainer.model.named_parameters() if ".lora_B." in n)
    weight.grad = torch.full_like(weight, torch.inf)
    with pytest.raises(Diverged, match="gradient"):
        guard.on_pre_optimizer_step(trainer.args, trainer.state, trainer.control, model=trainer.model)
    with torch.no_grad():
        weight[0, 0] = torch.nan
    with pytest.raises(Diverged, match="weight"):
        guard.on_log(trainer.args, trainer.state, trainer.control, model=trainer.model, logs={"grad_norm": 1.0})


def test_a_base_that_is_not_finite_diverges_as_ever(make_run: Make, tmp_path: Path) -> None:
    base = AutoModelForCausalLM.from_pretrained(SHIPPED)
    with torch.no_grad():
        base.model.layers[0].mlp.down_proj.weight[0, 0] = torch.nan
    base.save_pretrained(tmp_path / "model")
    AutoTokenizer.from_pretrained(SHIPPED).save_pretrained(tmp_path / "model")
    folder = make_run(tmp_path / "run", lora_rank=4, runtime={"model_path": str(tmp_path / "model")})
    assert main([str(folder.root)]) == 0
    assert '"diverged"' in folder.result_json.read_text()
    assert folder.checkpoints() == folder.resumes() == []


def test_what_has_no_adapters_is_returned_as_it_is() -> None:
    model = tiny()
    assert plain(model) is model
    assert plain(adapt(model, CELL)) is model
