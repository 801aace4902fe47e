"""One optimizer step of 512 rollouts: ours against stock TRL at micro-batches of 8, 32 and 128, in turns, in one run.

python benchmarks/train_step.py [--rounds 3] [--rollouts 512]

Same model (the shipped one), prompts, settings and judge; one thread; a rate that leaves the weights alone.
CPU seconds of the whole step in this process (the judge's children, the same for both, are left out):

    whole step      both sample for themselves: natural lengths, and with a heavy tail (temperature 1.35, 256 tokens)
    update          both are given the same completions: even lengths, and a heavy tail; rewards are coin flips of .3
"""

import argparse
import json
import statistics
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from datasets import Dataset
from transformers import TrainerCallback
from trl import GRPOTrainer

from evaluation.files import write_json, write_jsonl
from evaluation.generation import Completion
from evaluation.judge import Judge
from evaluation.manifests import Revisions
from evaluation.problems.toy import generate
from evaluation.prompts import resolve
from evaluation.records import Outcome
from training import trainer as ours
from training.callbacks import StepLog
from training.cell import ARMS, Cell, Grpo
from training.config import grpo_config
from training.folder import CellFile, RunFolder, Runtime
from training.guard import Guard
from training.reward import outcomes_of, programs_of
from training.run import load_model

MODEL = Path(__file__).resolve().parent.parent / "training/toy_model"
SPEC = resolve(MODEL, name="toy/1", rendering="plain")
PROBLEMS = generate(0).train
STOCK = {"TRL, micro-batch 8": 8, "TRL, micro-batch 32": 32, "TRL, micro-batch 128": 128}
REPLAY = "ours, replay"
"""Ours with the arm hardcd_lam0p1: up to 128 past rollouts replayed beside the step's 512."""
PARTS = ("sampling", "reward", "forward", "backward", "optimizer", "replay")


class Clock(TrainerCallback):
    """CPU seconds of each step, from its begin to its end."""

    def __init__(self) -> None:
        self.seconds: list[float] = []

    def on_step_begin(self, *_: Any, **__: Any) -> None:
        self.start = time.process_time()

    def on_step_end(self, *_: Any, **__: Any) -> None:
        self.seconds.append(time.process_time() - self.start)


class Parts:
    """CPU seconds of our step's parts, in the thread that does them; what is in none of them is overhead."""

    def __init__(self) -> None:
        self.seconds = dict.fromkeys(PARTS, 0.0)
        self.thread = threading.local()

    def wrap(self, owner: Any, name: str, part: str) -> None:
        whole = getattr(owner, name)

        def timed(*args: Any, **kwargs: Any) -> Any:
            if getattr(self.thread, "inside", False):
                return whole(*args, **kwargs)
            self.thread.inside, start = True, time.thread_time()
            try:
                return whole(*args, **kwargs)
            finally:
                self.thread.inside = False
                self.seconds[part] += time.thread_time() - start

        setattr(owner, name, timed)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--rollouts", type=int, default=512)
    parser.add_argument("--micro-batch", type=int, default=64, help="ours")
    parser.add_argument("--only", choices=("whole", "update"))
    args = parser.parse_args()
    torch.set_num_threads(1)
    grpo = Grpo(prompts_per_step=args.rollouts // 8, rollouts_per_prompt=8, max_new_tokens=64, compute_dtype="float32")
    tail = grpo.replace(temperature=1.35, max_new_tokens=256)
    with tempfile.TemporaryDirectory() as scratch, Judge(PROBLEMS, suites="reward") as judge:
        bench = Bench(Path(scratch), judge, args.micro_batch)
        if args.only != "update":
            bench.compare("whole step, natural lengths", grpo, None, args.rounds)
            bench.compare("whole step, heavy tail", tail, None, args.rounds)
        if args.only == "whole":
            return
        for name, lengths in (("even lengths", even), ("heavy tail", heavy)):
            longest = grpo.replace(max_new_tokens=400)
            bench.compare(f"update, {name}", longest, made(args.rollouts, lengths), args.rounds)


def even(rng: np.random.Generator, count: int) -> np.ndarray:
    return rng.integers(38, 43, count)


def heavy(rng: np.random.Generator, count: int) -> np.ndarray:
    return np.clip(15 + rng.pareto(1.8, count) * 12, 1, 400).astype(int)


def made(count: int, lengths: Callable[[np.random.Generator, int], np.ndarray]) -> tuple[list[Completion], list[float]]:
    """Return completions of random tokens and rewards, the same for everybody."""
    rng = np.random.default_rng(0)
    tokens = [rng.integers(2, 661, n).tolist() for n in lengths(rng, count)]
    rewards = (rng.random(count) < 0.3).astype(float).tolist()
    return [Completion(t, [-1.0] * len(t), "stop", float(len(t))) for t in tokens], rewards


class Bench:
    """Runs each contestant's step in turn."""

    def __init__(self, scratch: Path, judge: Judge, micro_batch: int) -> None:
        self.scratch, self.judge, self.micro_batch = scratch, judge, micro_batch
        self.count = self.drawn = 0
        write_jsonl(scratch / "train.jsonl", PROBLEMS)

    def compare(self, title: str, grpo: Grpo, given: tuple[list[Completion], list[float]] | None, rounds: int) -> None:
        seconds: dict[str, list[float]] = {name: [] for name in (*STOCK, "ours, all rows", "ours", REPLAY)}
        shares: dict[str, list[dict[str, float]]] = {name: [] for name in seconds}
        for _ in range(rounds):
            for name in seconds:
                if name in STOCK:
                    seconds[name].append(self.stock(grpo, STOCK[name], given))
                else:
                    spent, share = self.ours(grpo, name != "ours, all rows", given, replay=name == REPLAY)
                    seconds[name].append(spent)
                    shares[name].append(share)
        best = min(STOCK, key=lambda n: statistics.median(seconds[n]))
        print(f"\n{title}: CPU s a step, median of {rounds}; ratio to {best}, in pairs")
        for name, values in seconds.items():
            ratios = [a / b for a, b in zip(values, seconds[best], strict=True)]
            print(f"  {name:22} {statistics.median(values):7.2f}   {statistics.median(ratios):.2f}")
        for name in ("ours", REPLAY):
            parts = {k: statistics.median(s[k] for s in shares[name]) for k in shares[name][0]}
            print(f"  {name}: " + ", ".join(f"{k} {v:.1%}" for k, v in parts.items()), flush=True)
        print(f"  {REPLAY}: {self.drawn} rollouts drawn")

    def folder(self, grpo: Grpo, runtime: Runtime, arm: str = "nobuf") -> tuple[RunFolder, CellFile]:
        self.count += 1
        folder = RunFolder(self.scratch / f"run{self.count}")
        folder.logs.mkdir(parents=True)
        cell = Cell(model="toy", benchmark="toy", arm=arm, lr=1e-9, steps=2, stride=2, grpo=grpo, terms=ARMS[arm].terms)
        revisions = Revisions(model="shipped", datasets={"toy": "0"})
        file = CellFile(cell=cell, prompt=SPEC, split_sha256="0" * 64, revisions=revisions)
        write_json(folder.cell_json, file)
        write_json(folder.runtime_json, runtime)
        return folder, file

    def runtime(self, micro_batch: int, **changes: Any) -> Runtime:
        problems = str(self.scratch / "train.jsonl")
        return Runtime(model_path=str(MODEL), problems_path=problems, micro_batch=micro_batch, **changes)

    def stock(self, grpo: Grpo, micro: int, given: tuple[list[Completion], list[float]] | None) -> float:
        """Return the CPU seconds of TRL's second step."""
        runtime = self.runtime(micro)
        folder, file = self.folder(grpo, runtime)
        model, tokenizer = load_model(str(MODEL), None)
        by_id, clock = {p.problem_id: p for p in PROBLEMS}, Clock()

        def recorded(prompts: list[str], trainer: GRPOTrainer) -> dict[str, Any]:
            assert given is not None
            return {
                "prompt_ids": [tokenizer(p)["input_ids"] for p in prompts],
                "completion_ids": [c.token_ids for c in given[0]],
                "logprobs": [c.logprobs for c in given[0]],
            }

        def reward(completions: list[str], problem_id: list[str], **_: Any) -> list[float]:
            if given is not None:
                return given[1]
            found = outcomes_of(self.judge.judge(programs_of(SPEC, by_id, problem_id, completions)))
            return [float(o is Outcome.PASS) for o in found]

        stock = GRPOTrainer(
            model=model,
            args=grpo_config(file.cell, runtime, folder.root / "scratch"),
            reward_funcs=reward,
            train_dataset=Dataset.from_list([{"prompt": p.text + "\n", "problem_id": p.problem_id} for p in PROBLEMS]),
            processing_class=tokenizer,
            callbacks=[clock],
            rollout_func=recorded if given is not None else None,
        )
        stock.train()
        return clock.seconds[1]

    def ours(
        self, grpo: Grpo, drop_zero: bool, given: tuple[list[Completion], list[float]] | None, *, replay: bool
    ) -> tuple[float, dict[str, float]]:
        """Return the CPU seconds of our second step, and the share of each part and of the rest."""
        runtime = self.runtime(self.micro_batch, drop_zero=drop_zero)
        folder, file = self.folder(grpo, runtime, "hardcd_lam0p1" if replay else "nobuf")
        model, tokenizer = load_model(str(MODEL), None)
        clock, log, guard = Clock(), StepLog(folder, 2), Guard((), None)
        draw_step = ours.draw_step
        trainer = ours.CellTrainer(
            cell_file=file,
            runtime=runtime,
            folder=folder,
            problems=list(PROBLEMS),
            judge=self.judge,
            model=model,
            tokenizer=tokenizer,
            callbacks=[log, guard, clock],
        )
        log.trainer = guard.trainer = trainer
        if given is not None:
            groups = [given[0][i : i + 8] for i in range(0, len(given[0]), 8)]
            ours.draw_step = lambda *_, **__: groups
            trainer.rewards.outcomes = lambda *_: [Outcome.PASS if r else Outcome.FAIL for r in given[1]]
        parts = Parts()
        parts.wrap(ours, "draw_step", "sampling")
        parts.wrap(trainer.rewards, "outcomes", "reward")
        parts.wrap(trainer.rewards, "_judge", "reward")  # in a thread of its own, while others are drawn
        parts.wrap(trainer, "_replay", "replay")
        parts.wrap(trainer, "compute_loss", "forward")
        parts.wrap(trainer.accelerator, "backward", "backward")
        trainer.add_callback(_Optimizer(parts))
        first = dict(parts.seconds)
        trainer.add_callback(_Reset(parts, first))
        try:
            trainer.train()
        finally:
            ours.draw_step = draw_step
            trainer.rewards.close()
        spent = clock.seconds[1]
        self.drawn = len(trainer.replayed)
        shares = {k: (v - first[k]) / spent for k, v in parts.seconds.items()}
        return spent, shares | {"else": 1 - sum(shares.values())}


class _Optimizer(TrainerCallback):
    """Times the optimizer's step: from before it to after it."""

    def __init__(self, parts: Parts) -> None:
        self.parts = parts

    def on_pre_optimizer_step(self, *_: Any, **__: Any) -> None:
        self.start = time.thread_time()

    def on_optimizer_step(self, *_: Any, **__: Any) -> None:
        self.parts.seconds["optimizer"] += time.thread_time() - self.start


class _Reset(TrainerCallback):
    """Notes what the first step, a warm-up, has taken."""

    def __init__(self, parts: Parts, first: dict[str, float]) -> None:
        self.parts, self.first = parts, first

    def on_step_end(self, args: Any, state: Any, *_: Any, **__: Any) -> None:
        if state.global_step == 1:
            self.first |= self.parts.seconds


if __name__ == "__main__":
    print(json.dumps({"torch": torch.__version__, "threads": 1}))
    main()
