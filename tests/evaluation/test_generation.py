"""Drawing completions from any causal LM: batches that do not matter, exact log-probs, and a fused twin that agrees."""

import itertools
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch.nn.utils import parametrize
from transformers import AutoModelForCausalLM, AutoTokenizer

from evaluation import generation
from evaluation.fused import FusedDecoder, serves
from evaluation.generation import CachedDecoder, Completion, NonFiniteLogits, row_seed, sample
from evaluation.problems.toy import generate
from evaluation.prompts import prompt_ids, resolve

MODEL = Path(__file__).resolve().parents[2] / "training" / "toy_model"
SPEC = resolve(MODEL, name="toy/1", rendering="plain")
VOCABULARY = 61
SMALL = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
}
HEAD = {"head_dim": 16}
LINEAR = {
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 2,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "num_hidden_layers": 4,
}
ARCHITECTURES: dict[str, dict[str, Any]] = {
    "Qwen3": HEAD,
    "Qwen2": {},
    "Llama": {},
    "Mistral": {"sliding_window": 8},
    "Gemma3Text": HEAD | {"sliding_window": 8, "num_hidden_layers": 7},
    "GPT2": {"n_embd": 32, "n_layer": 2, "n_head": 4, "vocab_size": VOCABULARY},
    "GPTNeoX": {},
    "Qwen3_5Text": HEAD | LINEAR,  # hybrid: linear attention keeps a state, not keys
}


def build(name: str, **changes: Any) -> Any:
    """Make a small random model of an architecture; its logits are spread out, so that tokens differ."""
    torch.manual_seed(0)
    config = getattr(transformers, f"{name}Config")(**(SMALL if name != "GPT2" else {}) | ARCHITECTURES[name] | changes)
    config.eos_token_id = config.pad_token_id = None
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    for parameter in model.parameters():
        parameter.data *= 3 if parameter.dim() > 1 else 1
    return model


def prompts(*lengths: int) -> list[list[int]]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(2, VOCABULARY, (n,), generator=generator).tolist() for n in lengths]


def seeds(num_prompts: int, n: int) -> list[list[int]]:
    return [[row_seed(0, "test", str(u), i) for i in range(n)] for u in range(num_prompts)]


def draw(model: Any, given: list[list[int]], keys: list[list[int]], **changes: Any) -> list[list[Completion]]:
    options = {
        "max_new_tokens": 14,
        "temperature": 1.0,
        "top_p": 1.0,
        "stop_ids": (5, 9, 30),
        "pad_id": 1,
        **changes,
    }
    return sample(model, given, keys, **options)


def tokens(drawn: list[list[Completion]]) -> list[list[list[int]]]:
    return [[c.token_ids for c in row] for row in drawn]


def exact(model: Any, prompt: list[int], completion: list[int], temperature: float = 1.0) -> torch.Tensor:
    """Log-probs by one forward pass over the whole text: no cache, no padding."""
    with torch.no_grad():
        logits = model(torch.tensor([prompt + completion]), use_cache=False).logits[0, len(prompt) - 1 : -1]
    return torch.log_softmax(logits.float() / temperature, -1)[range(len(completion)), completion]


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_log_probs_are_those_of_a_whole_forward_pass(name: str) -> None:
    """Past left padding, a repeated cache, sliding windows and rows that leave."""
    model, given = build(name), prompts(3, 11, 7)
    drawn = draw(model, given, seeds(3, 4), temperature=0.8, top_p=0.9)
    for prompt, row in zip(given, drawn, strict=True):
        for c in row:
            wanted = exact(model, prompt, c.token_ids, 0.8)
            assert torch.allclose(torch.tensor(c.logprobs), wanted, atol=1e-4)
    lengths = {len(c.token_ids) for row in drawn for c in row}
    assert len(lengths) > 3  # some stopped on the way


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_greedy_tokens_are_the_likeliest_of_a_whole_forward_pass(name: str) -> None:
    model, given = build(name), prompts(6, 2)
    for prompt, (c,) in zip(given, draw(model, given, seeds(2, 1), temperature=0.0), strict=True):
        with torch.no_grad():
            logits = model(torch.tensor([prompt + c.token_ids]), use_cache=False).logits[0, len(prompt) - 1 : -1]
        assert c.token_ids == logits.argmax(-1).tolist()


@pytest.mark.parametrize("name", ["Qwen3", "Llama", "Qwen3_5Text"])
def test_a_row_is_a_function_of_its_seed_whatever_the_batch(name: str) -> None:
    model, given, keys = build(name), prompts(4, 9, 5), seeds(3, 3)
    together = tokens(draw(model, given, keys))
    assert tokens(draw(model, given, keys)) == together
    for u, i in itertools.product(range(3), range(3)):
        assert tokens(draw(model, [given[u]], [[keys[u][i]]])) == [[together[u][i]]]
    assert tokens(draw(model, given[::-1], keys[::-1])) == together[::-1]
    assert len({tuple(t) for row in together for t in row}) > 5
    longer = tokens(draw(model, given, keys, max_new_tokens=20))
    assert [[t[:14] for t in row] for row in longer] == together


def test_completions_end_with_their_stop_token_or_their_length() -> None:
    model = build("Qwen3")
    drawn = [c for row in draw(model, prompts(4, 9), seeds(2, 24)) for c in row]
    for c in drawn:
        assert not {5, 9, 30} & set(c.token_ids[:-1])
        assert (c.token_ids[-1] in {5, 9, 30}) == (c.finish_reason == "stop")
        assert c.finish_reason == "stop" or len(c.token_ids) == 14
        assert len(c.logprobs) == len(c.token_ids)
    assert {c.finish_reason for c in drawn} == {"stop", "length"}


def test_a_stop_text_ends_a_row_at_the_token_that_completes_it() -> None:
    model, given, keys = build("Qwen3"), prompts(4), seeds(1, 6)
    free = tokens(draw(model, given, keys, stop_ids=()))[0]
    pair = free[0][3:5]
    ends = [next((k for k in range(2, 15) if t[k - 2 : k] == pair), 14) for t in free]
    cut = draw(model, given, keys, stop_ids=(), stop_text=lambda ids: ids[-2:] == pair)[0]
    assert [c.token_ids for c in cut] == [t[:e] for t, e in zip(free, ends, strict=True)]
    assert cut[0].finish_reason == "stop" and len(cut[0].token_ids) == 5


def test_nothing_asked_for_is_nothing_drawn_and_nonsense_is_refused() -> None:
    model = build("Qwen3")
    assert draw(model, [], []) == []
    assert draw(model, prompts(3, 4), [[], []]) == [[], []]
    with pytest.raises(ValueError, match="empty prompt"):
        draw(model, [[]], [[1]])
    with pytest.raises(ValueError, match="seeds"):
        draw(model, prompts(3, 4), [[1, 2], [3]])
    with pytest.raises(ValueError, match="seeds"):
        draw(model, prompts(3, 4), [[1, 2]])


@pytest.mark.parametrize("name", ["Qwen3", "GPT2"])
@pytest.mark.parametrize("training", [True, False])
def test_sampling_leaves_the_model_as_it_was(name: str, training: bool) -> None:
    """Also where it fails half-way."""
    model = build(name).train(training)
    before = {k: v.clone() for k, v in model.state_dict().items()}
    draw(model, prompts(3), seeds(1, 2))
    assert model.training is training
    assert all((v == before[k]).all() for k, v in model.state_dict().items())
    next(iter(model.parameters())).data.fill_(float("nan"))
    with pytest.raises(NonFiniteLogits):
        draw(model, prompts(3), seeds(1, 2))
    assert model.training is training


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_weights_that_are_not_finite_are_an_error_not_a_text(temperature: float) -> None:
    for name in ("Qwen3", "Llama"):
        model = build(name)
        model.model.layers[1].mlp.down_proj.weight.data[0, 0] = float("inf")
        with pytest.raises(NonFiniteLogits):
            draw(model, prompts(3, 5), seeds(2, 2), temperature=temperature)


def test_dropout_is_off_while_sampling() -> None:
    model = build("GPT2", attn_pdrop=0.5, resid_pdrop=0.5, embd_pdrop=0.5).train()
    assert tokens(draw(model, prompts(3), seeds(1, 4))) == tokens(draw(model.eval(), prompts(3), seeds(1, 4)))


# The fused decoder


@pytest.fixture(scope="module")
def shipped() -> tuple[Any, list[list[int]]]:
    """The shipped model, and prompts it knows."""
    model = AutoModelForCausalLM.from_pretrained(MODEL, dtype=torch.float32).eval()
    tokenizer = AutoTokenizer.from_pretrained(MODEL)
    return model, [prompt_ids(SPEC, p, tokenizer) for p in generate(0).held_out[:12]]


@pytest.mark.parametrize(("temperature", "top_p"), [(0.0, 1.0), (1.0, 1.0), (0.6, 0.95)])
def test_the_fused_decoder_agrees_with_transformers(
    shipped: tuple[Any, list[list[int]]], temperature: float, top_p: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Greedy tokens equal, log-probs to 1e-5, entropies too."""
    model, given = shipped
    assert serves(model)
    keys = seeds(len(given), 1 if temperature == 0 else 4)
    options = {"max_new_tokens": 72, "temperature": temperature, "top_p": top_p, "stop_ids": SPEC.stop_ids}
    fused = draw(model, given, keys, **options)
    monkeypatch.setattr(generation, "serves", lambda _: False)
    plain = draw(model, given, keys, **options)
    assert tokens(fused) == tokens(plain)
    for f, p in zip(itertools.chain(*fused), itertools.chain(*plain), strict=True):
        assert f.logprobs == pytest.approx(p.logprobs, abs=1e-5)
        assert f.entropy_sum == pytest.approx(p.entropy_sum, abs=1e-4)


def test_the_fused_decoder_follows_the_weights(shipped: tuple[Any, list[list[int]]]) -> None:
    model = build("Qwen3", tie_word_embeddings=True)
    given, keys = prompts(3, 8), seeds(2, 4)
    first = tokens(draw(model, given, keys))
    saved = model.model.layers[0].mlp.up_proj.weight.data.clone()
    model.model.layers[0].mlp.up_proj.weight.data *= -1
    assert tokens(draw(model, given, keys)) != first
    model.model.layers[0].mlp.up_proj.weight.data.copy_(saved)
    assert tokens(draw(model, given, keys)) == first


def test_the_fused_decoder_takes_only_what_it_computes_exactly() -> None:
    assert serves(build("Qwen3")) and serves(build("Qwen3", tie_word_embeddings=True))
    refused = [
        build("Llama"),
        build("Qwen2"),
        build("Qwen3", attention_bias=True),
        build("Qwen3", hidden_act="gelu"),
        build("Qwen3", use_sliding_window=True, sliding_window=8, max_window_layers=1),
        build("Qwen3", rope_parameters={"rope_type": "linear", "factor": 2.0, "rope_theta": 1e4}),
        build("Qwen3", hidden_size=1024),
        build("Qwen3").to(torch.bfloat16),
    ]
    assert not any(serves(m) for m in refused)
    adapted = build("Qwen3")
    parametrize.register_parametrization(adapted.model.layers[1].mlp.up_proj, "weight", torch.nn.Linear(32, 32))
    assert not serves(adapted)
    with pytest.raises(AssertionError):
        FusedDecoder(refused[0], 4)


def test_what_the_fused_decoder_refuses_is_sampled_the_plain_way() -> None:
    for changes in (
        {"attention_bias": True},
        {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 1},
    ):
        model, given = build("Qwen3", **changes), prompts(12, 4)
        for prompt, row in zip(given, draw(model, given, seeds(2, 2)), strict=True):
            for c in row:
                assert torch.allclose(torch.tensor(c.logprobs), exact(model, prompt, c.token_ids), atol=1e-4)


def test_the_plain_decoder_speaks_to_this_version_without_a_warning(recwarn: pytest.WarningsRecorder) -> None:
    decoder = CachedDecoder(build("Qwen3"))
    with torch.inference_mode():
        decoder.prefill(prompts(3), 2, 1)
        decoder.step(torch.tensor([3, 4]))
    assert not [w for w in recwarn if "past_key_values" in str(w.message)]
