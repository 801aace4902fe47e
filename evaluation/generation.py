"""Draw completions from a causal language model: one prefill a prompt, finished rows dropped, a seed for every row.

A row's tokens are a function of its own seed: position t uses the t-th uniform of a counter-based generator keyed by
it, so results depend on neither the batch nor the order (beyond the float rounding of differently shaped products).
Left out: logits processors, beam search, assisted decoding. Training samples with the same function as evaluation.

Axes: U prompts, B rows = U x n, T positions, V vocabulary, K the head, a position's likeliest tokens.
"""

import hashlib
import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, cast

import numpy as np
import torch
from transformers import PreTrainedModel
from transformers.cache_utils import DynamicCache

from evaluation.fused import FusedDecoder, serves

NUCLEUS_HEADS = (8, 64)
"""How many of the likeliest tokens are looked at before a full sort; most nuclei of code are smaller than the first."""
SHRINK_BELOW = 0.8
"""Finished rows leave the batch when fewer than this share of it is alive."""


class NonFiniteLogits(RuntimeError):
    """The model's logits are NaN or infinite: its weights are, and there is nothing to sample."""


@dataclass(frozen=True)
class Completion:
    """One drawn completion."""

    token_ids: list[int]
    """The stop token included, when there is one."""
    logprobs: list[float]
    """Of each token, under the untruncated distribution at the sampling temperature."""
    finish_reason: str
    """`stop` or `length`."""
    entropy_sum: float = 0.0
    """Sum over tokens of the entropy, in nats, of the distribution each was drawn from (before truncation)."""
    head: "Head | None" = field(default=None, compare=False)
    """Kept where asked for."""


@dataclass(frozen=True)
class Head:
    """The likeliest tokens at each position of a completion, under the distribution that its tokens' log-probs have."""

    ids: np.ndarray
    """(T, K) int32, likeliest first."""
    logprobs: np.ndarray
    """(T, K) float32."""


class Choice(NamedTuple):
    """One token a row, and what is kept of the distribution it was drawn from."""

    ids: torch.Tensor
    """(B,)."""
    logprobs: torch.Tensor
    """(B,) of the tokens, untruncated, at the sampling temperature (at 1 where that is 0)."""
    entropies: torch.Tensor
    """(B,) nats, of the same distribution."""
    head_ids: torch.Tensor
    """(B, K)."""
    head_logprobs: torch.Tensor
    """(B, K)."""


def row_seed(seed: int, purpose: str, problem_id: str, index: int) -> int:
    """Return the 64-bit key of one row; the same on every machine and in every process."""
    digest = hashlib.sha256(f"{seed}/{purpose}/{problem_id}/{index}".encode()).digest()
    return int.from_bytes(digest[:8], "big")


def uniforms(seeds: Sequence[int], count: int) -> np.ndarray:
    """Return (len(seeds), count) uniforms in [0, 1): row i is a function of seeds[i] alone.

    A hair is taken off, so that u x total is below total in floating point too and no draw falls off the end of a CDF.
    """
    rows = (np.random.Generator(np.random.Philox(key=s)).random(count) for s in seeds)
    return np.stack(list(rows)) * (1 - 2.0**-50) if seeds else np.zeros((0, count))


def sample(
    model: PreTrainedModel,
    prompts: Sequence[Sequence[int]],
    seeds: Sequence[Sequence[int]],
    *,
    max_new_tokens: int,
    temperature: float,
    top_p: float,
    stop_ids: Sequence[int],
    pad_id: int,
    stop_text: Callable[[list[int]], bool] | None = None,
    on_done: Callable[[int, int, list[int]], None] | None = None,
    top_k: int = 0,
) -> list[list[Completion]]:
    """Draw n completions of each prompt.

    Args:
        model: any causal LM of transformers; left in the mode it was in.
        prompts: U lists of token ids, of any lengths above zero.
        seeds: U x n row keys (`row_seed`); their shape gives n.
        max_new_tokens: longest completion, the stop token included.
        temperature: 0 takes the likeliest token.
        top_p: nucleus mass; 1 samples the whole vocabulary.
        stop_ids: tokens that end a completion (and are part of it).
        pad_id: fills the left of short prompts.
        stop_text: asked after every token of a row; True ends it (stop strings).
        on_done: told (prompt, index, token ids) of each row as it stops, while others go on; not of those cut off.
        top_k: size of the head to keep at each position (all tokens of a smaller vocabulary); 0 keeps none. What is
            drawn does not depend on it.

    Returns:
        U lists of n completions.

    Raises:
        NonFiniteLogits: the model's output is not finite.
        ValueError: a prompt is empty, or the seeds do not match the prompts.
    """
    n = len(seeds[0]) if seeds else 0
    if len(seeds) != len(prompts) or any(len(s) != n for s in seeds):
        raise ValueError(f"seeds: {len(seeds)} rows of seeds for {len(prompts)} prompts; give n keys for each prompt")
    if any(not p for p in prompts):
        raise ValueError("prompts: an empty prompt cannot be continued")
    if not prompts or not n:
        return [[] for _ in prompts]
    noise_BT = torch.from_numpy(uniforms([s for row in seeds for s in row], max_new_tokens)).to(model.device)
    was_training = model.training
    model.eval()
    try:
        with torch.inference_mode():
            decoder = FusedDecoder(model, max_new_tokens) if serves(model) else CachedDecoder(model)
            told = None if on_done is None else lambda row, ids: on_done(row // n, row % n, ids)
            rows = _Rows(len(prompts) * n, max_new_tokens, set(stop_ids), stop_text, told)
            logits = decoder.prefill(prompts, n, pad_id)
            for t in range(max_new_tokens):
                choice = choose(logits, noise_BT[rows.live, t], temperature, top_p, top_k)
                keep, next_ids = rows.add(choice), choice.ids
                if not len(keep) or t == max_new_tokens - 1:
                    break
                if len(keep) < SHRINK_BELOW * len(rows.live):
                    decoder.keep(keep)
                    rows.live, next_ids = rows.live[keep], next_ids[keep]
                logits = decoder.step(next_ids)
    finally:
        model.train(was_training)
    drawn = rows.completions()
    return [drawn[u * n : (u + 1) * n] for u in range(len(prompts))]


def choose(logits: torch.Tensor, noise: torch.Tensor, temperature: float, top_p: float, top_k: int = 0) -> Choice:
    """Take one token a row by inverse-CDF sampling.

    Args:
        logits: (B, V).
        noise: (B,) of `uniforms`.
        temperature: 0 takes the argmax.
        top_p: nucleus mass.
        top_k: size of the head that is kept.

    Raises:
        NonFiniteLogits: a logit, or its quotient by the temperature, is NaN or infinite.
    """
    logprobs_BV = torch.log_softmax(logits.float() / temperature if temperature > 0 else logits.float(), -1)
    probs_BV = logprobs_BV.exp()
    entropies = -(probs_BV * logprobs_BV).sum(-1)
    # Not finite if any logit is: a look at B numbers, where looking at B x V costs more than the softmax.
    if not bool(torch.isfinite(entropies).all()):
        raise NonFiniteLogits("the model's logits are not finite")
    if temperature == 0:
        ids = logits.argmax(-1)
    elif top_p < 1:
        ids = _nucleus(probs_BV, noise, top_p)
    else:
        cdf = probs_BV.double().cumsum(-1)
        ids = torch.searchsorted(cdf, noise[:, None] * cdf[:, -1:], right=True).squeeze(-1)
        ids = ids.clamp_(max=logits.shape[-1] - 1)
    head_logprobs, head_ids = logprobs_BV.topk(min(top_k, logprobs_BV.shape[-1]), -1)
    return Choice(ids, logprobs_BV.gather(-1, ids[:, None]).squeeze(-1), entropies, head_ids, head_logprobs)


def _nucleus(probs_BV: torch.Tensor, noise: torch.Tensor, top_p: float) -> torch.Tensor:
    """Sample among the likeliest tokens whose mass before them is below top_p (the one that crosses it included).

    Each row looks at no more of its likeliest tokens than its own nucleus needs.
    """
    chosen = torch.empty(len(probs_BV), dtype=torch.long, device=probs_BV.device)
    open_rows = torch.arange(len(probs_BV), device=probs_BV.device)
    for size in (*NUCLEUS_HEADS, probs_BV.shape[-1]):
        head_p, ids = probs_BV[open_rows].topk(min(size, probs_BV.shape[-1]), -1)
        cdf = head_p.double().cumsum(-1)
        mass = torch.where(cdf - head_p < top_p, cdf, 0).amax(-1, keepdim=True)
        place = torch.searchsorted(cdf, noise[open_rows, None] * mass, right=True).clamp_(max=ids.shape[-1] - 1)
        enough = (cdf[:, -1] >= top_p) | (ids.shape[-1] == probs_BV.shape[-1])
        chosen[open_rows] = ids.gather(-1, place).squeeze(-1)
        open_rows = open_rows[~enough]
        if not len(open_rows):
            break
    return chosen


class _Rows:
    """What has been drawn so far, and which rows are still in the batch."""

    def __init__(
        self,
        count: int,
        max_new_tokens: int,
        stop_ids: set[int],
        stop_text: Callable[[list[int]], bool] | None,
        on_stop: Callable[[int, list[int]], None] | None,
    ) -> None:
        self.live = torch.arange(count)
        self.max_new_tokens, self.stop_ids, self.stop_text = max_new_tokens, stop_ids, stop_text
        self.on_stop = on_stop
        self.tokens: list[list[int]] = [[] for _ in range(count)]
        self.logprobs: list[list[float]] = [[] for _ in range(count)]
        self.entropies = [0.0] * count
        self.stopped = [False] * count
        self.heads: list[tuple[np.ndarray, np.ndarray, np.ndarray]] = []
        """A position each: the batch's rows, ids and log-probs."""

    def add(self, choice: Choice) -> torch.Tensor:
        """Append one token to every unfinished row; return the places in the batch that go on."""
        going = []
        if choice.head_ids.shape[-1]:
            head = choice.head_ids.int().cpu().numpy(), choice.head_logprobs.cpu().numpy()
            self.heads.append((self.live.numpy(), *head))
        columns = (x.tolist() for x in (self.live, choice.ids, choice.logprobs, choice.entropies))
        for place, (row, token, logprob, entropy) in enumerate(zip(*columns, strict=True)):
            if self.stopped[row]:
                continue
            self.tokens[row].append(token)
            self.logprobs[row].append(logprob)
            self.entropies[row] += entropy
            self.stopped[row] = token in self.stop_ids or (
                self.stop_text is not None and self.stop_text(self.tokens[row])
            )
            if not self.stopped[row]:
                going.append(place)
            elif self.on_stop is not None:
                self.on_stop(row, self.tokens[row])
        return torch.tensor(going, dtype=torch.long)

    def completions(self) -> list[Completion]:
        """Return every row as drawn."""
        reasons = ("stop" if s else "length" for s in self.stopped)
        drawn = zip(self.tokens, self.logprobs, reasons, self.entropies, self._heads(), strict=True)
        return [Completion(t, lp, r, e, h) for t, lp, r, e, h in drawn]

    def _heads(self) -> list[Head | None]:
        """Return each row's head; finished rows may have stayed in the batch for longer than they have tokens."""
        if not self.heads:
            return [None] * len(self.tokens)
        rows, ids, logprobs = (np.concatenate(x) for x in zip(*self.heads, strict=True))
        order = np.argsort(rows, kind="stable")
        starts = np.searchsorted(rows[order], np.arange(len(self.tokens)))
        parts = (order[at : at + len(tokens)] for at, tokens in zip(starts, self.tokens, strict=True))
        return [Head(ids[part], logprobs[part]) for part in parts]


class CachedDecoder:
    """Any causal LM of transformers, with its own key-value (or state) cache."""

    def __init__(self, model: PreTrainedModel) -> None:
        self.model = model
        self.cache = DynamicCache(config=model.config.get_text_config())
        # transformers 5.24 renames the argument and warns at every call with the old name; 5.17 knows only the old one.
        known = inspect.signature(model.forward).parameters
        self.cache_argument = "cache" if "cache" in known else "past_key_values"
        self.mask = self.positions = torch.zeros(0, dtype=torch.long)

    def prefill(self, prompts: Sequence[Sequence[int]], n: int, pad_id: int) -> torch.Tensor:
        """Run each prompt once and repeat its cache n times; return logits (U x n, V)."""
        device, width = self.model.device, max(map(len, prompts))
        ids = torch.tensor([[pad_id] * (width - len(p)) + list(p) for p in prompts], device=device)
        mask = torch.tensor([[0] * (width - len(p)) + [1] * len(p) for p in prompts], device=device)
        positions = (mask.cumsum(-1) - 1).clamp(min=0)
        logits = self._forward(ids, mask, positions)
        repeat = torch.arange(len(prompts), device=device).repeat_interleave(n)
        self.cache.reorder_cache(cast(torch.LongTensor, repeat))
        self.mask, self.positions = mask[repeat], positions[repeat, -1:]
        return logits[repeat]

    def step(self, ids: torch.Tensor) -> torch.Tensor:
        """Feed one token a row; return the next logits (B, V)."""
        self.mask = torch.cat([self.mask, self.mask.new_ones(len(self.mask), 1)], 1)
        self.positions = self.positions + 1
        return self._forward(ids[:, None], self.mask, self.positions)

    def keep(self, places: torch.Tensor) -> None:
        """Drop every row but these."""
        places = places.to(self.mask.device)
        self.cache.reorder_cache(cast(torch.LongTensor, places))
        self.mask, self.positions = self.mask[places], self.positions[places]

    def _forward(self, ids: torch.Tensor, mask: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        out = self.model(
            input_ids=ids,
            attention_mask=mask,
            position_ids=positions,
            use_cache=True,
            logits_to_keep=1,
            **{self.cache_argument: self.cache},
        )
        return out.logits[:, -1]
