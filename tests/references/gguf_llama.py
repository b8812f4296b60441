"""An independent reading of a Llama GGUF file in plain torch: own dequantisation, rows as stored, interleaved RoPE.

Shares nothing with `a3po_megatron.convert` and nothing with transformers. Slow and obvious.
"""

from pathlib import Path

import numpy as np
import torch
from gguf import GGMLQuantizationType, GGUFReader

BLOCK = 32  # elements a quantised block


def dequantise(data: np.ndarray, kind: GGMLQuantizationType, shape: tuple[int, ...]) -> torch.Tensor:
    """Q4_1 block: float16 scale d, float16 minimum m, 16 bytes: low nibbles, then high ones; value = d * q + m.
    Q8_0 block: float16 scale d, 32 signed bytes; value = d * q."""
    if kind == GGMLQuantizationType.F32:
        return torch.from_numpy(np.array(data, dtype=np.float32)).reshape(shape)
    raw = np.array(data, dtype=np.uint8)
    if kind == GGMLQuantizationType.Q4_1:
        blocks = raw.reshape(-1, 20)
        scale, minimum = (blocks[:, i : i + 2].copy().view(np.float16).astype(np.float32) for i in (0, 2))
        quants = np.concatenate([blocks[:, 4:] & 15, blocks[:, 4:] >> 4], axis=1)
        values = scale * quants.astype(np.float32) + minimum
    elif kind == GGMLQuantizationType.Q8_0:
        blocks = raw.reshape(-1, 34)
        values = blocks[:, :2].copy().view(np.float16).astype(np.float32) * blocks[:, 2:].view(np.int8)
    else:
        raise NotImplementedError(kind)
    assert values.shape[1] == BLOCK
    return torch.from_numpy(values).reshape(shape)


@torch.no_grad()
def gguf_logits(path: Path, token_ids: list[int]) -> torch.Tensor:
    """Logits [T, V] in float32 of one sequence."""
    reader = GGUFReader(path)
    meta = {name: field.contents() for name, field in reader.fields.items() if name.startswith("llama.")}
    weights = {
        t.name.removesuffix(".weight"): dequantise(t.data, t.tensor_type, tuple(int(n) for n in t.shape[::-1]))
        for t in reader.tensors
    }
    heads, kv_heads = meta["llama.attention.head_count"], meta["llama.attention.head_count_kv"]
    eps, length = meta["llama.attention.layer_norm_rms_epsilon"], len(token_ids)

    def norm(x: torch.Tensor, name: str) -> torch.Tensor:
        return x / (x.pow(2).mean(-1, keepdim=True) + eps).sqrt() * weights[name]

    def split_heads(x: torch.Tensor, count: int) -> torch.Tensor:  # [T, count * D] -> [count, T, D]
        return x.reshape(length, count, -1).transpose(0, 1)

    def rotate(x: torch.Tensor) -> torch.Tensor:  # pair (2i, 2i + 1) turns by t * base**(-2i / D)
        dim = x.shape[-1]
        angles = torch.arange(length)[:, None] * meta["llama.rope.freq_base"] ** (-torch.arange(0, dim, 2) / dim)
        even, odd = x[..., 0::2], x[..., 1::2]
        turned = (even * angles.cos() - odd * angles.sin(), even * angles.sin() + odd * angles.cos())
        return torch.stack(turned, dim=-1).flatten(-2)

    hidden = weights["token_embd"][token_ids]
    mask = torch.full((length, length), float("-inf")).triu(1)
    for layer in range(meta["llama.block_count"]):
        block = f"blk.{layer}"
        x = norm(hidden, f"{block}.attn_norm")
        query = rotate(split_heads(x @ weights[f"{block}.attn_q"].T, heads))
        key = rotate(split_heads(x @ weights[f"{block}.attn_k"].T, kv_heads)).repeat_interleave(heads // kv_heads, 0)
        value = split_heads(x @ weights[f"{block}.attn_v"].T, kv_heads).repeat_interleave(heads // kv_heads, 0)
        scores = query @ key.transpose(1, 2) / query.shape[-1] ** 0.5 + mask
        attended = (scores.softmax(-1) @ value).transpose(0, 1).reshape(length, -1)
        hidden = hidden + attended @ weights[f"{block}.attn_output"].T
        x = norm(hidden, f"{block}.ffn_norm")
        gate = torch.nn.functional.silu(x @ weights[f"{block}.ffn_gate"].T)
        hidden = hidden + (gate * (x @ weights[f"{block}.ffn_up"].T)) @ weights[f"{block}.ffn_down"].T
    return norm(hidden, "output_norm") @ weights.get("output", weights["token_embd"]).T
