"""Our two decoders side by side on the shipped model: CPU seconds a token, in one run, in turns.

python benchmarks/sampling.py [--rounds 5]
"""

import argparse
import statistics
import time
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from evaluation import generation
from evaluation.problems.toy import generate

MODEL = Path(__file__).resolve().parent.parent / "training/toy_model"


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    rounds = parser.parse_args().rounds
    torch.set_num_threads(1)
    model, tokenizer = AutoModelForCausalLM.from_pretrained(MODEL), AutoTokenizer.from_pretrained(MODEL)
    problems = generate(0).train[:8]
    prompts = [tokenizer.encode(p.text + "\n") for p in problems]
    seconds = {"fused": [], "transformers": []}
    serves = generation.serves
    for round_number in range(rounds):
        seeds = [[generation.row_seed(0, str(round_number), p.problem_id, i) for i in range(8)] for p in problems]
        for name in seconds:
            generation.serves = serves if name == "fused" else lambda _: False
            start = time.process_time()
            drawn = generation.sample(
                model, prompts, seeds, max_new_tokens=64, temperature=1.0, top_p=1.0, stop_ids=[0], pad_id=1
            )
            tokens = sum(len(c.token_ids) for group in drawn for c in group)
            seconds[name].append((time.process_time() - start) / tokens)
    for name, values in seconds.items():
        print(f"{name}: median {statistics.median(values) * 1e6:.0f} us/token, min {min(values) * 1e6:.0f}")
    ratios = [b / a for a, b in zip(seconds["fused"], seconds["transformers"], strict=True)]
    print(f"transformers / fused: median {statistics.median(ratios):.2f} over {rounds} rounds")


if __name__ == "__main__":
    main()
