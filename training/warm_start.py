"""Make a shipped small model: a tokenizer and a Qwen3-architecture model, warm-started on imperfect solutions.

    python -m training.warm_start --out training/toy_model
    python -m training.warm_start --out training/sums_model --problems sums

Recipe of the first (tuned on problem seed 0, then frozen; docs/demo.md has every number): 400 problems x 8 solutions in
which each operation is its plausible mistake with probability 0.45, and one solution in twenty is a random wrong
composition; byte-level BPE; 0.4M parameters with head_dim 32 (which vLLM serves); 400 steps of 32, AdamW 4e-3, cosine.
One thread: on one machine the same command gives the same bytes. The second (docs/sums.md) has the same model and
optimizer and another corpus: 1,600 arithmetic problems x 4 worked solutions with the misreadings of
`evaluation/problems/sums.py`.
"""

import argparse
import hashlib
import json
import logging
import math
import random
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import tokenizers
import torch
import transformers
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from tqdm import tqdm
from transformers import GenerationConfig, PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM
from transformers import logging as transformers_logging

from evaluation.errors import AblationError, InputError
from evaluation.files import sha256_file, whole_folder, write_json
from evaluation.problems import sums
from evaluation.problems.toy import SHIPPED_SEED, Composition, ToyProblems, generate, solution
from evaluation.problems.toy_grammar import FILTERS, MAPS, REDUCES, RESULTS, TRANSFORMS
from evaluation.records import Problem

SOLUTIONS_PER_PROBLEM = 8
MISTAKE_PROBABILITY = 0.45
WRONG_PROBABILITY = 0.05
SUMS_SOLUTIONS_PER_PROBLEM = 4
STEPS, BATCH = 400, 32
PEAK_LR, WARMUP_STEPS, FLOOR = 4e-3, 20, 0.02
CORPUS_SEED, WEIGHTS_SEED, ORDER_SEED = 1, 0, 0
EOS, PAD = "<eos>", "<pad>"
EOS_ID, PAD_ID = 0, 1
RECIPE_FILE = "warm_start.json"
"""Seeds, settings and hashes of a warm start, beside the model."""

Pair = tuple[list[int], list[int]]
"""(prompt ids, completion ids)."""


def write_corpus(toy: ToyProblems, seed: int = CORPUS_SEED) -> list[tuple[str, str]]:
    """Return shuffled (prompt, imperfect solution) pairs of the warm-start problems."""
    rng = random.Random(seed)
    rows = []
    for problem in toy.warm_start:
        composition = toy.compositions[problem.problem_id]
        for _ in range(SOLUTIONS_PER_PROBLEM):
            if rng.random() < WRONG_PROBABILITY:
                code = solution(_other(composition, rng), keep_name=composition.name)
            else:
                code = solution(composition, lambda _: rng.random() < MISTAKE_PROBABILITY)
            rows.append((prompt(problem), code))
    rng.shuffle(rows)
    return rows


def write_sums_corpus(made: sums.SumProblems, seed: int = CORPUS_SEED) -> list[tuple[str, str]]:
    """Return shuffled (prompt, worked solution) pairs of the warm-start problems, some of them misread."""
    rng = random.Random(seed)
    rows = []
    for problem in made.warm_start:
        story = made.stories[problem.problem_id]
        for _ in range(SUMS_SOLUTIONS_PER_PROBLEM):
            rows.append((prompt(problem), sums.solution(story, lambda change: rng.random() < change.mistaken)))
    rng.shuffle(rows)
    return rows


def prompt(problem: Problem) -> str:
    """Return the text of `toy/1` and `sums/1` (tests hold it equal to the prompt specification's rendering)."""
    return problem.text + "\n"


def _other(c: Composition, rng: random.Random) -> Composition:
    """Return a composition that differs in one place: an operation, a constant, or one operation dropped."""
    tables = (FILTERS, MAPS, REDUCES) if c.key[0] == "int" else (TRANSFORMS, TRANSFORMS, RESULTS)
    place = rng.randrange(4)
    if place == 3:
        return replace(c, k=rng.randint(2, 9), m=rng.randint(2, 9))
    key = list(c.key)
    offset = len(key) - 3 + place
    if key[offset]:
        key[offset] = rng.choice(list(tables[place]))
    return replace(c, key=tuple(key))


def train_tokenizer(texts: list[str]) -> Tokenizer:
    """Return a byte-level BPE tokenizer of the corpus; ids 0 and 1 are the end and the padding."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)  # pyright: ignore[reportAttributeAccessIssue]
    tokenizer.decoder = decoders.ByteLevel()  # pyright: ignore[reportAttributeAccessIssue]
    tokenizer.train_from_iterator(
        texts,
        trainers.BpeTrainer(
            vocab_size=1024,
            special_tokens=[EOS, PAD],
            initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
            show_progress=False,
        ),
    )
    return tokenizer


def build_model(vocab_size: int, seed: int = WEIGHTS_SEED) -> Qwen3ForCausalLM:
    """Return the untrained model: 3 layers of 96, 4 heads of 32 with 2 key-value heads, tied embeddings."""
    torch.manual_seed(seed)
    config = Qwen3Config(
        vocab_size=vocab_size,
        hidden_size=96,
        intermediate_size=256,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=512,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=EOS_ID,
        pad_token_id=PAD_ID,
    )
    model = Qwen3ForCausalLM(config)
    model.generation_config = GenerationConfig(eos_token_id=EOS_ID, pad_token_id=PAD_ID)
    return model


def batches(pairs: list[Pair], steps: int, seed: int = ORDER_SEED) -> Iterator[list[Pair]]:
    """Yield `steps` batches of like length: eight batches' worth are drawn, sorted by length and shuffled."""
    rng = random.Random(seed)
    order: list[int] = []
    queue: list[list[Pair]] = []
    for _ in range(steps):
        if not queue:
            pool: list[Pair] = []
            while len(pool) < 8 * BATCH:
                if not order:
                    order = list(range(len(pairs)))
                    rng.shuffle(order)
                pool.append(pairs[order.pop()])
            pool.sort(key=lambda pair: (len(pair[1]), len(pair[0])))
            queue = [pool[i : i + BATCH] for i in range(0, len(pool), BATCH)]
            rng.shuffle(queue)
        yield queue.pop()


def loss_of(model: Qwen3ForCausalLM, batch: list[Pair]) -> torch.Tensor:
    """Return the mean negative log-likelihood over all completion tokens of the batch."""
    width = max(len(p) for p, _ in batch)
    length = width + max(len(c) for _, c in batch)
    ids_BT = torch.full((len(batch), length), PAD_ID)
    attention_BT = torch.zeros(len(batch), length, dtype=torch.long)
    labels_BT = torch.full((len(batch), length), -100)
    for row, (p, c) in enumerate(batch):
        ids_BT[row, width - len(p) : width + len(c)] = torch.tensor(p + c)
        attention_BT[row, width - len(p) : width + len(c)] = 1
        labels_BT[row, width : width + len(c)] = torch.tensor(c)
    positions_BT = (attention_BT.cumsum(1) - 1).clamp(min=0)
    hidden = model.model(input_ids=ids_BT, attention_mask=attention_BT, position_ids=positions_BT, use_cache=False)
    logits = model.lm_head(hidden.last_hidden_state[:, width - 1 : -1])
    return torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels_BT[:, width:].flatten(), ignore_index=-100)


def rate(step: int, steps: int) -> float:
    """Return the learning rate of a step: linear warm-up, then cosine to a fiftieth."""
    warm = (step + 1) / WARMUP_STEPS
    cosine = 0.5 * (1 + math.cos(math.pi * (step - WARMUP_STEPS) / max(1, steps - WARMUP_STEPS)))
    return PEAK_LR * min(1.0, max(warm if step < WARMUP_STEPS else cosine, FLOOR))


@dataclass(frozen=True)
class Recipe:
    """What one shipped model is warm-started on."""

    corpus: Callable[[int], list[tuple[str, str]]]
    """(prompt, solution) pairs of a problem seed."""
    settings: dict[str, object]
    """What warm_start.json says of the corpus."""


RECIPES: dict[str, Recipe] = {
    "toy": Recipe(
        lambda seed: write_corpus(generate(seed)),
        {
            "solutions_per_problem": SOLUTIONS_PER_PROBLEM,
            "mistake_probability": MISTAKE_PROBABILITY,
            "wrong_probability": WRONG_PROBABILITY,
        },
    ),
    "sums": Recipe(
        lambda seed: write_sums_corpus(sums.generate(seed)),
        {
            "solutions_per_problem": SUMS_SOLUTIONS_PER_PROBLEM,
            "mistake_probability": {key: change.mistaken for key, change in sums.CHANGES.items()},
        },
    ),
}
"""By the token of the training benchmark."""


def warm_start(out: Path, steps: int = STEPS, problem_seed: int = SHIPPED_SEED, problems: str = "toy") -> float:
    """Write the model, its tokenizer and its recipe to `out`; return the last loss.

    Raises:
        InputError: there is nothing to train, or `out` holds something else than a warm start.
    """
    if steps < 1:
        raise InputError("steps", steps, "nothing to train", "give 1 or more")
    if out.exists() and not (out / RECIPE_FILE).is_file() and (not out.is_dir() or any(out.iterdir())):
        raise InputError("out", out, "exists and is not a warm-started model's folder", "name another folder")
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True)
    recipe = RECIPES[problems]
    corpus = recipe.corpus(problem_seed)
    bpe = train_tokenizer([text for pair in corpus for text in pair])
    pairs = [(bpe.encode(p).ids, [*bpe.encode(c).ids, EOS_ID]) for p, c in corpus]
    model = build_model(bpe.get_vocab_size())
    loss = fit(model, pairs, steps)
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=bpe, eos_token=EOS, pad_token=PAD, padding_side="left")
    with whole_folder(out) as partial:
        model.save_pretrained(partial)
        tokenizer.save_pretrained(partial)
        hashes = {name: sha256_file(partial / name) for name in ("model.safetensors", "tokenizer.json")}
        hashes["corpus"] = hashlib.sha256(json.dumps(corpus).encode()).hexdigest()
        write_json(
            partial / RECIPE_FILE,
            {
                "schema": "warm_start/1",
                "seeds": {
                    "problems": problem_seed,
                    "corpus": CORPUS_SEED,
                    "weights": WEIGHTS_SEED,
                    "order": ORDER_SEED,
                },
                **recipe.settings,
                "steps": steps,
                "batch": BATCH,
                "peak_lr": PEAK_LR,
                "num_parameters": model.num_parameters(),
                "last_loss": loss,
                "sha256": hashes,
                "versions": {m.__name__: m.__version__.split("+")[0] for m in (torch, transformers, tokenizers)},
            },
        )
    return loss


def fit(model: Qwen3ForCausalLM, pairs: list[Pair], steps: int) -> float:
    """Train the model in place; return the last batch's loss in nats a token."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=PEAK_LR, weight_decay=0.01, betas=(0.9, 0.98))
    last = math.nan
    for step, batch in enumerate(tqdm(batches(pairs, steps), total=steps, desc="warm start", unit="step")):
        for group in optimizer.param_groups:
            group["lr"] = rate(step, steps)
        loss = loss_of(model, batch)
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        last = loss.item()
    return last


def main(argv: list[str] | None = None) -> int:
    """Run the command; return the exit code."""
    parser = argparse.ArgumentParser(description="Make a shipped small model (docs/demo.md, docs/sums.md).")
    parser.add_argument("--out", type=Path, required=True, help="folder to write, whole or not at all")
    parser.add_argument(
        "--steps", type=int, default=STEPS, help=f"optimizer steps of {BATCH} solutions (default {STEPS})"
    )
    parser.add_argument(
        "--seed",
        "--problem-seed",
        type=int,
        default=SHIPPED_SEED,
        help=f"seed of the generated problems (default {SHIPPED_SEED})",
    )
    parser.add_argument("--problems", choices=sorted(RECIPES), default="toy", help="which model (default toy)")
    args = parser.parse_args(argv)
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    transformers_logging.disable_progress_bar()
    try:
        loss = warm_start(args.out, args.steps, args.seed, args.problems)
    except AblationError as e:
        sys.stderr.write(f"error: {e}\n")
        return e.exit_code
    logging.info("%s", json.dumps({"out": str(args.out), "last_loss": loss}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
