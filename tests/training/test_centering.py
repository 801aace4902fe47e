"""Score centering against a brute force over the whole vocabulary, with the tail that the paper models.

The reference knows no head arithmetic: it completes the sampler's distribution over all V tokens (outside of the head
the learner's, scaled to the mass that is missing: GRPO-088) and takes the expected score token by token, in fp64.
"""

import pytest
import torch
from trl.kernels.chunked_logprob import ChunkedLogProbFunction

from training.objectives import (
    Weight,
    centering,
    head_logprobs_from_hidden,
    next_token_logprobs,
    policy_gradient,
    token_and_head_logprobs,
)

B, T, V, D = 4, 6, 96, 16


def distributions(
    gap: float, dtype: torch.dtype, seed: int = 0, scale: float = 3
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return the learner's logits (a leaf of `dtype`), the sampler's log-probs `gap` away, and sampled tokens."""
    key = torch.Generator().manual_seed(seed)
    logits = (scale * torch.randn(B, T, V, generator=key, dtype=torch.float64)).to(dtype)
    noise = torch.randn(B, T, V, generator=key, dtype=torch.float64)
    q_log = (logits.double() + gap * noise).log_softmax(-1)
    tokens = torch.multinomial(q_log.exp().flatten(0, 1), 1, generator=key).view(B, T)
    return logits.requires_grad_(), q_log, tokens


def advantages(seed: int = 0) -> torch.Tensor:
    return torch.randn(B, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def w(ratio: torch.Tensor, weight: Weight) -> torch.Tensor:
    return ratio.clamp(max=2) if weight == "tis2" else torch.ones_like(ratio)


def brute_force(
    logits: torch.Tensor, q_log: torch.Tensor, tokens: torch.Tensor, k: int, weight: Weight
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the gradients (in fp64, of the logits) of the whole loss and of its centering alone."""
    leaf = logits.detach().double().requires_grad_()
    p_log = leaf.log_softmax(-1)
    p = p_log.detach().exp()
    in_head = torch.zeros_like(p, dtype=torch.bool).scatter(-1, q_log.topk(k, -1).indices, True)
    q_head = torch.where(in_head, q_log.exp(), 0)
    missing = (1 - q_head.sum(-1, keepdim=True)).clamp(min=1e-6)
    tail = torch.where(in_head, 0, p).sum(-1, keepdim=True).clamp(min=1e-6)
    q = torch.where(in_head, q_head, p * missing / tail)
    expected = (torch.where(q > 0, q * w(p / q, weight), 0) * p_log).sum(-1)
    own = tokens[..., None]
    score = (w(p.gather(-1, own) / q_log.exp().gather(-1, own), weight) * p_log.gather(-1, own))[..., 0]
    a = advantages()[:, None]
    centre = torch.autograd.grad((a * expected).sum(), leaf, retain_graph=True)[0]
    return torch.autograd.grad((-a * (score - expected)).sum(), leaf)[0], centre


def ours(
    logits: torch.Tensor, q_log: torch.Tensor, tokens: torch.Tensor, k: int, weight: Weight
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the same by training's functions, in the logits' own dtype."""
    wide = torch.float64 if logits.dtype == torch.float64 else torch.float32
    q_head, ids = q_log.topk(k, -1)
    if wide == torch.float64:  # training's own function has fp32 log-probs
        logprobs = logits.log_softmax(-1).gather(-1, tokens[..., None])[..., 0]
        head = logits.log_softmax(-1).gather(-1, ids)
    else:
        logprobs, head = token_and_head_logprobs(logits, tokens, ids, 1.0)
    a = advantages().to(wide)
    sampled = q_log.gather(-1, tokens[..., None])[..., 0].to(wide)
    centre = centering(head, q_head.to(wide), a, weight).sum()
    loss = policy_gradient(logprobs, sampled, a, weight).sum() + centre
    grads = [torch.autograd.grad(x, logits, retain_graph=True)[0].double() for x in (loss, centre)]
    return grads[0], grads[1]


def apart(found: torch.Tensor, expected: torch.Tensor) -> float:
    return float((found - expected).norm() / expected.norm())


@pytest.mark.parametrize(("dtype", "most"), [(torch.float64, 1e-4), (torch.float32, 1e-4), (torch.bfloat16, 2e-2)])
@pytest.mark.parametrize("k", [1, 4, 32, 64])
@pytest.mark.parametrize("gap", [0.01, 0.1, 1.0, 4.0])
@pytest.mark.parametrize("weight", ["one", "tis2"])
def test_the_gradient_is_that_of_the_brute_force(
    dtype: torch.dtype, most: float, k: int, gap: float, weight: Weight
) -> None:
    given = distributions(gap, dtype)
    (loss, centre), (expected_loss, expected_centre) = ours(*given, k, weight), brute_force(*given, k, weight)
    assert apart(loss, expected_loss) <= most
    ratio = float((given[0].detach().double().log_softmax(-1) - given[1]).exp().max())
    if weight == "one" or ratio > 2.5:
        assert float(expected_centre.norm()) > 1e-4
        assert apart(centre, expected_centre) <= most
    else:  # no ratio is truncated: an expected score of exactly zero
        assert float(expected_centre.abs().max()) < 1e-12
        assert float(centre.abs().max()) <= (1e-6 if dtype != torch.bfloat16 else 1e-2)


@pytest.mark.parametrize("scale", [0.3, 3, 8])
@pytest.mark.parametrize("k", [32, V])
@pytest.mark.parametrize("weight", ["one", "tis2"])
def test_in_bf16_the_parts_of_the_gradient_are_added_before_they_are_rounded(
    scale: float, k: int, weight: Weight
) -> None:
    """Flat or sure of itself, near the sampler or far from it: its parts are up to a hundred times what is left."""
    for gap in (0.01, 1.0, 5.0):
        given = distributions(gap, torch.bfloat16, scale=scale)
        (loss, centre), (expected_loss, expected_centre) = ours(*given, k, weight), brute_force(*given, k, weight)
        assert apart(loss, expected_loss) <= 4e-3
        if float(expected_centre.norm()) > 1e-4:
            assert apart(centre, expected_centre) <= 4e-3


@pytest.mark.parametrize("scale", [0.3, 3, 8])
@pytest.mark.parametrize("weight", ["one", "tis2"])
@pytest.mark.parametrize("gap", [0.01, 1.0, 5.0])
def test_in_bf16_from_hidden_states_the_loss_s_gradient_is_that_of_the_brute_force(
    scale: float, weight: Weight, gap: float
) -> None:
    """TRL's fused head rounds every token's part of the gradient to bf16 before it adds them up."""
    key = torch.Generator().manual_seed(0)
    hidden = torch.randn(B, T, D, generator=key).bfloat16().requires_grad_()
    matrix = (scale * torch.randn(V, D, generator=key) / D**0.5).bfloat16().requires_grad_()
    rounded = (hidden @ matrix.T).detach().double()
    q_log = (rounded + gap * torch.randn(B, T, V, generator=key, dtype=torch.float64)).log_softmax(-1)
    tokens = torch.multinomial(q_log.exp().flatten(0, 1), 1, generator=key).view(B, T)
    q_head, ids = q_log.topk(32, -1)
    logprobs = ChunkedLogProbFunction.apply(hidden.flatten(0, 1), matrix, None, tokens.flatten(), 1.0, V, None, 1.0, ())
    logprobs = logprobs[0].view(B, T)
    head = head_logprobs_from_hidden(hidden, matrix, tokens, logprobs, ids, 1.0)
    a, sampled = advantages().float(), q_log.gather(-1, tokens[..., None])[..., 0].float()
    loss = policy_gradient(logprobs, sampled, a, weight) + centering(head, q_head.float(), a, weight)
    found = torch.autograd.grad(loss.sum(), (hidden, matrix))
    upstream = brute_force(rounded, q_log, tokens, 32, weight)[0]
    expected = upstream @ matrix.double(), upstream.flatten(0, 1).T @ hidden.double().flatten(0, 1)
    for mine, other in zip(found, expected, strict=True):
        assert apart(mine.double(), other.detach()) <= 2e-2


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("weight", ["one", "tis2"])
@pytest.mark.parametrize("gap", [0.01, 1.0])
def test_with_the_whole_vocabulary_in_the_head_nothing_is_modelled(
    dtype: torch.dtype, weight: Weight, gap: float
) -> None:
    """The expected score is then that under the sampler's own distribution, tail and all."""
    logits, q_log, tokens = distributions(gap, dtype)
    leaf = logits.detach().double().requires_grad_()
    p_log = leaf.log_softmax(-1)
    coefficients = q_log.exp() * w((p_log.detach() - q_log).exp(), weight)
    true = torch.autograd.grad((advantages()[:, None] * (coefficients * p_log).sum(-1)).sum(), leaf)[0]
    _, centre = ours(logits, q_log, tokens, V, weight)
    if weight == "tis2" and gap < 1:
        assert float(true.abs().max()) < 1e-12 and float(centre.abs().max()) <= 1e-6
    else:
        assert apart(centre, true) <= 1e-4


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("weight", ["one", "tis2"])
@pytest.mark.parametrize("k", [1, 8, 32, V])
def test_where_both_distributions_are_the_same_centering_is_nothing(dtype: torch.dtype, weight: Weight, k: int) -> None:
    logits, q_log, tokens = distributions(0.0, dtype)
    _, centre = ours(logits, q_log, tokens, k, weight)
    assert float(centre.abs().max()) <= 1e-6


@pytest.mark.parametrize("share", [1.0, 1 - 1e-9])
def test_a_head_that_is_all_there_is_does_not_blow_up(share: float) -> None:
    """A peaked position: neither side has a tail that fp32 can tell from zero, on either side of the floor."""
    logits = torch.full((1, 1, V), -40.0).index_fill(-1, torch.tensor([3]), 0.0).requires_grad_()
    q = torch.full((1, 1, V), (1 - share) / (V - 1) or 1e-30, dtype=torch.float64)
    q[..., 3] = share
    head, ids = q.log().topk(32, -1)
    tokens = torch.tensor([[3]])
    _, mine = token_and_head_logprobs(logits, tokens, ids, 1.0)
    loss = centering(mine, head.float(), torch.ones(1), "one").sum()
    (grad,) = torch.autograd.grad(loss, logits)
    assert bool(torch.isfinite(grad).all()) and float(grad.abs().max()) <= 1e-5


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_the_head_s_log_probs_come_without_a_second_pass_from_logits_or_from_hidden_states(temperature: float) -> None:
    key = torch.Generator().manual_seed(1)
    hidden = torch.randn(B, T, D, generator=key).requires_grad_()
    matrix = torch.randn(V, D, generator=key).requires_grad_()
    tokens = torch.randint(0, V, (B, T), generator=key)
    head = torch.rand(B, T, V, generator=key).topk(32, -1).indices
    logits = hidden @ matrix.T
    expected = (logits / temperature).log_softmax(-1).gather(-1, head)
    logprobs = next_token_logprobs(logits, tokens, temperature)
    upstream = torch.randn(expected.shape, generator=key)
    wanted = torch.autograd.grad((expected * upstream).sum(), (hidden, matrix), retain_graph=True)
    for found in (
        token_and_head_logprobs(logits, tokens, head, temperature)[1],
        head_logprobs_from_hidden(hidden, matrix, tokens, logprobs, head, temperature),
    ):
        torch.testing.assert_close(found, expected, atol=2e-5, rtol=0)
        grads = torch.autograd.grad((found * upstream).sum(), (hidden, matrix), retain_graph=True)
        for mine, other in zip(grads, wanted, strict=True):
            assert apart(mine, other) <= 1e-5
