"""GRPO with loss terms, on TRL's trainer: the only file that touches TRL's internals.

What is overridden, and why (tests/training/test_trl_pins.py fails when TRL changes underneath):

- `_get_train_sampler`: TRL's order depends on how many epochs one process has seen; ours on (seed, epoch) alone.
  Where the data loader is sharded and skips, accelerate does not tell it the epoch: it is set when it is made.
- `get_train_dataloader`: its rows are texts; accelerate would look for tensors in each, as often as a step has
  micro-batches.
- `_generate_and_score_completions`: per-step seeds, and the step's rollouts with their advantages.
- `_prepare_inputs`: the step's rows in micro-batches of like length, without those that add nothing to the loss
  (`training/buckets.py`).
- `_get_per_token_logps_and_entropies`, on a CPU: the head where a completion's tokens are predicted, once, and no
  entropy, which the sampler has told. TRL's fused head takes every position there, and twice.
- `_compute_loss`, of the policy-gradient form alone: TRL's has no ratio to the sampler without clipping, and no head.
- `training_step`: replay's own micro-batches, in the same optimizer step, before the gradient is clipped.
  Several processes sample, judge and replay a share each; the figures and rollouts that are kept are everybody's.
- `_save_checkpoint`: resume states whole or absent, and the published checkpoint after its resume state.

With no term, and `bucket`, `drop_zero` and `lean_head` off, loss and gradients are TRL's own.
"""

import json
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from transformers import PrinterCallback
from trl.trainer.grpo_trainer import GRPOTrainer
from trl.trainer.utils import RepeatSampler

from evaluation.exact import Judging
from evaluation.prompts import prompt_ids, render
from evaluation.records import Outcome, Problem
from training.buckets import arrange
from training.centering import PolicyGradient, hidden_states
from training.config import grpo_config
from training.folder import CellFile, RunFolder, Runtime
from training.lora import plain, sync_out_of_place
from training.memory import sized
from training.mismatch import SamplerCopy
from training.objectives import (
    GradientPart,
    collate,
    head_logprobs_from_hidden,
    mean_token_nll,
    next_token_logprobs,
    token_and_head_logprobs,
)
from training.order import EpochSampler, stream_seed
from training.processes import agreed
from training.replay import Draw, ReplayBuffer, Stocked
from training.reward import RewardStream
from training.rollouts import Rollout, draw_step, recorded, step_figures, write_rollouts


class CellTrainer(GRPOTrainer):
    """Trains one cell; writes rollouts, and leaves each step's figures in `row` for the log."""

    def __init__(
        self,
        *,
        cell_file: CellFile,
        runtime: Runtime,
        folder: RunFolder,
        problems: list[Problem],
        judge: Judging,
        model: Any,
        tokenizer: Any,
        callbacks: list[Any],
    ) -> None:
        cell, spec = cell_file.cell, cell_file.prompt
        self.cell_file, self.cell, self.spec = cell_file, cell, spec
        self.folder = folder
        self.tokenizer = tokenizer
        self.rewards = RewardStream(judge, spec, {p.problem_id: p for p in problems}, self._texts)
        self.prompt_tokens = {p.problem_id: prompt_ids(spec, p, tokenizer) for p in problems}
        longest_prompt = max(map(len, self.prompt_tokens.values()))
        self.runtime = sized(runtime, cell, model, longest_prompt)
        self._take_up_the_arm(model)
        self.first_epoch = 0
        self.row: dict[str, Any] = {}
        self.step_rollouts: list[Rollout] = []
        self.replayed: tuple[Stocked, ...] = ()
        self.decoded: dict[tuple[int, ...], str] = {}
        self.outcomes: list[Outcome] = []
        self.completions: list[Any] = []
        self.break_off: Callable[[], None] = lambda: None
        """Called where a step may be left; raises to leave it."""
        rows = _rows(cell_file, problems, tokenizer)
        super().__init__(
            model=model,
            args=grpo_config(cell, self.runtime, folder.root / "resume", longest_prompt),
            reward_funcs=self._make_reward(),
            train_dataset=Dataset.from_list(rows),
            processing_class=tokenizer,
            callbacks=callbacks,
            rollout_func=_roll_out,
        )
        self.processes = agreed(runtime)
        self.remove_callback(PrinterCallback)  # prints TRL's figures; ours are in steps.jsonl
        if self.use_vllm:
            sync_out_of_place(self.vllm_generation, self.model)

    def _take_up_the_arm(self, model: Any) -> None:
        """Make what the arm's terms, the form of the loss and the sampler's mismatch need."""
        cell = self.cell
        self.term = cell.replay
        self.buffer = ReplayBuffer(self.term, cell.seed) if self.term else None
        top_k = cell.center.top_k if cell.center else 0
        self.policy_gradient = PolicyGradient(cell.grpo.importance, top_k) if cell.grpo.importance else None
        self.sampler_copy = SamplerCopy(cell.mismatch, model) if cell.mismatch else None

    @property
    def step_number(self) -> int:
        """The step being taken, from 1."""
        return self.state.global_step + 1

    def _get_train_sampler(self, dataset: Dataset | None = None) -> EpochSampler:
        s = super()._get_train_sampler(dataset)
        assert isinstance(s, RepeatSampler)
        sampler = EpochSampler(s.data_source, s.mini_repeat_count, s.batch_size, s.repeat_count, s.shuffle, s.seed)
        sampler.set_epoch(self.first_epoch)
        return sampler

    def get_train_dataloader(self) -> Any:
        """Return TRL's loader, without the search for tensors in rows of text."""
        loader = super().get_train_dataloader()
        loader.device = None
        return loader

    def _make_reward(self) -> Any:
        def passes_asserts(prompts: Any, completions: list[str], problem_id: list[str], **_: Any) -> list[float]:
            self.outcomes = self.processes.together(
                lambda: self.rewards.outcomes(problem_id, [c.token_ids for c in self.completions])
            )
            return [float(o is Outcome.PASS) for o in self.outcomes]

        return passes_asserts

    def _texts(self, ids: Sequence[Sequence[int]]) -> list[str]:
        """Return completions as texts; judge and records ask for the same ones, each is decoded once a step."""
        keys = [tuple(i) for i in ids]
        new = [k for k in dict.fromkeys(keys) if k not in self.decoded]
        how = {"skip_special_tokens": True, "clean_up_tokenization_spaces": False}
        texts = self.tokenizer.batch_decode(new, **how) if new else []  # transformers 5.17 makes one text of none
        self.decoded |= dict(zip(new, texts, strict=True))
        return [self.decoded[k] for k in keys]

    def _generate_and_score_completions(self, inputs: list[dict[str, Any]]) -> dict[str, Any]:
        self.row, self.decoded = {"started": time.monotonic()}, {}
        self.batch_problem_ids = [x["problem_id"] for x in inputs]
        torch.manual_seed(stream_seed(self.args.seed, self.state.global_step, "trl"))
        out = super()._generate_and_score_completions(inputs)
        self._record(inputs, out["advantages"].tolist())
        if self.policy_gradient is not None:
            width = out["completion_ids"].shape[1]
            out |= self.policy_gradient.tensors(self.completions, width, self.accelerator.device)
        return out

    def _record(self, inputs: list[dict[str, Any]], advantages: list[float]) -> None:
        """Keep the step's rollouts, those of all processes, on disk, and their means for the log."""
        group, done = self.cell.grpo.rollouts_per_prompt, self.completions
        ids, prompts = [x["problem_id"] for x in inputs], [x["prompt"] for x in inputs]
        texts = self._texts([c.token_ids for c in done])
        mine = recorded(ids, prompts, texts, done, self.outcomes, advantages, group)
        self.step_rollouts = self.processes.gather(mine)
        entropies = self.processes.gather([c.entropy_sum for c in done])
        self.processes.on_main(lambda: write_rollouts(self.folder.rollout(self.step_number), self.step_rollouts))
        self.row |= step_figures(self.step_rollouts, entropies, group)

    def _prepare_inputs(self, generation_batch: Any) -> Any:
        before = self._buffered_inputs
        inputs = super()._prepare_inputs(generation_batch)
        drop = self.runtime.drop_zero and self.beta == 0
        assert self.model is not None
        if not self.model.training or self._buffered_inputs is before or not (drop or self.runtime.bucket):
            return inputs
        assert self._buffered_inputs is not None
        window = self.args.gradient_accumulation_steps
        parts = [self._buffered_inputs[i : i + window] for i in range(0, len(self._buffered_inputs), window)]
        how = {"drop_zero": drop, "bucket": self.runtime.bucket, "gather": self.processes.gather}
        arranged = [b for part in parts for b in arrange(part, **how)]
        self._buffered_inputs = arranged
        return arranged[self._step % len(arranged)]

    def _get_per_token_logps_and_entropies(
        self, model: Any, input_ids: Any, attention_mask: Any, logits_to_keep: int, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None]:
        whole = super()._get_per_token_logps_and_entropies
        if not (self.runtime.lean_head and input_ids.device.type == "cpu") or kwargs.get("compute_aux_loss"):
            return whole(model, input_ids, attention_mask, logits_to_keep, *args, **kwargs)
        logits = self._completion_logits(model, input_ids, attention_mask, logits_to_keep)
        logprobs = next_token_logprobs(logits, input_ids[:, -logits_to_keep:], self.temperature)
        return logprobs, torch.zeros_like(logprobs) if kwargs.get("compute_entropy") else None, None

    def _completion_logits(self, model: Any, ids: torch.Tensor, attention: torch.Tensor, keep: int) -> torch.Tensor:
        """Return (B, keep, V): the logits that the last `keep` tokens were drawn from."""
        with self.accelerator.autocast():
            return model(input_ids=ids, attention_mask=attention, logits_to_keep=keep + 1).logits[:, :-1]

    def _compute_loss(self, model: Any, inputs: Any) -> torch.Tensor:
        if self.policy_gradient is None:
            return super()._compute_loss(model, inputs)
        logprobs, head = self._with_head(model, inputs)
        normaliser = inputs["num_items_in_batch"].clamp(min=1) / self.accelerator.num_processes
        return self.policy_gradient.loss(inputs, logprobs, head) / normaliser

    def _with_head(self, model: Any, inputs: Any) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Return the learner's log-probs of the tokens, and of the sampler's head where the score is centred."""
        tokens, head = inputs["completion_ids"], inputs.get("head_ids")
        ids = torch.cat([inputs["prompt_ids"], tokens], 1)
        attention = torch.cat([inputs["prompt_mask"], inputs["completion_mask"]], 1)
        keep, lean = tokens.shape[1], self.runtime.lean_head and tokens.device.type == "cpu"
        if head is None:
            return self._get_per_token_logps_and_entropies(model, ids, attention, keep)[0], None
        if lean:
            logits = self._completion_logits(model, ids, attention, keep)
            return token_and_head_logprobs(logits, tokens, head, self.temperature)
        policy = self.accelerator.unwrap_model(model)
        with hidden_states(policy) as seen:
            logprobs = self._get_per_token_logps_and_entropies(model, ids, attention, keep)[0]
        weight = plain(policy).get_output_embeddings().weight
        hidden = seen[0][:, -keep - 1 : -1]
        with self.accelerator.autocast():
            return logprobs, head_logprobs_from_hidden(hidden, weight, tokens, logprobs, head, self.temperature)

    def training_step(self, model: Any, inputs: Any, num_items_in_batch: Any = None) -> torch.Tensor:
        """Take a micro-batch; after the last of the step, add the replayed rollouts' gradient to it."""
        if self.processes.count == 1:  # others might be past it
            self.break_off()
        loss = super().training_step(model, inputs, num_items_in_batch)
        self.row["loss"] += loss.item()
        if self.accelerator.sync_gradients:
            self.row["loss"] = self.processes.mean(self.row["loss"])  # as DDP averages the gradients
            if self.policy_gradient is not None:
                self.row["sampler"] = self.policy_gradient.figures(self.completions, self.processes)
        if self.accelerator.sync_gradients and self.buffer is not None:
            self._replay(model, self.buffer.draw(self.step_number))
            self._restock()
        return loss

    def _replay(self, model: Any, draw: Draw) -> None:
        """Add the drawn rollouts' gradient to the step's, and how the two compare to its figures."""
        assert self.term is not None
        nll = ratio = cosine = None
        self.replayed = draw.rollouts
        if draw.rollouts:
            grpo = GradientPart(model.parameters())
            nll = self._replay_backward(model, draw)
            ratio, cosine = grpo.join()
            self.row["loss"] += self.term.weight * nll
        self.row["replay"] = draw.figures | {"nll": nll, "grad_norm_ratio": ratio, "grad_cosine": cosine}

    def _replay_backward(self, model: Any, draw: Draw) -> float:
        """Add lambda x mean-token NLL of the drawn completions to the gradient; return the NLL.

        The mean is over the tokens of all of them, whichever process takes them. DDP averages over the processes, so
        each multiplies by their number; what it has averaged before is the same everywhere and stays what it is.
        """
        assert self.term is not None
        total, nll = sum(len(r.token_ids) for r in draw.rollouts), 0.0
        by_length = sorted(draw.rollouts, key=lambda r: len(r.prompt_ids) + len(r.token_ids))
        width = self.args.per_device_train_batch_size * self.processes.count
        for start in range(0, len(by_length), width):
            part, counts = self.processes.share(by_length[start : start + width])
            batch = collate(
                [(r.prompt_ids, r.token_ids) for r in part],
                self.tokenizer.pad_token_id,
                self.accelerator.device,
            )
            longest = batch.completion_mask_BT.shape[1]
            logprobs, _, _ = self._get_per_token_logps_and_entropies(model, batch.ids_BT, batch.attention_BT, longest)
            loss = mean_token_nll(logprobs, batch.completion_mask_BT, total) * counts
            self.accelerator.backward(self.term.weight * self.processes.count * loss)
            nll += loss.item()
        return self.processes.total(nll)

    def _restock(self) -> None:
        """Let this step's groups into the buffer, after its draw."""
        assert self.buffer is not None
        group = self.cell.grpo.rollouts_per_prompt
        for start in range(0, len(self.step_rollouts), group):
            rollouts = self.step_rollouts[start : start + group]
            problem = rollouts[0].problem_id
            self.buffer.add(
                self.step_number,
                problem,
                self.prompt_tokens[problem],
                [(r.completion, r.token_ids) for r in rollouts],
                [r.reward for r in rollouts],
            )

    def _save_checkpoint(self, model: Any, trial: Any) -> None:
        """Let Trainer save into a scratch folder; the resume state is that folder, completed and renamed.

        Trainer's own method, not GRPOTrainer's, which adds a model card.
        """
        from training.callbacks import save_resume  # the callbacks know the order of writes

        save_resume(self, lambda: super(GRPOTrainer, self)._save_checkpoint(model, trial))

    def restore(self, resume: Path) -> None:
        """Take up everything that Trainer does not save itself."""
        state = json.loads((resume / "cell_state.json").read_text(encoding="utf-8"))
        self._step = state["global_step"] * self.args.gradient_accumulation_steps
        self.first_epoch = state["global_step"] // (len(self.prompt_tokens) // self.cell.grpo.prompts_per_step)
        if self.buffer is not None:
            self.buffer.restore(state["replay"])
        if self.sampler_copy is not None:
            self.sampler_copy.restore(resume, state["global_step"])


def _rows(cell_file: CellFile, problems: Sequence[Problem], tokenizer: Any) -> list[dict[str, str]]:
    """Return the dataset: a prompt a problem."""
    spec = cell_file.prompt
    template = tokenizer.apply_chat_template if spec.rendering == "chat" else None
    return [{"prompt": render(spec, p, template), "problem_id": p.problem_id} for p in problems]


def _roll_out(prompts: list[str], trainer: GRPOTrainer) -> dict[str, Any]:
    """TRL's `rollout_func`: prompts come repeated, one a rollout; each distinct one is prefilled once."""
    assert isinstance(trainer, CellTrainer)
    group = trainer.cell.grpo.rollouts_per_prompt
    ids = trainer.batch_problem_ids[::group]
    tokens = [trainer.prompt_tokens[p] for p in ids]
    policy = trainer.accelerator.unwrap_model(trainer.model_wrapped)
    if trainer.sampler_copy is not None:
        policy = trainer.sampler_copy.at(trainer.state.global_step, policy)

    def on_done(prompt: int, _: int, token_ids: Sequence[int]) -> None:
        trainer.break_off()
        trainer.rewards.put(ids[prompt], token_ids)

    drawn = trainer.processes.together(
        lambda: draw_step(
            trainer.vllm_generation.llm if trainer.use_vllm else policy,
            trainer.tokenizer,
            trainer.spec,
            trainer.cell.grpo,
            tokens,
            ids,
            trainer.cell.seed,
            trainer.state.global_step,
            on_done=on_done,
            top_k=trainer.policy_gradient.top_k if trainer.policy_gradient else 0,
        )
    )
    trainer.completions = [c for completions in drawn for c in completions]
    return {
        "prompt_ids": [list(t) for t in tokens for _ in range(group)],
        "completion_ids": [c.token_ids for c in trainer.completions],
        "logprobs": [c.logprobs for c in trainer.completions],
    }
