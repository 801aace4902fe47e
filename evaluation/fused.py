"""The small dense Qwen3 on a CPU, decoded with less overhead: transformers' arithmetic, 1.4 to 1.7 times as fast.

A model of 0.4 M parameters spends its time between the operators, not in them. Here projections that share an input are
one product, and keys and values are written in place into a cache of full length. `tests/evaluation/test_fused.py`
compares log-probs and greedy tokens with transformers'. Everything else goes through `generation.CachedDecoder`.

Axes: U prompts, B rows, P positions of the longest prompt, M places of the cache.
"""

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import nn
from transformers import PreTrainedModel, Qwen3ForCausalLM

MAX_HIDDEN = 512
"""Wider models spend their time in the products, and copying their weights costs memory."""


LAYER_WEIGHTS = frozenset(
    {"input_layernorm.weight", "post_attention_layernorm.weight"}
    | {f"self_attn.{x}.weight" for x in ("q_proj", "k_proj", "v_proj", "o_proj", "q_norm", "k_norm")}
    | {f"mlp.{x}_proj.weight" for x in ("gate", "up", "down")}
)
"""All that a layer may have: an adapter's weights are among its parameters, and this file does not know them."""


class _Layer:
    """One decoder layer's weights, those of products transposed and joined."""

    def __init__(self, layer: nn.Module) -> None:
        weights = {name: p.detach() for name, p in layer.named_parameters()}
        self.before_attention = weights["input_layernorm.weight"]
        self.qkv = torch.cat([weights[f"self_attn.{x}_proj.weight"] for x in "qkv"]).t().contiguous()
        self.q_norm, self.k_norm = weights["self_attn.q_norm.weight"], weights["self_attn.k_norm.weight"]
        self.out = weights["self_attn.o_proj.weight"].t().contiguous()
        self.before_mlp = weights["post_attention_layernorm.weight"]
        self.gate_up = torch.cat([weights["mlp.gate_proj.weight"], weights["mlp.up_proj.weight"]]).t().contiguous()
        self.down = weights["mlp.down_proj.weight"].t().contiguous()


class FusedDecoder:
    """A `Qwen3ForCausalLM` with its weights as they are now; same methods as `generation.CachedDecoder`."""

    def __init__(self, model: PreTrainedModel, max_new_tokens: int) -> None:
        assert serves(model)
        config, base = model.config, model.model
        self.heads, self.kv, self.dim = config.num_attention_heads, config.num_key_value_heads, config.head_dim
        self.eps, self.max_new_tokens = config.rms_norm_eps, max_new_tokens
        self.layers = [_Layer(layer) for layer in base.layers]
        self.embedding, self.norm = base.embed_tokens.weight.detach(), base.norm.weight.detach()
        self.head = model.lm_head.weight.detach().t()
        self.rotary = base.rotary_emb
        self.keys: list[torch.Tensor] = []
        self.values: list[torch.Tensor] = []
        self.filled = 0

    def prefill(self, prompts: Sequence[Sequence[int]], n: int, pad_id: int) -> torch.Tensor:
        """Run each prompt once and repeat its cache n times; return logits (U x n, V)."""
        num, width = len(prompts), max(map(len, prompts))
        ids = torch.tensor([[pad_id] * (width - len(p)) + list(p) for p in prompts])
        padding_U = torch.tensor([width - len(p) for p in prompts])
        places_M = torch.arange(width + self.max_new_tokens)
        least = torch.finfo(torch.float32).min
        bias_UM = torch.where(places_M[None] < padding_U[:, None], least, 0.0)
        causal_PP = torch.full((width, width), least).triu(1)
        cos, sin = self.rotary(self.embedding, places_M[None])
        self.cos, self.sin = cos[0], sin[0]
        self.keys = [torch.zeros(num, self.kv, self.dim, width) for _ in self.layers]
        self.values = [torch.zeros(num, self.kv, width, self.dim) for _ in self.layers]
        bias = (bias_UM[:, None, :width] + causal_PP).clamp(min=least)[:, None, None]
        positions = (places_M[None, :width] - padding_U[:, None]).clamp(min=0)
        logits = self._forward(ids, positions, bias, width)
        room = torch.zeros(num * n, self.kv, self.max_new_tokens, self.dim)
        self.keys = [torch.cat([k.repeat_interleave(n, 0), room.mT], 3) for k in self.keys]
        self.values = [torch.cat([v.repeat_interleave(n, 0), room], 2) for v in self.values]
        self.bias_BM, self.padding_B = bias_UM.repeat_interleave(n, 0), padding_U.repeat_interleave(n)
        return logits.repeat_interleave(n, 0)

    def step(self, ids: torch.Tensor) -> torch.Tensor:
        """Feed one token a row; return the next logits (B, V)."""
        positions = self.filled - self.padding_B
        bias = self.bias_BM[:, None, None, None, : self.filled + 1]
        return self._forward(ids[:, None], positions[:, None], bias, self.filled + 1)

    def keep(self, places: torch.Tensor) -> None:
        """Drop every row but these."""
        self.keys, self.values = [k[places] for k in self.keys], [v[places] for v in self.values]
        self.bias_BM, self.padding_B = self.bias_BM[places], self.padding_B[places]

    def _forward(self, ids: torch.Tensor, positions: torch.Tensor, bias: torch.Tensor, filled: int) -> torch.Tensor:
        """Run (B, S) tokens that end at cache place `filled`; return the last one's logits."""
        x = self.embedding[ids]
        cos, sin = self.cos[positions].unsqueeze(2), self.sin[positions].unsqueeze(2)
        for i, layer in enumerate(self.layers):
            x = x + self._attend(i, layer, self._rms(x, layer.before_attention), cos, sin, bias, filled) @ layer.out
            gate, up = (self._rms(x, layer.before_mlp) @ layer.gate_up).chunk(2, -1)
            x = x + (F.silu(gate) * up) @ layer.down
        self.filled = filled
        return self._rms(x[:, -1], self.norm) @ self.head

    def _attend(
        self,
        index: int,
        layer: _Layer,
        x: torch.Tensor,
        cos: torch.Tensor,
        sin: torch.Tensor,
        bias: torch.Tensor,
        filled: int,
    ) -> torch.Tensor:
        rows, length, heads, kv, dim = *x.shape[:2], self.heads, self.kv, self.dim
        groups = heads // kv
        q, k, v = (x @ layer.qkv).split([heads * dim, kv * dim, kv * dim], -1)
        q = _rotate(self._rms(q.view(rows, length, heads, dim), layer.q_norm), cos, sin)
        k = _rotate(self._rms(k.view(rows, length, kv, dim), layer.k_norm), cos, sin)
        keys, values = self.keys[index], self.values[index]
        keys[..., filled - length : filled] = k.permute(0, 2, 3, 1)
        values[:, :, filled - length : filled] = v.view(rows, length, kv, dim).transpose(1, 2)
        q = q.transpose(1, 2).reshape(rows, kv, groups * length, dim)
        scores = (q @ keys[..., :filled]).mul_(dim**-0.5)
        weights = torch.softmax(scores.view(rows, kv, groups, length, filled).add_(bias), -1)
        mixed = weights.view(rows, kv, groups * length, filled) @ values[:, :, :filled]
        return mixed.view(rows, heads, length, dim).transpose(1, 2).reshape(rows, length, heads * dim)

    def _rms(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return F.rms_norm(x, (x.shape[-1],), weight, self.eps)


def serves(model: PreTrainedModel) -> bool:
    """True for the one kind of model that this file computes exactly: small, dense, fp32, on a CPU, unwrapped."""
    if type(model) is not Qwen3ForCausalLM or model.device.type != "cpu":
        return False
    config = model.config
    rope = (config.rope_parameters or {}).get("rope_type")
    plain = not config.attention_bias and config.hidden_act == "silu" and rope == "default"
    small = config.hidden_size <= MAX_HIDDEN and all(p.dtype == torch.float32 for p in model.parameters())
    full = all(kind == "full_attention" for kind in config.layer_types or ("unknown",))
    return (
        plain and small and full and all(dict(x.named_parameters()).keys() == LAYER_WEIGHTS for x in model.model.layers)
    )


def _rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Apply the rotary embedding to (B, S, H, D)."""
    first, second = x.chunk(2, -1)
    return x * cos + torch.cat([-second, first], -1) * sin
