"""Training with the policy-gradient loss and a declared mismatch: gradients, what is logged, kills, two processes."""

import contextlib
import json
import os
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from evaluation.errors import InputError
from evaluation.generation import Completion, sample
from evaluation.judge import Judge
from evaluation.problems import read_problems
from training.arms import Mismatch
from training.folder import RunFolder
from training.grpo import Grpo
from training.mismatch import FILE, SamplerCopy, rounded
from training.run import load_model, main, read_folder
from training.signs import find_signs
from training.trainer import CellTrainer

PG = Grpo(
    prompts_per_step=4,
    rollouts_per_prompt=4,
    max_new_tokens=48,
    compute_dtype="float32",
    importance="one",
    scale_rewards="none",
)
MODEL = Path(__file__).resolve().parents[2] / "training" / "toy_model"
Make = Callable[..., RunFolder]
Build = Callable[..., CellTrainer]


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
def build(make_run: Make, make_trainer: Callable[..., CellTrainer], judge: Judge, tmp_path: Path) -> Build:
    """`build(arm, **cell and runtime fields)`: a trainer at its first step, on the shipped model."""

    def go(arm: str, **changes: Any) -> CellTrainer:
        folder = make_run(tmp_path / f"{arm}{len(list(tmp_path.iterdir()))}", arm=arm, **{"grpo": PG, **changes})
        trainer = make_trainer(folder, judge)
        trainer.current_gradient_accumulation_steps = trainer.args.gradient_accumulation_steps
        trainer.model.train()
        return trainer

    return go


def generated(trainer: CellTrainer) -> list[dict[str, Any]]:
    """Return the first step's micro-batches, as they are trained on."""
    rows = list(trainer.train_dataset)[: trainer.cell.grpo.prompts_per_step]
    trainer._prepare_inputs([row for row in rows for _ in range(trainer.num_generations)])
    assert trainer._buffered_inputs is not None
    return list(trainer._buffered_inputs)


def gradient(trainer: CellTrainer, batches: list[dict[str, Any]]) -> torch.Tensor:
    """Return the gradient that the optimizer would be given for these micro-batches."""
    trainer.model.zero_grad()
    for batch in batches:
        trainer._compute_loss(trainer.model, batch).backward()
    grads = [p.grad.flatten() for p in trainer.model.parameters() if p.grad is not None]
    return torch.cat(grads)


def reference(trainer: CellTrainer) -> torch.Tensor:
    """REINFORCE row by row, unpadded, with the rollouts' recorded advantages: -sum A log p / all tokens."""
    trainer.model.zero_grad()
    total = sum(len(r.token_ids) for r in trainer.step_rollouts)
    for r in trainer.step_rollouts:
        prompt = trainer.prompt_tokens[r.problem_id]
        ids = torch.tensor([[*prompt, *r.token_ids]])
        logits = trainer.model(input_ids=ids).logits[0, len(prompt) - 1 : -1]
        logp = logits.log_softmax(-1).gather(1, torch.tensor(r.token_ids)[:, None]).sum()
        (-r.advantage * logp / total).backward()
    grads = [p.grad.flatten() for p in trainer.model.parameters() if p.grad is not None]
    return torch.cat(grads)


def apart(found: torch.Tensor, expected: torch.Tensor) -> float:
    assert float(expected.norm()) > 0
    return float((found - expected).norm() / expected.norm())


@pytest.mark.parametrize("arm", ["plain", "plain_int8"])
def test_the_plain_arm_is_reinforce_on_the_sampler_s_tokens(build: Build, arm: str) -> None:
    """Whoever sampled: with w = 1 the sampler's probabilities are in no factor of the gradient."""
    trainer = build(arm)
    found = gradient(trainer, generated(trainer))
    advantages = {(r.advantage, r.reward) for r in trainer.step_rollouts}
    assert len(advantages) > 2 and all(abs(a) <= 1 for a, _ in advantages)  # reward - mean, divided by nothing
    assert apart(found, reference(trainer)) <= 1e-5


@pytest.mark.parametrize("lean", [True, False])
@pytest.mark.parametrize("weight", ["one", "tis2"])
def test_both_arms_are_the_same_where_sampler_and_learner_are(build: Build, weight: str, lean: bool) -> None:
    grads = []
    for arm in ("plain", "center"):
        trainer = build(arm, grpo=PG.replace(importance=weight), runtime={"lean_head": lean})
        grads.append(gradient(trainer, generated(trainer)))
        figures = trainer.policy_gradient.figures(trainer.completions, trainer.processes)
        assert 0 < figures["logprob_gap"] < 1e-5
    assert float((grads[0] - grads[1]).abs().max()) <= 1e-6
    assert float(grads[0].norm()) > 1e-2


@pytest.mark.parametrize(("arm", "least"), [("center_int8", 3e-4), ("center_bf16", 1e-4)])
def test_a_coarser_sampler_leaves_a_gap_that_is_measured_and_centred(build: Build, arm: str, least: float) -> None:
    trainer = build(arm)
    batches = generated(trainer)
    centred = gradient(trainer, batches)
    figures = trainer.policy_gradient.figures(trainer.completions, trainer.processes)
    assert least < figures["logprob_gap"] < figures["logprob_gap_max"]
    assert 0.99 < figures["head_mass"] <= 1 + 1e-6
    plain = gradient(trainer, [{k: v for k, v in b.items() if not k.startswith("head_")} for b in batches])
    assert apart(centred, plain) > 1e-4


def test_the_gradient_depends_neither_on_micro_batches_nor_on_padding_nor_on_how_the_head_is_passed(
    build: Build,
) -> None:
    grads = []
    for runtime in (
        {},
        {"micro_batch": 1},
        {"micro_batch": 16, "bucket": False, "drop_zero": False, "lean_head": False},
        {"micro_batch": 4, "bucket": False},
    ):
        trainer = build("center_int8", grpo=PG.replace(importance="tis2"), runtime=runtime)
        grads.append(gradient(trainer, generated(trainer)))
    assert max(apart(g, grads[0]) for g in grads[1:]) <= 1e-5


def test_a_lora_cell_is_centred_with_a_rounded_copy_of_its_merged_weights(build: Build) -> None:
    grads = []
    for lean in (True, False):
        trainer = build("center_int8", lora_rank=4, runtime={"lean_head": lean})
        for name, p in trainer.model.named_parameters():
            if "lora_B" in name:  # as after some steps
                torch.nn.init.normal_(p, std=0.02, generator=torch.Generator().manual_seed(len(name)))
        grads.append(gradient(trainer, generated(trainer)))
        assert trainer.policy_gradient.figures(trainer.completions, trainer.processes)["logprob_gap"] > 3e-4
    assert apart(grads[1], grads[0]) <= 1e-5
    frozen = [p for n, p in trainer.model.named_parameters() if "lora_" not in n]
    assert frozen and all(p.grad is None for p in frozen)


def test_int8_has_255_levels_a_row_and_bf16_the_nearest_values() -> None:
    matrix = torch.randn(7, 50, generator=torch.Generator().manual_seed(0))
    matrix[3] = 0
    levels = rounded(matrix, "int8") / (matrix.abs().amax(1, keepdim=True).clamp(min=1e-30) / 127)
    assert float((levels - levels.round()).abs().max()) < 1e-4 and float(levels.abs().max()) <= 127.001
    half_level = matrix.abs().amax(1, keepdim=True) / 254
    assert bool(((rounded(matrix, "int8") - matrix).abs() <= half_level * 1.001).all())
    assert torch.equal(rounded(matrix[0], "int8"), matrix[0])
    assert torch.equal(rounded(matrix, "bfloat16"), matrix.bfloat16().float())
    assert torch.equal(rounded(matrix, None), matrix)


def test_the_copy_leaves_random_streams_and_learner_alone_and_is_refreshed_on_time() -> None:
    learner, _ = load_model(str(MODEL), None)
    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    copy = SamplerCopy(Mismatch(refresh_every=2), learner)
    assert torch.equal(torch.rand(3), expected)
    before = {k: v.clone() for k, v in learner.state_dict().items()}
    drawn = copy.at(0, learner).state_dict()
    assert all(torch.equal(v, before[k]) for k, v in drawn.items())
    with torch.no_grad():
        learner.model.norm.weight.mul_(2)
    assert torch.equal(copy.at(1, learner).model.norm.weight, before["model.norm.weight"])
    assert torch.equal(copy.at(2, learner).model.norm.weight, 2 * before["model.norm.weight"])


def heads(model: Any, prompts: list[list[int]], drawn: list[list[Completion]]) -> Iterator[tuple[Any, torch.Tensor]]:
    for prompt, completions in zip(prompts, drawn, strict=True):
        for c in completions:
            with torch.no_grad():
                logits = model(torch.tensor([prompt + c.token_ids])).logits[0, len(prompt) - 1 : -1]
            yield c, logits


@pytest.mark.parametrize("general", [False, True])
def test_the_sampler_s_head_is_the_top_of_the_distribution_it_drew_from(
    monkeypatch: pytest.MonkeyPatch, general: bool
) -> None:
    model, _ = load_model(str(MODEL), None)
    if general:  # transformers' own decoder instead of ours for small models
        monkeypatch.setattr("evaluation.generation.serves", lambda _: False)
    prompts = [[5, 9, 31], [7, 8, 9, 10, 44, 2]]
    settings = {"max_new_tokens": 20, "temperature": 0.8, "top_p": 1.0, "stop_ids": [0, 1, 2], "pad_id": 0}
    seeds = [[1, 2, 3], [4, 5, 6]]
    plain = sample(model, prompts, seeds, **settings)
    drawn = sample(model, prompts, seeds, **settings, top_k=32)
    assert [[c.token_ids for c in cs] for cs in drawn] == [[c.token_ids for c in cs] for cs in plain]
    assert all(c.head is None for cs in plain for c in cs)
    lengths = set()
    for c, logits in heads(model, prompts, drawn):
        expected, ids = (logits / 0.8).log_softmax(-1).topk(32, -1)
        assert c.head is not None
        np.testing.assert_allclose(c.head.logprobs, expected.numpy(), atol=2e-5)
        shared = [len({*a} & {*b}) for a, b in zip(c.head.ids.tolist(), ids.tolist(), strict=True)]
        assert min(shared) >= 31  # ties at the edge
        lengths.add(len(c.token_ids))
    assert len(lengths) > 1


def test_a_head_larger_than_the_vocabulary_is_the_vocabulary() -> None:
    model, _ = load_model(str(MODEL), None)
    whole = model.config.vocab_size
    settings = {"max_new_tokens": 2, "temperature": 1.0, "top_p": 1.0, "stop_ids": [0], "pad_id": 0}
    [[drawn]] = sample(model, [[5]], [[1]], **settings, top_k=whole + 7)
    assert drawn.head is not None and drawn.head.ids.shape == (len(drawn.token_ids), whole)
    np.testing.assert_allclose(np.exp(drawn.head.logprobs).sum(1), 1, atol=1e-5)


def rows(folder: RunFolder) -> list[dict[str, Any]]:
    found = [json.loads(line) for line in folder.steps_jsonl.read_text().splitlines()]
    return [{k: v for k, v in row.items() if k != "seconds"} for row in found]


def weights(folder: RunFolder) -> dict[int, bytes]:
    return {s: (folder.checkpoint(s) / "model.safetensors").read_bytes() for s in folder.checkpoints()}


def kill_at(child: Any, path: Path) -> None:
    """End the trainer and all that it started as soon as `path` is there."""
    end = time.monotonic() + 200
    try:
        while not path.exists():
            assert child.poll() is None and time.monotonic() < end, "ended before the file was seen"
            time.sleep(0.001)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(child.pid, signal.SIGKILL)
        child.communicate()
    assert child.returncode == -signal.SIGKILL


def test_a_stale_centred_cell_killed_between_refreshes_goes_on_to_the_same_bytes(
    make_run: Make,
    start: Callable[[Path], Any],
    train_to_end: Callable[..., Any],
    tmp_path: Path,
) -> None:
    """Six steps, weights of steps 0 and 4: killed in step 3, after a state whose sampler is older than itself."""
    settings = {"arm": "center_stale4", "grpo": PG, "lr": 3e-3}
    whole, torn = make_run(tmp_path / "whole", **settings), make_run(tmp_path / "torn", **settings)
    done = train_to_end(whole.root)
    assert done.returncode == 0, done.stderr
    gaps = [row["sampler"]["logprob_gap"] for row in rows(whole)]
    fresh, old = ([gaps[i] for i in steps if gaps[i] is not None] for steps in ((0, 4), (1, 2, 3, 5)))
    assert fresh and old and max(fresh) < 1e-5 < 1e-4 < min(old)
    assert [(whole.resume(s) / FILE).is_file() for s in (4, 6)] == [False, True]
    kill_at(start(torn.root), torn.rollout(3))
    assert torn.resumes()[0] == 2 and (torn.resume(2) / FILE).is_file()
    done = train_to_end(torn.root)
    assert done.returncode == 0, done.stderr
    assert rows(torn) == rows(whole)
    assert weights(torn) == weights(whole) and len(set(weights(whole).values())) == 3


def test_a_resume_state_without_its_stale_sampler_is_refused(tmp_path: Path) -> None:
    learner, _ = load_model(str(MODEL), None)
    copy = SamplerCopy(Mismatch(refresh_every=4), learner)
    copy.at(0, learner)
    copy.restore(tmp_path, 4)  # a refresh is due: nothing is read
    copy.save(tmp_path, 4)
    with pytest.raises(InputError, match="remove this resume state"):
        copy.restore(tmp_path, 5)
    copy.save(tmp_path, 5)
    copy.restore(tmp_path, 5)
    whole = load_file(tmp_path / FILE)
    save_file({k: v for k, v in whole.items() if "layers.1." not in k}, tmp_path / FILE)
    with pytest.raises(InputError, match="another model's"):
        copy.restore(tmp_path, 5)


def test_a_mismatch_is_not_sampled_by_vllm(make_run: Make, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = make_run(tmp_path / "run", arm="center_int8", grpo=PG, runtime={"sampler": "vllm"})
    assert main([str(folder.root)]) == 2
    assert "sampler=vllm" in capsys.readouterr().err


def test_a_thin_head_is_a_sign_from_its_first_step() -> None:
    log = [{"global_step": s, "sampler": {"head_mass": mass}} for s, mass in ((1, 0.999), (2, 0.98), (3, 0.995))]
    assert [(s.name, s.onset_step) for s in find_signs(log, 48) if s.name == "thin_head"] == [("thin_head", 2)]
    assert not [s for s in find_signs([{"global_step": 1}], 48) if s.name == "thin_head"]
