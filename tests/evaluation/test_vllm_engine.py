"""The vLLM engine, executed on its CPU build (`make test-vllm`): same log-probs, same seeds, same scores."""

import math
from pathlib import Path

import pytest

pytestmark = pytest.mark.vllm
vllm = pytest.importorskip("vllm")

import torch  # noqa: E402
from transformers import AutoModelForCausalLM  # noqa: E402

from evaluation.engines import TransformersEngine  # noqa: E402
from evaluation.judge import Judge  # noqa: E402
from evaluation.manifests import Provenance  # noqa: E402
from evaluation.problems.toy import generate  # noqa: E402
from evaluation.prompts import extract, prompt_ids, resolve  # noqa: E402
from evaluation.protocol import Protocol  # noqa: E402
from evaluation.records import Program  # noqa: E402
from evaluation.request import Unit  # noqa: E402
from evaluation.vllm_engine import VllmEngine, draw_seeded  # noqa: E402

MODEL = Path(__file__).resolve().parents[2] / "training/toy_model"
PROTOCOL = Protocol(benchmark="toy_plus", n=8, temperature=0.6, top_p=0.95, max_new_tokens=64)
SPEC = resolve(MODEL, name="toy/1", rendering="plain")
PROBLEMS = generate(0).held_out


def unit():
    where = {"model_path": str(MODEL), "out": ""}
    return Unit(label="base", cell=None, global_step=0, protocol=PROTOCOL, provenance=Provenance(), **where)


@pytest.fixture(scope="module")
def engine():
    made = VllmEngine("cpu")
    made.load(unit(), SPEC)
    return made


def prompts(engine, problems):
    return [prompt_ids(SPEC, p, engine.tokenizer) for p in problems]


def test_log_probs_equal_those_of_transformers(engine):
    protocol = PROTOCOL.replace(n=2, temperature=1.0, top_p=1.0)
    few = PROBLEMS[:16]
    tokens = prompts(engine, few)
    drawn = engine.draw(protocol, [p.problem_id for p in few], tokens)
    model = AutoModelForCausalLM.from_pretrained(MODEL, dtype=torch.float32).eval()
    worst = 0.0
    for prompt, completions in zip(tokens, drawn, strict=True):
        for c in completions:
            with torch.no_grad():
                logits = model(torch.tensor([prompt + c.token_ids])).logits[0, len(prompt) - 1 : -1]
            mine = torch.log_softmax(logits.float(), -1).gather(-1, torch.tensor(c.token_ids)[:, None])[:, 0]
            worst = max(worst, float((mine - torch.tensor(c.logprobs)).abs().max()))
    assert worst < 1e-5


def test_the_head_is_that_of_transformers_the_sampled_token_beside_it_or_not(engine):
    """At a high temperature many a token is outside of its head of 32; the log-probs are of the whole vocabulary."""
    few = PROBLEMS[:8]
    tokens = prompts(engine, few)
    seeds = [[7 * i + j for j in range(2)] for i in range(len(few))]
    how = {"max_new_tokens": 32, "temperature": 1.0, "top_p": 1.0}
    drawn = draw_seeded(vllm, engine.engine, SPEC, tokens, seeds, **how, top_k=32)
    without = draw_seeded(vllm, engine.engine, SPEC, tokens, seeds, **how)
    assert [[c.token_ids for c in cs] for cs in drawn] == [[c.token_ids for c in cs] for cs in without]
    assert all(c.head is None for cs in without for c in cs)
    model = AutoModelForCausalLM.from_pretrained(MODEL, dtype=torch.float32).eval()
    for prompt, completions in zip(tokens, drawn, strict=True):
        for c in completions:
            with torch.no_grad():
                logits = model(torch.tensor([prompt + c.token_ids])).logits[0, len(prompt) - 1 : -1]
            logprobs = torch.log_softmax(logits.float(), -1)
            expected, _ = logprobs.topk(32, -1)
            head = torch.from_numpy(c.head.logprobs)
            assert head.shape == expected.shape
            assert float((head - expected).abs().max()) < 1e-4
            assert float((logprobs.gather(1, torch.from_numpy(c.head.ids).long()) - head).abs().max()) < 1e-4
            own = logprobs.gather(1, torch.tensor(c.token_ids)[:, None])[:, 0]
            assert float((own - torch.tensor(c.logprobs)).abs().max()) < 1e-4


def test_the_same_seeds_give_the_same_samples_whatever_the_batch(engine):
    few = PROBLEMS[:12]
    ids, tokens = [p.problem_id for p in few], prompts(engine, few)
    together = engine.draw(PROTOCOL, ids, tokens)
    alone = [engine.draw(PROTOCOL, [i], [t])[0] for i, t in zip(ids[:4], tokens[:4], strict=True)]
    backwards = engine.draw(PROTOCOL, ids[::-1], tokens[::-1])[::-1]
    assert [[c.token_ids for c in cs] for cs in together[:4]] == [[c.token_ids for c in cs] for cs in alone]
    assert [[c.token_ids for c in cs] for cs in together] == [[c.token_ids for c in cs] for cs in backwards]
    assert len({tuple(c.token_ids) for cs in together for c in cs}) > len(few)


def test_completions_end_at_the_stop_ids(engine):
    drawn = engine.draw(PROTOCOL, [p.problem_id for p in PROBLEMS[:8]], prompts(engine, PROBLEMS[:8]))
    for c in (c for cs in drawn for c in cs):
        stops = [t in SPEC.stop_ids for t in c.token_ids]
        assert stops[-1] == (c.finish_reason == "stop")
        assert not any(stops[:-1])


def test_pass_at_1_agrees_with_the_transformers_engine(engine, tmp_path):
    other = TransformersEngine("cpu")
    other.load(unit(), SPEC)
    rates = []
    with Judge(PROBLEMS, cache=tmp_path) as judge:
        for one in (engine, other):
            drawn = one.draw(PROTOCOL, [p.problem_id for p in PROBLEMS], prompts(one, PROBLEMS))
            programs = [
                Program(
                    problem_id=p.problem_id,
                    source=extract(SPEC, one.tokenizer.decode(c.token_ids, skip_special_tokens=True), p),
                )
                for p, cs in zip(PROBLEMS, drawn, strict=True)
                for c in cs
            ]
            passed = [v.passed for v in judge.judge(programs)]
            rates.append([sum(passed[i : i + 8]) / 8 for i in range(0, len(passed), 8)])
    gaps = [a - b for a, b in zip(*rates, strict=True)]
    mean = sum(gaps) / len(gaps)
    error = math.sqrt(sum((g - mean) ** 2 for g in gaps) / (len(gaps) - 1) / len(gaps))
    assert abs(mean) < 3 * error
    assert sum(rates[0]) / len(rates[0]) > 0.2
