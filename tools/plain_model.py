"""The forward pass of the supported families in plain torch on a CPU: what check_gpu.py compares the actor with.

Nothing of megatron's, of transformers' or of the actor's is in it; a test compares it with transformers.
Letters: n tokens, h heads, g key/value heads, d head dimension.
"""

from collections.abc import Mapping

import torch
from torch import Tensor
from torch.nn.functional import linear, rms_norm, scaled_dot_product_attention, silu

from a3po_megatron.config.model_shape import ModelShape

Weights = Mapping[str, Tensor]  # by the names of the Hugging Face checkpoint


def logprobs(shape: ModelShape, weights: Weights, tokens: Tensor) -> Tensor:
    """Return [n - 1]: the log-probability of each token but the first given those before it, in the weights' dtype."""
    hidden = weights["model.embed_tokens.weight"][tokens]  # [n, hidden]
    for layer in range(shape.num_layers):
        of = {name.split(f".layers.{layer}.")[1]: w for name, w in weights.items() if f".layers.{layer}." in name}
        hidden = hidden + attention(shape, of, norm(shape, hidden, of["input_layernorm.weight"]))
        normed = norm(shape, hidden, of["post_attention_layernorm.weight"])
        hidden = hidden + (experts(shape, of, normed) if shape.num_experts else mlp(of, "mlp.", normed))
    hidden = norm(shape, hidden, weights["model.norm.weight"])
    output = weights["model.embed_tokens.weight" if shape.tie_word_embeddings else "lm_head.weight"]
    log_p = linear(hidden[:-1], output).log_softmax(-1)
    return log_p.gather(-1, tokens[1:, None])[:, 0]


def norm(shape: ModelShape, values: Tensor, weight: Tensor) -> Tensor:
    """Return the root-mean-square norm over the last dimension."""
    return rms_norm(values, weight.shape, weight, shape.rms_norm_eps)


def attention(shape: ModelShape, of: Weights, hidden: Tensor) -> Tensor:
    """Return causal attention with rotary positions, [n, hidden]."""
    query, key, value = (
        linear(hidden, of[f"self_attn.{name}_proj.weight"], of.get(f"self_attn.{name}_proj.bias"))
        .unflatten(-1, (-1, shape.head_dim))
        .transpose(0, 1)
        for name in "qkv"
    )  # [h or g, n, d]
    if shape.has_qk_norm:
        query = norm(shape, query, of["self_attn.q_norm.weight"])
        key = norm(shape, key, of["self_attn.k_norm.weight"])
    query, key = rotate(shape, query), rotate(shape, key)
    out = scaled_dot_product_attention(query[None], key[None], value[None], is_causal=True, enable_gqa=True)[0]
    return linear(out.transpose(0, 1).flatten(1), of["self_attn.o_proj.weight"])


def rotate(shape: ModelShape, heads: Tensor) -> Tensor:
    """Return [heads, n, d] with dimensions i and i + d/2 turned by position * theta^(-2i/d)."""
    half = shape.head_dim // 2
    frequency = shape.rope_theta ** (-torch.arange(half, dtype=torch.float64) / half)
    angle = torch.arange(heads.shape[1], dtype=torch.float64)[:, None] * frequency
    cos, sin = angle.cos().to(heads.dtype), angle.sin().to(heads.dtype)
    first, second = heads[..., :half], heads[..., half:]
    return torch.cat([first * cos - second * sin, second * cos + first * sin], -1)


def mlp(of: Weights, prefix: str, hidden: Tensor) -> Tensor:
    """Return the gated MLP whose names begin with `prefix`."""
    gate, up, down = (of[f"{prefix}{name}_proj.weight"] for name in ("gate", "up", "down"))
    return linear(silu(linear(hidden, gate)) * linear(hidden, up), down)


def experts(shape: ModelShape, of: Weights, hidden: Tensor) -> Tensor:
    """Return the chosen experts' outputs by their probabilities, [n, hidden]; every expert sees every token."""
    chosen = linear(hidden, of["mlp.gate.weight"]).softmax(-1).topk(shape.num_experts_per_tok, -1)
    weight = chosen.values / (chosen.values.sum(-1, keepdim=True) if shape.norm_topk_prob else 1)
    total = torch.zeros_like(hidden)
    for expert in range(shape.num_experts):
        share = (weight * (chosen.indices == expert)).sum(-1, keepdim=True)
        total = total + share * mlp(of, f"mlp.experts.{expert}.", hidden)
    return total
