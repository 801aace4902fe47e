"""The replay term against an unpadded cross entropy, sequence by sequence, gradients included."""

import math
import random
from collections.abc import Iterator

import pytest
import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

from training.objectives import GradientPart, collate, mean_token_nll

Pairs = list[tuple[list[int], list[int]]]
PAD, VOCAB = 0, 50
CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def model() -> Qwen3ForCausalLM:
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=VOCAB,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        max_position_embeddings=64,
        pad_token_id=PAD,
    )
    return Qwen3ForCausalLM(config).double()


@pytest.fixture(scope="module")
def pairs() -> Pairs:
    """Prompts and completions of 1 to 12 tokens; the padding token itself occurs in some, as an end token may."""
    rng = random.Random(0)
    return [([rng.randrange(VOCAB) for _ in range(p)], [rng.randrange(VOCAB) for _ in range(c)]) for p, c in SHAPES] + [
        ([PAD, 4, PAD], [5, PAD, 6, PAD])
    ]


SHAPES = [(3, 5), (12, 1), (1, 12), (7, 7), (1, 1), (5, 12), (12, 2)]


def logprobs(model: Qwen3ForCausalLM, ids: torch.Tensor, attention: torch.Tensor, width: int) -> torch.Tensor:
    """Return the log-probability of the last `width` tokens, positions counted from the first real token."""
    positions = (attention.cumsum(1) - 1).clamp(min=0)
    logits = model(input_ids=ids, attention_mask=attention, position_ids=positions).logits
    chosen = logits[:, :-1].log_softmax(-1).gather(2, ids[:, 1:, None]).squeeze(2)
    return chosen[:, -width:]


def padded_loss(model: Qwen3ForCausalLM, pairs: Pairs, total: int) -> torch.Tensor:
    batch = collate(pairs, PAD, CPU)
    width = batch.completion_mask_BT.shape[1]
    return mean_token_nll(
        logprobs(model, batch.ids_BT, batch.attention_BT, width), batch.completion_mask_BT.double(), total
    )


def reference_loss(model: Qwen3ForCausalLM, pairs: Pairs) -> torch.Tensor:
    """One mean over all completion tokens, every sequence by itself and unpadded."""
    parts = []
    for prompt, completion in pairs:
        logits = model(input_ids=torch.tensor([prompt + completion])).logits[0, len(prompt) - 1 : -1]
        parts.append(torch.nn.functional.cross_entropy(logits, torch.tensor(completion), reduction="none"))
    return torch.cat(parts).mean()


def gradient(model: Qwen3ForCausalLM, losses: Iterator[torch.Tensor]) -> torch.Tensor:
    model.zero_grad()
    for loss in losses:
        loss.backward()
    return torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])


def test_the_loss_and_its_gradient_are_those_of_unpadded_sequences(model: Qwen3ForCausalLM, pairs: Pairs) -> None:
    total = sum(len(c) for _, c in pairs)
    assert padded_loss(model, pairs, total).item() == pytest.approx(reference_loss(model, pairs).item(), rel=1e-12)
    expected = gradient(model, iter([reference_loss(model, pairs)]))
    found = gradient(model, iter([padded_loss(model, pairs, total)]))
    assert expected.norm() > 0.1
    torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("size", [1, 2, 3, 5, 8])
def test_micro_batches_add_up_to_the_whole(model: Qwen3ForCausalLM, pairs: Pairs, size: int) -> None:
    """However the step is cut, also unevenly: the mean is over the step's tokens, not a mean of means."""
    total = sum(len(c) for _, c in pairs)
    expected = gradient(model, iter([reference_loss(model, pairs)]))
    losses = [padded_loss(model, pairs[i : i + size], total) for i in range(0, len(pairs), size)]
    assert sum(x.item() for x in losses) == pytest.approx(reference_loss(model, pairs).item(), rel=1e-12)
    torch.testing.assert_close(gradient(model, iter(losses)), expected, rtol=1e-9, atol=1e-12)


def test_every_token_weighs_the_same_whatever_the_length_of_its_completion() -> None:
    logprobs_BT = torch.tensor([[-1.0, -1.0, -1.0], [-5.0, -77.0, -77.0]], requires_grad=True)
    mask_BT = torch.tensor([[1, 1, 1], [1, 0, 0]])
    loss = mean_token_nll(logprobs_BT, mask_BT, 4)
    assert loss.item() == 2.0
    loss.backward()
    assert logprobs_BT.grad is not None
    assert logprobs_BT.grad.tolist() == [[-0.25] * 3, [-0.25, 0.0, 0.0]]


def test_prompts_are_padded_left_and_completions_right() -> None:
    batch = collate([([1, 2, 3], [4]), ([5], [6, 7])], 9, CPU)
    assert batch.ids_BT.tolist() == [[1, 2, 3, 4, 9], [9, 9, 5, 6, 7]]
    assert batch.attention_BT.tolist() == [[1, 1, 1, 1, 0], [0, 0, 1, 1, 1]]
    assert batch.completion_mask_BT.tolist() == [[1, 0], [1, 1]]


def test_an_end_token_that_is_also_the_padding_token_is_learnt() -> None:
    """Small base models pad with their end token; masks come from lengths, never from ids."""
    batch = collate([([1], [2, 9]), ([1], [3, 4, 9])], 9, CPU)
    assert batch.completion_mask_BT.tolist() == [[1, 1, 0], [1, 1, 1]]


@pytest.mark.parametrize(
    ("old", "new", "ratio", "cosine"),
    [
        ([3.0, 4.0], [6.0, 8.0], 2.0, 1.0),
        ([1.0, 0.0], [0.0, -0.5], 0.5, 0.0),
        ([1.0, 1.0], [-1.0, -1.0], 1.0, -1.0),
        ([0.0, 0.0], [1.0, 0.0], math.inf, None),
        (None, [1.0, 0.0], math.inf, None),
        ([1.0, 0.0], None, 0.0, None),
    ],
)
def test_two_gradients_are_compared_and_added(
    old: list[float] | None, new: list[float] | None, ratio: float, cosine: float | None
) -> None:
    """One parameter holds the first number, another the second, a third never has any."""
    parameters = [torch.nn.Parameter(torch.zeros(1)) for _ in range(3)]

    def give(numbers: list[float] | None) -> None:
        for p, x in zip(parameters, numbers or (), strict=False):
            p.grad = torch.tensor([x])

    give(old)
    part = GradientPart(parameters)
    assert all(p.grad is None for p in parameters)
    give(new)
    assert part.join() == (pytest.approx(ratio), cosine if cosine is None else pytest.approx(cosine))
    total = [a + b for a, b in zip(old or [0, 0], new or [0, 0], strict=True)]
    assert [p.grad.item() for p in parameters[:2] if p.grad is not None] == total
    assert parameters[2].grad is None
