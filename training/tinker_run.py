"""A cell trained on a service (backend `tinker`): the same steps, files and figures as `training/trainer.py` has here.

Sampling and gradients are the service's; problems, their order, rewards, advantages, the loss and its centering are
ours, by the same functions. A resume state is the address of a state that the service keeps (weights and optimizer),
with the log so far. A step that was under way when the run ended is taken again, with other samples: a clean
continuation, not a bit for bit one. Left out: replay, mismatches, reporters, several processes.
"""

import contextlib
import json
import logging
import math
import shutil
import signal
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from peft import PeftModel

from evaluation.errors import InputError, Stopped
from evaluation.exact import Judging
from evaluation.files import PARTIAL, write_json
from evaluation.generation import Completion, row_seed
from evaluation.manifests import is_complete, write_manifest
from evaluation.prompts import check, prompt_ids, render
from evaluation.records import Outcome, Problem
from training.callbacks import Diverged, append_line, drop_old_resumes, line_of, make_checkpoint, rewind, tell_progress
from training.centering import PolicyGradient
from training.folder import CellFile, RunFolder, Runtime
from training.guard import MARGIN, broken_off
from training.lora import exported
from training.order import step_order
from training.processes import Processes
from training.reward import RewardStream
from training.rollouts import Rollout, recorded, step_figures, write_rollouts
from training.run import load_model
from training.tinker_service import Service, Update

logger = logging.getLogger(__name__)


class ServiceCell:
    """One cell's training, from its newest resume state to its end."""

    def __init__(
        self, folder: RunFolder, cell_file: CellFile, runtime: Runtime, problems: list[Problem], judge: Judging
    ) -> None:
        self.folder, self.cell_file, self.cell, self.runtime = folder, cell_file, cell_file.cell, runtime
        self.problems, self.spec = problems, cell_file.prompt
        if self.spec.stop_strings:
            raise InputError("backend", "tinker", "the prompt has stop strings", "use a prompt that ends by a token")
        base, self.tokenizer = load_model(runtime.model_path, runtime.model_revision)  # as every export will
        check(self.spec, self.tokenizer, base.config, base.generation_config)
        self.rewards = RewardStream(judge, self.spec, {p.problem_id: p for p in problems}, self._texts)
        top_k = self.cell.center.top_k if self.cell.center else 0
        assert self.cell.grpo.importance is not None
        self.policy_gradient = PolicyGradient(self.cell.grpo.importance, top_k)
        self.reason: str | None = None
        self.done, self.saved = 0, 0
        self.longest_s = 0.0

    def train(self, resume: int | None) -> None:
        """Take every step that is left.

        Raises:
            Diverged: a loss or a gradient's norm is not finite.
            Stopped: by a signal, or at the end of its time, with every whole step saved; or the service failed.
        """
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._on_signal)
        self.service = Service(self.cell, self.runtime.service_timeout_s, lambda: self.reason)
        with contextlib.closing(self.rewards), self.service:
            self.done = self.saved = resume or 0
            self.service.begin(self._state_of(resume))
            rewind(self.folder, self.done)
            if resume in self.cell.checkpoints:  # killed between the resume state and its checkpoint
                self._publish(resume)
            self._steps()

    def _on_signal(self, *_: object) -> None:
        self.reason = "signal=TERM"

    def _state_of(self, resume: int | None) -> str | None:
        if resume is None:
            return None
        logger.info("going on from step %d", resume)
        path = self.folder.resume(resume) / "cell_state.json"
        state = json.loads(path.read_text(encoding="utf-8"))
        return state["service_state"]

    def _steps(self) -> None:
        started, first = time.monotonic(), self.done
        while self.done < self.cell.steps:
            began = time.monotonic()
            try:
                self._stop_if_due()
                row, norm = self._step(self.done)
            except Stopped:
                if self.reason is not None and self.done > self.saved:  # otherwise there is nobody to save it
                    self._save()
                raise
            self.done += 1
            self._log(row, norm, began, (time.monotonic() - started) / (self.done - first))
            every = self.runtime.resume_every
            if self.done in self.cell.checkpoints or (every and self.done % every == 0):
                self._save()
            self.longest_s = max(self.longest_s, time.monotonic() - began)

    def _stop_if_due(self) -> None:
        end = self.runtime.end_by
        if end is not None and time.time() + MARGIN * self.longest_s > end:
            self.reason = self.reason or "end_by=reached"
        if self.reason is not None:
            raise broken_off(self.reason, self.done, self.cell.steps)

    def _log(self, row: dict[str, Any], norm: float | None, began: float, pace_s: float) -> None:
        line = line_of(self.done, row, norm, time.monotonic() - began)
        append_line(self.folder, line)
        tell_progress(self.folder, line, self.cell.steps, pace_s)
        for what, value in (("loss", row["loss"]), ("gradient norm", norm)):
            if value is not None and not math.isfinite(value):
                raise Diverged(self.done, what)

    def _step(self, step: int) -> tuple[dict[str, Any], float | None]:
        """Draw, reward and learn; return the step's figures and the gradient's norm, None if the service is silent."""
        g, cell = self.cell.grpo, self.cell
        chosen = [self.problems[i] for i in step_order(len(self.problems), g.prompts_per_step, cell.seed, step)]
        prompts = [prompt_ids(self.spec, p, self.tokenizer) for p in chosen]
        seeds = [row_seed(cell.seed, f"step {step}", p.problem_id, 0) for p in chosen]
        drawn = self.service.draw(g, self.spec.stop_ids, prompts, seeds)
        ids = [p.problem_id for p in chosen for _ in range(g.rollouts_per_prompt)]
        completions = [c for group in drawn for c in group]
        outcomes = self.rewards.outcomes(ids, [c.token_ids for c in completions])
        rollouts = self._record(step + 1, chosen, ids, completions, outcomes)
        row = step_figures(rollouts, [c.entropy_sum for c in completions], g.rollouts_per_prompt)
        updates = [Update(prompts[i // g.rollouts_per_prompt], c) for i, c in enumerate(completions)]
        row["loss"], norm = self.learn(updates, [r.advantage for r in rollouts])
        row["sampler"] = self.policy_gradient.figures(completions, Processes())
        return row, norm

    def learn(self, updates: Sequence[Update], advantages: Sequence[float]) -> tuple[float, float | None]:
        """Take the optimizer step on a step's rollouts, if its loss is finite; return that and the gradient's norm.

        Rows without advantage add nothing and are not sent, but for one where there is no other: the step, with its
        momentum and weight decay, is taken all the same.
        """
        total, found = sum(len(u.completion.token_ids) for u in updates), [0.0]
        rows = [i for i, a in enumerate(advantages) if a] or [
            min(range(len(updates)), key=lambda i: len(updates[i].completion.token_ids))
        ]
        sent = [updates[i] for i in rows]
        width = max(len(u.completion.token_ids) for u in sent)
        inputs = self.policy_gradient.tensors([u.completion for u in sent], width, torch.device("cpu"))
        inputs["advantages"] = torch.tensor([advantages[i] for i in rows])
        inputs["completion_mask"] = torch.zeros(len(sent), width)
        for mask, u in zip(inputs["completion_mask"], sent, strict=True):
            mask[: len(u.completion.token_ids)] = 1

        def loss(logprobs: list[torch.Tensor]) -> torch.Tensor:
            padded = torch.nn.utils.rnn.pad_sequence(logprobs, batch_first=True)
            own, head = (padded[..., 0], padded[..., 1:]) if padded.ndim == 3 else (padded, None)
            value = self.policy_gradient.loss(inputs, own, head) / total
            found[0] = value.item()
            return value

        self.service.add_gradient(sent, loss)
        return found[0], self.service.optimize() if math.isfinite(found[0]) else None

    def _record(
        self,
        number: int,
        chosen: Sequence[Problem],
        ids: Sequence[str],
        completions: Sequence[Completion],
        outcomes: Sequence[Outcome],
    ) -> list[Rollout]:
        group = self.cell.grpo.rollouts_per_prompt
        template = self.tokenizer.apply_chat_template if self.spec.rendering == "chat" else None
        shown = [render(self.spec, p, template) for p in chosen for _ in range(group)]
        texts = self._texts([c.token_ids for c in completions])
        passed = torch.tensor([float(o is Outcome.PASS) for o in outcomes]).view(-1, group)
        advantages = (passed - passed.mean(1, keepdim=True)).flatten().tolist()
        rollouts = recorded(ids, shown, texts, completions, outcomes, advantages, group)
        write_rollouts(self.folder.rollout(number), rollouts)
        return rollouts

    def _texts(self, ids: Sequence[Sequence[int]]) -> list[str]:
        return self.tokenizer.batch_decode(
            [list(i) for i in ids], skip_special_tokens=True, clean_up_tokenization_spaces=False
        )

    def _save(self) -> None:
        """Write `resume/step_N`, then `global_step_N` if it is a checkpoint; each whole or absent, in this order."""
        step, identity = self.done, self.cell_file.identity
        final = self.folder.resume(step)
        scratch = final.with_name(final.name + PARTIAL)
        shutil.rmtree(scratch, ignore_errors=True)
        scratch.mkdir(parents=True)
        state = self.service.save(f"{identity.fingerprint[:16]}-{step}")
        told = {"schema": "cell_state/1", "global_step": step, "replay": None, "service_state": state}
        write_json(scratch / "cell_state.json", told)
        shutil.copyfile(self.folder.steps_jsonl, scratch / "steps.jsonl")
        write_manifest(scratch, "resume", identity.provenance(self.cell.name, step))
        shutil.rmtree(final, ignore_errors=True)
        scratch.rename(final)
        self.saved = step
        if step in self.cell.checkpoints:
            self._publish(step)
        drop_old_resumes(self.folder, step, self.runtime.keep_resume)

    def _publish(self, step: int) -> None:
        """Make `global_step_N` from the service's weights of this moment, unless it is there."""
        if is_complete(self.folder.checkpoint(step)):
            return
        fetched = self.folder.root / f"exported{PARTIAL}"
        shutil.rmtree(fetched, ignore_errors=True)
        fetched.mkdir()
        self.service.export(f"{self.cell_file.identity.fingerprint[:16]}-{step}", fetched)
        model = self._model_of(fetched)
        make_checkpoint(self.folder, self.cell_file, model, self.tokenizer, step)
        shutil.rmtree(fetched)

    def _model_of(self, fetched: Path) -> PeftModel:
        """Return our base with the adapters of an export.

        Raises:
            InputError: there are none, or not those that the cell trains.
        """
        base, _ = load_model(self.runtime.model_path, self.runtime.model_revision)
        try:
            return exported(base, self.cell, fetched)
        except InputError as e:
            raise InputError("backend", "tinker", f"the service's export {e.reason}", "use another service") from e
