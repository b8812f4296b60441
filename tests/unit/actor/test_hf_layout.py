"""Tensor surgery: joining the shards gives the whole tensors back, bit for bit, and the parts lie where megatron wants them."""

import pytest
import torch

from a3po_megatron.actor.hf_layout import join, shard
from a3po_megatron.config.model_shape import ModelShape

SHAPE = ModelShape("qwen3", 2, 12, 20, 4, 2, 5, 131, 64, 1e-6, 1e4, False)
WHOLE = {
    "replicated": [(12,)],
    "columns": [(12, 20)],
    "vocab": [(131, 12)],
    "gate_up": [(20, 12), (20, 12)],
    "qkv": [(20, 12), (10, 12), (10, 12)],
}


@pytest.mark.parametrize("tp", [1, 2])
@pytest.mark.parametrize("split", WHOLE)
def test_joining_the_shards_gives_the_whole_back(split: str, tp: int) -> None:
    whole = [torch.randn(shape) for shape in WHOLE[split]]
    joined = join(split, [shard(split, whole, SHAPE, tp, rank) for rank in range(tp)], SHAPE)  # type: ignore[arg-type]
    assert len(joined) == len(whole)
    assert all(torch.equal(one, other) for one, other in zip(joined, whole, strict=True))


def test_query_key_value_are_fused_group_by_group() -> None:
    """Two groups of two query heads: megatron wants q0 q1 k0 v0 on rank 0 and q2 q3 k1 v1 on rank 1."""
    query, key, value = (
        torch.arange(heads).repeat_interleave(5)[:, None] + base for heads, base in ((4, 0), (2, 10), (2, 20))
    )
    heads = [shard("qkv", [query, key, value], SHAPE, 2, rank)[::5, 0].tolist() for rank in range(2)]
    assert heads == [[0, 1, 10, 20], [2, 3, 11, 21]]


@pytest.mark.parametrize("rank", [0, 1])
def test_the_bias_of_query_key_value_lies_as_the_rows_that_it_is_added_to(rank: int) -> None:
    biases = [torch.arange(rows) + base for rows, base in ((20, 0), (10, 100), (10, 200))]
    rows = shard("qkv", [bias[:, None].expand(-1, 12) for bias in biases], SHAPE, 2, rank)
    mine = shard("qkv", biases, SHAPE, 2, rank)
    assert mine.tolist() == rows[:, 0].tolist()
    both = [shard("qkv", biases, SHAPE, 2, rank) for rank in range(2)]
    assert [bias.tolist() for bias in join("qkv", both, SHAPE)] == [bias.tolist() for bias in biases]


def test_the_vocabulary_is_padded_with_zeros_on_the_last_rank() -> None:
    last = shard("vocab", [torch.ones(131, 12)], SHAPE, 2, 1)
    assert last.shape == (66, 12)
    assert last[-1].abs().sum() == 0
    assert last[:-1].min() == 1
