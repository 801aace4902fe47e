"""Faults that other trainers had, each as the small input that showed it (areas grpo, replay, checkpoint)."""

import ast
import importlib.util
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from evaluation.generation import sample
from evaluation.judge import Judge
from evaluation.problems import read_problems
from evaluation.records import Outcome
from training.arms import Replay
from training.callbacks import drop_old_resumes
from training.config import grpo_config
from training.folder import RunFolder
from training.grpo import Grpo
from training.objectives import collate, mean_token_nll
from training.replay import ReplayBuffer
from training.run import read_folder
from training.trainer import CellTrainer

ROOT = Path(__file__).resolve().parents[2]
FAULTS = ROOT.parent / "shared/cases/faults.jsonl"
GROUPS = Grpo(prompts_per_step=2, rollouts_per_prompt=4, max_new_tokens=24, compute_dtype="float32")


@pytest.mark.skipif(not FAULTS.is_file(), reason="the fault cases are not beside the checkout")
@pytest.mark.parametrize("area", ["grpo", "replay", "checkpoint"])
def test_every_fault_is_named(area: str) -> None:
    here = Path(__file__)
    text = "".join(p.read_text() for p in sorted((ROOT / "tests").rglob("*.py")) if p != here)
    text += "".join(
        ast.get_docstring(n) or "" for n in ast.walk(ast.parse(here.read_text())) if isinstance(n, ast.FunctionDef)
    )
    text += (ROOT / "docs/training.md").read_text()
    ids = [r["id"] for r in map(json.loads, FAULTS.read_text().splitlines()) if r["area"] == area]
    assert ids
    assert [i for i in ids if not re.search(r"{}-(\d+, )*{}\b".format(*i.split("-")), text)] == []


@pytest.fixture
def build(
    make_run: Callable[..., RunFolder], make_trainer: Callable[..., CellTrainer], tmp_path: Path
) -> Callable[..., CellTrainer]:
    """`build(rewards, **cell fields)`: a trainer whose judge is told what to find, on the shipped model."""

    def go(rewards: list[int], **changes: Any) -> CellTrainer:
        folder = make_run(tmp_path / "run", **{"grpo": GROUPS, **changes})
        _, runtime = read_folder(folder)
        trainer = make_trainer(folder, Judge(read_problems(Path(runtime.problems_path)), suites="reward", workers=1))
        found = [Outcome.PASS if r else Outcome.FAIL for r in rewards]
        trainer.rewards.outcomes = lambda problem_ids, token_ids: found  # type: ignore[method-assign]
        trainer.current_gradient_accumulation_steps = trainer.args.gradient_accumulation_steps
        trainer.model.train()
        return trainer

    return go


def first_batch(trainer: CellTrainer) -> dict[str, Any]:
    rows = list(trainer.train_dataset)[: trainer.cell.grpo.prompts_per_step]
    return trainer._generate_and_score_completions([r for r in rows for _ in range(trainer.num_generations)])


@pytest.mark.parametrize(
    ("scale", "expected"),
    [
        ("group", [1.4997000694] + 3 * [-0.4999000132] + 3 * [0.4999000132] + [-1.4997000694]),
        ("none", [0.75] + 3 * [-0.25] + 3 * [0.25] + [-0.75]),
    ],
)
def test_an_advantage_is_scaled_as_its_name_says(
    build: Callable[..., CellTrainer], scale: str, expected: list[float]
) -> None:
    """GRPO-075. The batch's deviation is not offered: a cell that asks for it is refused."""
    trainer = build([1, 0, 0, 0, 1, 1, 1, 0], grpo=GROUPS.replace(scale_rewards=scale))
    assert first_batch(trainer)["advantages"].tolist() == pytest.approx(expected, rel=1e-6)
    assert [r.advantage for r in trainer.step_rollouts] == pytest.approx(expected, rel=1e-6)
    with pytest.raises(ValueError, match="scale_rewards"):
        GROUPS.replace(scale_rewards="batch")


@pytest.mark.parametrize(("scale", "expected"), [("group", (2.474174, -0.353453)), ("none", (0.875, -0.125))])
def test_one_success_of_eight(build: Callable[..., CellTrainer], scale: str, expected: tuple[float, float]) -> None:
    """GRPO-076: the sample's deviation, not the population's."""
    grpo = GROUPS.replace(prompts_per_step=1, rollouts_per_prompt=8, scale_rewards=scale)
    trainer = build([1] + 7 * [0], grpo=grpo)
    assert first_batch(trainer)["advantages"].tolist() == pytest.approx([expected[0]] + 7 * [expected[1]], rel=1e-5)


def test_a_token_counts_alike_wherever_it_is() -> None:
    """GRPO-079: 10 tokens of mean 1 and 90 of mean 0 have mean .1, not .5."""
    parts = [(-torch.ones(1, 10), torch.ones(1, 10)), (torch.zeros(9, 10), torch.ones(9, 10))]
    assert sum(mean_token_nll(logprobs, mask, 100).item() for logprobs, mask in parts) == pytest.approx(0.1)


def test_the_grpo_loss_is_a_mean_over_the_tokens_of_the_step(build: Callable[..., CellTrainer]) -> None:
    """GRPO-079, of TRL's own loss: each row by itself, and all rows at once, come to the same."""
    trainer = build(8 * [0])
    whole = first_batch(trainer)
    whole["advantages"] = torch.arange(8.0)
    whole["completion_mask"] = (torch.arange(24) < torch.arange(3, 19, 2)[:, None]).long()
    lengths = whole["completion_mask"].sum(1)
    whole["num_items_in_batch"] = lengths.sum()
    rows = [{k: v[i : i + 1] if v is not None and v.dim() else v for k, v in whole.items()} for i in range(8)]
    parts = sum(trainer._compute_loss(trainer.model, row).item() for row in rows)
    assert parts == pytest.approx(trainer._compute_loss(trainer.model, whole).item(), rel=1e-5)
    # All ratios are 1, so the loss is -(sum of advantage x length) / (sum of lengths).
    expected = -(whole["advantages"] * lengths).sum() / lengths.sum() / trainer.current_gradient_accumulation_steps
    assert parts == pytest.approx(expected.item(), rel=1e-4, abs=1e-7)


def test_any_of_several_end_tokens_ends_a_completion(build: Callable[..., CellTrainer]) -> None:
    """GRPO-083: the model's end token counts where the tokenizer names another."""
    trainer, other = build(8 * [0]), 5
    assert trainer.tokenizer.eos_token_id != other
    policy = trainer.model

    class Ending(torch.nn.Module):
        config, generation_config, device, dtype = policy.config, policy.generation_config, policy.device, policy.dtype

        def forward(self, *args: Any, **kwargs: Any) -> Any:
            out = policy(*args, **kwargs)
            out.logits[..., other] += 100
            return out

    for stop_ids, finish in (((trainer.tokenizer.eos_token_id, other), "stop"), ((), "length")):
        (row,) = sample(
            Ending(), [[7, 8, 9]], [[1, 2]], max_new_tokens=4, temperature=1.0, top_p=1.0, stop_ids=stop_ids, pad_id=1
        )
        assert [(c.token_ids, c.finish_reason) for c in row] == 2 * [([other] * (1 if stop_ids else 4), finish)]


def test_the_kl_term_has_a_gradient(build: Callable[..., CellTrainer]) -> None:
    """GRPO-086."""
    trainer = build(8 * [0])  # without rewards, KL is all there is
    batch = first_batch(trainer)
    found = {}
    for beta in (0.1, 0.2):
        trainer.beta = beta
        batch["ref_per_token_logps"] = torch.full_like(batch["completion_mask"], -1, dtype=torch.float32)
        trainer.model.zero_grad()
        trainer._compute_loss(trainer.model, batch).backward()
        found[beta] = torch.cat([p.grad.flatten() for p in trainer.model.parameters()])
    assert found[0.1].norm() > 0
    torch.testing.assert_close(found[0.2], 2 * found[0.1], rtol=1e-4, atol=1e-7)


def stocked(count: int, length: int = 3) -> ReplayBuffer:
    buffer = ReplayBuffer(Replay(), seed=7)
    for i in range(count):
        buffer.add(i // 8, f"p{i % 16}", [1, 2], [(f"text {i}", range(i, i + length))], [1.0])
    return buffer


def test_one_group_at_a_time_has_one_yes_or_no_a_group() -> None:
    """REPLAY-066: of two groups the one without a success leaves nothing, the other its successes."""
    buffer = ReplayBuffer(Replay(), seed=0)
    buffer.add(1, "a", [1], [("x", [1]), ("y", [2])], [1.0, 0.0])
    buffer.add(1, "b", [1], [("x", [1]), ("y", [2])], [0.0, 0.0])
    assert {p: [s.text for s in mine] for p, mine in buffer.stock.items()} == {"a": ["x"], "b": []}
    assert buffer.pass_rate == {"a": 0.5, "b": 0.0}


def test_a_resumed_buffer_has_every_entry_and_the_next_draw() -> None:
    """REPLAY-070."""
    buffer = stocked(128)
    saved = json.loads(json.dumps(buffer.state()))
    resumed = ReplayBuffer(Replay(), seed=7)
    resumed.restore(saved)
    assert sum(map(len, resumed.stock.values())) == 128
    assert resumed.pass_rate == buffer.pass_rate
    assert resumed.draw(30) == buffer.draw(30)


def test_padding_a_replayed_rollout_leaves_the_stored_one() -> None:
    """REPLAY-072."""
    buffer = stocked(1)
    (drawn,) = buffer.draw(2).rollouts
    collate([(drawn.prompt_ids, drawn.token_ids), ((1,), (1, 2, 3, 4, 5))], 0, torch.device("cpu"))
    assert [len(s.token_ids) for s in buffer.stock["p0"]] == [3]


@pytest.mark.parametrize("count", [64, 128])
def test_the_weight_of_replay_does_not_depend_on_how_many_are_drawn(count: int) -> None:
    """REPLAY-074: 2.0 + 0.1 x 4.0 = 2.4, with 128 replayed for 512 fresh as with 64."""
    nll = sum(mean_token_nll(torch.full((8, 5), -4.0), torch.ones(8, 5), count * 5).item() for _ in range(count // 8))
    assert 2.0 + Replay().weight * nll == pytest.approx(2.4)


def test_replay_is_our_own_and_a_cell_with_it_never_trains_without() -> None:
    """REPLAY-146: TRL's trainer with a buffer is gone; nothing here asks for it."""
    assert importlib.util.find_spec("trl.experimental.grpo_with_replay_buffer") is None
    sources = {p.name: p.read_text() for p in (ROOT / "training").glob("*.py")}
    assert [n for n, text in sources.items() if "trl.experimental" in text] == []


def test_a_trainer_with_a_replay_term_has_a_buffer(build: Callable[..., CellTrainer]) -> None:
    """REPLAY-146."""
    assert build(8 * [0], arm="hardcd_lam0p1").buffer is not None


def test_keeping_one_state_never_removes_a_checkpoint(tmp_path: Path) -> None:
    """CHECKPOINT-098: a checkpoint is the publisher's to remove, not the rotation's."""
    folder = RunFolder(tmp_path)
    for step in (30, 60):
        for part in (folder.resume(step), folder.checkpoint(step)):
            part.mkdir(parents=True)
            (part / "MANIFEST.json").write_text("{}")
        drop_old_resumes(folder, step, 1)
    assert folder.checkpoints() == [30, 60]


def test_trainer_s_own_rotation_is_off(make_run: Callable[..., RunFolder], tmp_path: Path) -> None:
    """CHECKPOINT-098: nor does Trainer remove any, or look for a best one."""
    cell_file, runtime = read_folder(make_run(tmp_path / "run"))
    args = grpo_config(cell_file.cell, runtime, tmp_path, 10)
    assert args.save_total_limit is None
    assert args.load_best_model_at_end is False
