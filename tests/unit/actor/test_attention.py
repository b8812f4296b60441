"""Core attention against the softmax formula written out in float64."""

import math
from types import SimpleNamespace

import pytest
import torch
from megatron.core.packed_seq_params import PackedSeqParams
from torch import Tensor

from a3po_megatron.actor.attention import CoreAttention

HEADS, GROUPS, DIM = 4, 2, 8
CONFIG = SimpleNamespace(context_parallel_size=1)


def attention_by_formula(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """[n, heads, dim] each -> [n, heads * dim], one sequence, one head at a time."""
    out = []
    for head in range(HEADS):
        q, k, v = query[:, head].double(), key[:, head // 2].double(), value[:, head // 2].double()
        scores = (q @ k.T / math.sqrt(DIM)).masked_fill(torch.ones(len(q), len(q)).triu(1).bool(), -torch.inf)
        out.append(scores.softmax(-1) @ v)
    return torch.cat(out, dim=-1)


@pytest.mark.parametrize("lengths", [[5], [1, 1], [3, 7, 2, 4], [1, 9]])
def test_packed_sequences_do_not_see_each_other(lengths: list[int]) -> None:
    generator = torch.Generator().manual_seed(0)
    total = sum(lengths)
    query = torch.randn(total, HEADS, DIM, generator=generator)
    key, value = (torch.randn(total, GROUPS, DIM, generator=generator) for _ in range(2))
    boundaries = torch.tensor([0, *lengths]).cumsum(0).int()
    packed = PackedSeqParams(qkv_format="thd", cu_seqlens_q=boundaries, cu_seqlens_kv=boundaries)
    out = CoreAttention(CONFIG, 1, None, "self")(query, key, value, None, packed_seq_params=packed)
    parts = zip(query.split(lengths), key.split(lengths), value.split(lengths), strict=True)
    expected = torch.cat([attention_by_formula(*part) for part in parts])
    torch.testing.assert_close(out.double(), expected, atol=1e-5, rtol=0)


def test_padded_rows_are_causal() -> None:
    query = torch.randn(6, 2, HEADS, DIM)
    key, value = torch.randn(6, 2, GROUPS, DIM), torch.randn(6, 2, GROUPS, DIM)
    out = CoreAttention(CONFIG, 1, None, "self")(query, key, value, None)
    for row in range(2):
        expected = attention_by_formula(query[:, row], key[:, row], value[:, row])
        torch.testing.assert_close(out[:, row].double(), expected, atol=1e-5, rtol=0)
