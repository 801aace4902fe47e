"""The trainer against stock TRL, its replay gradient against an unpadded reference, and every explicit setting."""

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
import torch
from datasets import Dataset
from trl import GRPOTrainer
from trl.trainer import grpo_trainer

from evaluation.judge import Judge
from evaluation.problems import read_problems
from flows.experiments import EXPERIMENTS
from training.buckets import arrange
from training.config import grpo_config
from training.folder import RunFolder, Runtime
from training.grpo import Grpo
from training.order import stream_seed
from training.run import load_model, read_folder
from training.trainer import CellTrainer

Make = Callable[..., RunFolder]
TINY = Grpo(prompts_per_step=4, rollouts_per_prompt=4, max_new_tokens=48, compute_dtype="float32")


@pytest.fixture(autouse=True, scope="module")
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def judge(make_run: Make, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Judge]:
    folder = make_run(tmp_path_factory.mktemp("judged") / "run")
    _, runtime = read_folder(folder)
    with Judge(read_problems(Path(runtime.problems_path)), suites="reward", workers=1) as judge:
        yield judge


@pytest.fixture
def build(
    make_run: Make, make_trainer: Callable[..., CellTrainer], judge: Judge, tmp_path: Path
) -> Callable[..., CellTrainer]:
    """`build(name, **cell and runtime fields)`: a trainer at its first step, on the shipped model."""

    def go(name: str, **changes: Any) -> CellTrainer:
        trainer = make_trainer(make_run(tmp_path / name, **changes), judge)
        trainer.current_gradient_accumulation_steps = trainer.args.gradient_accumulation_steps
        trainer.model.train()
        return trainer

    return go


def batch_of(trainer: CellTrainer) -> list[dict[str, Any]]:
    """Return the rows of a step as TRL's data loader hands them over: each prompt repeated for its group."""
    rows = list(trainer.train_dataset)[: trainer.cell.grpo.prompts_per_step]
    return [row for row in rows for _ in range(trainer.num_generations)]


def gradients(trainer: CellTrainer) -> torch.Tensor:
    return torch.cat([p.grad.flatten() for p in trainer.model.parameters()])


def weights(model: Any) -> dict[str, torch.Tensor]:
    return {k: v.clone() for k, v in model.state_dict().items()}


def test_loss_and_gradient_without_a_term_are_stock_bit_for_bit(build: Callable[..., CellTrainer]) -> None:
    trainer = build("stock", runtime={"drop_zero": False, "bucket": False, "lean_head": False})
    batch = trainer._generate_and_score_completions(batch_of(trainer))
    assert batch["advantages"].count_nonzero() > 0
    results = []
    for compute in (lambda m, b: GRPOTrainer._compute_loss(trainer, m, b), trainer._compute_loss):
        trainer.model.zero_grad()
        loss = compute(trainer.model, batch)
        loss.backward()
        results.append((loss.detach(), gradients(trainer)))
    assert torch.equal(results[0][0], results[1][0])
    assert torch.equal(results[0][1], results[1][1])
    assert results[0][1].norm() > 0


def losses_and_gradient(
    trainer: CellTrainer, batches: list[dict[str, Any]], lean: bool = False
) -> tuple[float, torch.Tensor]:
    """Return the sum of the micro-batches' losses by TRL's own code, and its gradient; with our head, if `lean`."""
    trainer.runtime = trainer.runtime.replace(lean_head=lean)
    trainer.model.zero_grad()
    total = 0.0
    for batch in batches:
        loss = GRPOTrainer._compute_loss(trainer, trainer.model, batch)
        loss.backward()
        total += loss.item()
    return total, gradients(trainer)


@pytest.mark.parametrize("seed", [0, 1, 2])
@pytest.mark.parametrize(("micro", "prompts"), [(16, 4), (4, 4), (8, 2), (1, 2)])
def test_arranged_micro_batches_have_stock_s_loss_and_gradient(
    build: Callable[..., CellTrainer], seed: int, micro: int, prompts: int
) -> None:
    """Also where the longest completions have no advantage and are left out: to float rounding, 1e-5 in fp32."""
    grpo = TINY.replace(prompts_per_step=prompts)
    trainer = build(f"arranged{seed}", seed=seed, grpo=grpo, runtime={"micro_batch": micro})
    assert trainer.args.per_device_train_batch_size == min(micro, 4 * prompts)
    seen: list[list[dict[str, Any]]] = []
    stock_split = grpo_trainer.split_tensor_dict

    def keep(whole: dict[str, Any], count: int) -> list[dict[str, Any]]:
        whole["advantages"] = torch.where(whole["advantages"] == 0, 0.25, whole["advantages"])
        whole["advantages"][whole["completion_mask"].sum(1).argsort(descending=True)[:2]] = 0.0
        seen.append(stock_split(whole, count))
        return seen[-1]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(grpo_trainer, "split_tensor_dict", keep)
        trainer._prepare_inputs(batch_of(trainer))
    stock, ours = seen[0], trainer._buffered_inputs
    assert ours is not None and len(ours) == len(stock) == trainer.args.gradient_accumulation_steps
    assert sum(map(positions, ours)) < sum(map(positions, stock))
    loss, expected = losses_and_gradient(trainer, stock)
    found_loss, found = losses_and_gradient(trainer, ours, lean=True)
    assert found_loss == pytest.approx(loss, rel=1e-5, abs=1e-7)
    assert (found - expected).norm() <= 1e-5 * expected.norm()
    assert expected.norm() > 0


def positions(batch: dict[str, Any]) -> int:
    """Return what a forward pass covers."""
    return batch["prompt_ids"].numel() + batch["completion_ids"].numel()


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_the_lean_head_has_the_log_probs_of_trl_s(build: Callable[..., CellTrainer], temperature: float) -> None:
    trainer = build("head", grpo=TINY.replace(temperature=temperature))
    batch = trainer._generate_and_score_completions(batch_of(trainer))
    ids = torch.cat([batch["prompt_ids"], batch["completion_ids"]], 1)
    mask = torch.cat([batch["prompt_mask"], batch["completion_mask"]], 1)
    found = []
    for lean in (False, True):
        trainer.runtime = trainer.runtime.replace(lean_head=lean)
        logprobs, entropy, _ = trainer._get_per_token_logps_and_entropies(
            trainer.model, ids, mask, batch["completion_ids"].shape[1], compute_entropy=True
        )
        assert entropy is not None and entropy.shape == logprobs.shape
        found.append(logprobs * batch["completion_mask"])
    torch.testing.assert_close(found[0], found[1], rtol=1e-5, atol=1e-5)
    assert found[0].min() < -1


def test_nothing_is_left_out_where_a_kl_term_sees_every_row(build: Callable[..., CellTrainer]) -> None:
    trainer = build("kl")
    trainer.beta = 0.1
    trainer.ref_model = trainer.model
    trainer._prepare_inputs(batch_of(trainer))
    assert trainer._buffered_inputs is not None
    rows = sum(len(b["advantages"]) for b in trainer._buffered_inputs)
    assert rows == 16
    assert any(bool((b["advantages"] == 0).any()) for b in trainer._buffered_inputs)


def test_a_step_without_any_advantage_has_no_gradient_and_does_not_fail(build: Callable[..., CellTrainer]) -> None:
    trainer = build("zero")
    batch = trainer._generate_and_score_completions(batch_of(trainer))
    batch["advantages"].zero_()
    (alone,) = arrange([batch], drop_zero=True, bucket=True)
    assert len(alone["advantages"]) == 1
    loss, gradient = losses_and_gradient(trainer, [alone])
    assert loss == 0.0
    assert gradient.norm() == 0.0


def reference_nll(model: Any, rollouts: list[tuple[tuple[int, ...], tuple[int, ...]]]) -> torch.Tensor:
    """Mean over all completion tokens, each sequence by itself."""
    parts = []
    for prompt, completion in rollouts:
        logits = model(input_ids=torch.tensor([[*prompt, *completion]])).logits[0, len(prompt) - 1 : -1]
        parts.append(torch.nn.functional.cross_entropy(logits, torch.tensor(completion), reduction="none"))
    return torch.cat(parts).mean()


@pytest.mark.parametrize("micro_batch", [16, 4])
def test_a_step_adds_lambda_times_the_replay_gradient(build: Callable[..., CellTrainer], micro_batch: int) -> None:
    trainer = build("replay", arm="hardcd_lam0p1", runtime={"micro_batch": micro_batch})
    assert trainer.buffer is not None
    assert trainer.term is not None
    for step, (problem, prompt) in enumerate(trainer.prompt_tokens.items()):
        stocked = [(f"{problem}{i}", [*prompt[2 + i : 9 + 2 * i], 0]) for i in range(2)]
        trainer.buffer.add(step, problem, prompt, stocked, [1.0, 1.0])
    trainer.state.global_step = 9
    rows, parts = batch_of(trainer), trainer.args.gradient_accumulation_steps
    for part in range(parts):
        trainer.accelerator.gradient_state._set_sync_gradients(part == parts - 1)
        trainer.training_step(trainer.model, rows)
    found, row = gradients(trainer), trainer.row

    drawn = [s for mine in trainer.buffer.stock.values() for s in mine if s.last == 10]
    assert row["replay"]["drawn"] == len(drawn) == trainer.term.draws == 8
    trainer.model.zero_grad()
    grpo = sum(GRPOTrainer._compute_loss(trainer, trainer.model, b) for b in trainer._buffered_inputs)
    grpo.backward()
    alone = gradients(trainer).clone()
    trainer.model.zero_grad()
    nll = reference_nll(trainer.model, [(s.prompt_ids, s.token_ids) for s in drawn])
    nll.backward()
    replayed = 0.1 * gradients(trainer)
    expected = alone + replayed
    assert (found - expected).norm() <= 2e-6 * expected.norm()
    assert (found - alone).norm() > 1e-2 * alone.norm()
    assert row["replay"]["nll"] == pytest.approx(nll.item(), rel=1e-5)
    assert row["replay"]["grad_norm_ratio"] == pytest.approx((replayed.norm() / alone.norm()).item(), rel=1e-4)
    cosine = torch.nn.functional.cosine_similarity(replayed, alone, dim=0).item()
    assert row["replay"]["grad_cosine"] == pytest.approx(cosine, abs=1e-5)
    assert row["loss"] == pytest.approx(grpo.item() + 0.1 * nll.item(), rel=1e-5)


def test_a_steps_own_rollouts_enter_the_buffer_after_its_draw(build: Callable[..., CellTrainer]) -> None:
    trainer = build("fresh", arm="hardcd_lam0p1", runtime={"micro_batch": 16})
    trainer.accelerator.gradient_state._set_sync_gradients(True)
    trainer.training_step(trainer.model, batch_of(trainer))
    assert trainer.buffer is not None
    assert trainer.row["replay"] == {
        "eligible": 0,
        "drawn": 0,
        "shortfall": 8,
        "unique_problems": 0,
        "mean_age": None,
        "mean_uses": None,
        "nll": None,
        "grad_norm_ratio": None,
        "grad_cosine": None,
    }
    won = {(r.problem_id, r.completion) for r in trainer.step_rollouts if r.reward == 1}
    assert won
    assert {(s.problem_id, s.text) for mine in trainer.buffer.stock.values() for s in mine} == won
    assert all(s.prompt_ids == tuple(trainer.prompt_tokens[p]) for p, v in trainer.buffer.stock.items() for s in v)
    rates = {
        p: sum(r.reward for r in trainer.step_rollouts if r.problem_id == p) / 4
        for p in {r.problem_id for r in trainer.step_rollouts}
    }
    assert trainer.buffer.pass_rate == rates


def test_whole_steps_are_those_of_stock_trl_fed_the_same_rollouts(
    make_run: Make, make_trainer: Callable[..., CellTrainer], judge: Judge, tmp_path: Path
) -> None:
    """Sampling, order and seeds are ours; loss, clipping and optimizer must be TRL's: equal weights after 3 steps."""
    folder = make_run(
        tmp_path / "ours", steps=3, stride=3, runtime={"drop_zero": False, "bucket": False, "lean_head": False}
    )
    ours = make_trainer(folder, judge)
    ours.train()
    tables = [pd.read_parquet(folder.rollout(s)) for s in (1, 2, 3)]
    cell_file, runtime = read_folder(folder)
    model, tokenizer = load_model(runtime.model_path, None)

    def recorded(prompts: list[str], trainer: GRPOTrainer) -> dict[str, Any]:
        table = tables[trainer.state.global_step]
        torch.manual_seed(stream_seed(0, trainer.state.global_step, "trl"))
        return {
            "prompt_ids": [tokenizer(p)["input_ids"] for p in table["prompt"]],
            "completion_ids": [t.tolist() for t in table["token_ids"]],
            "logprobs": [t.tolist() for t in table["logprobs"]],
        }

    def rewards(prompts: Any, completions: Any, trainer_state: Any, **_: Any) -> list[float]:
        return tables[trainer_state.global_step]["reward"].tolist()

    stock = GRPOTrainer(
        model=model,
        args=grpo_config(cell_file.cell, runtime, tmp_path / "stock"),
        reward_funcs=rewards,
        train_dataset=Dataset.from_list([{"prompt": r["prompt"]} for r in ours.train_dataset]),
        processing_class=tokenizer,
        rollout_func=recorded,
    )
    base = weights(model)
    stock.train()
    left, right = weights(stock.model), weights(ours.model)
    assert all(torch.equal(left[k], right[k]) for k in left)
    assert not all(torch.equal(base[k], right[k]) for k in base)
    logged = [json.loads(line) for line in folder.steps_jsonl.read_text().splitlines()]
    norms = [x["grad_norm"] for x in stock.state.log_history if "grad_norm" in x]
    assert [row["grad_norm"] for row in logged] == norms


def test_a_step_is_logged_as_it_was(build: Callable[..., CellTrainer]) -> None:
    trainer = build("logged")
    trainer._generate_and_score_completions(batch_of(trainer))
    table = pd.read_parquet(trainer.folder.rollout(1))
    names = "problem_id index prompt completion token_ids logprobs finish_reason outcome reward advantage"
    assert list(table.columns) == names.split()
    assert table["index"].tolist() == [0, 1, 2, 3] * 4
    assert (table["reward"] == (table["outcome"] == "pass")).all()
    for _, group in table.groupby("problem_id"):
        spread = group["reward"].std(ddof=1)
        expected = (group["reward"] - group["reward"].mean()) / (spread + 1e-4)
        assert group["advantage"].tolist() == pytest.approx(expected.tolist(), abs=1e-6)
    assert [len(t) for t in table["token_ids"]] == [len(t) for t in table["logprobs"]]
    assert trainer.row["reward"] == table["reward"].mean()
    assert trainer.row["mean_tokens"] == table["token_ids"].map(len).mean()
    assert trainer.row["truncated_fraction"] == (table["finish_reason"] == "length").mean()


def test_every_epoch_has_its_own_order_and_it_depends_on_seed_and_epoch_alone(
    build: Callable[..., CellTrainer],
) -> None:
    orders = {}
    for seed in (0, 1):
        sampler = build(f"order{seed}", seed=seed)._get_train_sampler()
        for epoch in (0, 1, 2, 1):
            sampler.set_epoch(epoch)
            order = tuple(dict.fromkeys(sampler))
            assert sorted(order) == list(range(8))
            assert orders.setdefault((seed, epoch), order) == order
    assert len(set(orders.values())) == 6


def test_every_setting_of_the_full_experiment_is_explicit(tmp_path: Path) -> None:
    """The table of verl's names: batch sizes count completions here, and a one-line default can undo a run."""
    cell = EXPERIMENTS["full"].cells()[0]
    runtime = Runtime(model_path="m", problems_path="p", micro_batch=16)
    args = grpo_config(cell, runtime, tmp_path)
    expected = {
        "per_device_train_batch_size": 16,
        "gradient_accumulation_steps": 32,
        "steps_per_generation": 32,
        "generation_batch_size": 512,
        "num_generations": 8,
        "num_iterations": 1,
        "max_completion_length": 3072,
        "temperature": 1.0,
        "top_p": 1.0,
        "top_k": 0,
        "beta": 0.0,
        "epsilon": 0.2,
        "loss_type": "dapo",
        "scale_rewards": "group",
        "mask_truncated_completions": False,
        "learning_rate": cell.lr,
        "lr_scheduler_type": "constant",
        "warmup_steps": 0,
        "adam_beta1": 0.9,
        "adam_beta2": 0.999,
        "weight_decay": 0.01,
        "max_grad_norm": 1.0,
        "max_steps": 500,
        "seed": cell.seed,
        "logging_steps": 1,
        "logging_nan_inf_filter": False,
        "vllm_importance_sampling_correction": False,
        "report_to": [],
        "bf16": False,
        "use_cpu": True,
        "gradient_checkpointing": False,
        "save_strategy": "no",
    }
    assert {k: getattr(args, k) for k in expected} == expected


@pytest.mark.parametrize(("asked", "got"), [(1, 1), (5, 4), (16, 16), (24, 16), (512, 512), (9999, 512)])
def test_the_micro_batch_divides_the_step(tmp_path: Path, asked: int, got: int) -> None:
    cell = EXPERIMENTS["full"].cells()[0]
    args = grpo_config(cell, Runtime(model_path="m", problems_path="p", micro_batch=asked), tmp_path)
    assert args.per_device_train_batch_size == got
    assert args.generation_batch_size == 512
