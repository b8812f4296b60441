"""Equal work for all ranks: bounds for any sequences, and figures for lengths as they are."""

import re
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from a3po_megatron.batching import balance as module
from a3po_megatron.batching.balance import SequenceCost, balance, deal, sequence_cost
from a3po_megatron.batching.packing import Microbatch, TokenSequence, make_microbatches
from a3po_megatron.config.model_shape import ModelShape, read_model_shape

ROOT = Path(__file__).parents[3]
QWEN3_8B = ModelShape(
    family="qwen3",
    num_layers=36,
    hidden_size=4096,
    intermediate_size=12288,
    num_attention_heads=32,
    num_key_value_heads=8,
    head_dim=128,
    vocab_size=151936,
    max_position_embeddings=40960,
    rms_norm_eps=1e-6,
    rope_theta=1e6,
    tie_word_embeddings=False,
)
DP, BUDGET = 8, 32768
Lengths = st.lists(st.integers(1, 100), min_size=1, max_size=40)


def test_costs_of_a_hand_counted_model() -> None:
    """36 layers: q and o 4096 x 4096, k and v 4096 x 1024, three of 4096 x 12288; the output layer. Attention: 32 heads of 128."""
    cost = sequence_cost(QWEN3_8B)
    assert cost.per_token == 36 * (2 * 4096 * 4096 + 2 * 4096 * 1024 + 3 * 4096 * 12288) + 4096 * 151936
    assert cost.per_square == 36 * 32 * 128
    assert cost.of(10) == 10 * cost.per_token + 100 * cost.per_square
    assert 7.5e9 < cost.per_token < 8.2e9  # 8.2 billion parameters, of which the input embedding multiplies nothing


def test_costs_of_a_model_of_experts_count_the_chosen_ones() -> None:
    dense = read_model_shape(ROOT / "configs/models/arithmetic_qwen3")
    experts = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": dense.intermediate_size // 2}
    sparse = ModelShape(**{**vars(dense), "family": "qwen3_moe", **experts})
    routers = dense.num_layers * dense.hidden_size * 8
    assert sequence_cost(sparse).per_token == sequence_cost(dense).per_token + routers


@given(costs=Lengths, num_bins=st.integers(1, 8))
def test_bins_differ_by_at_most_the_costliest_item(costs: list[int], num_bins: int) -> None:
    bins = balance(costs, num_bins)
    assert bins is not None
    held = [sum(costs[i] for i in members) for members in bins]
    assert sum(held) == sum(costs)
    assert max(held) - min(held) <= max(costs)


@given(costs=Lengths, num_bins=st.integers(1, 8), room=st.integers(1, 12))
def test_bins_with_bounds_hold_every_item_once_or_there_is_no_room(costs: list[int], num_bins: int, room: int) -> None:
    bins = balance(costs, num_bins, lambda members: len(members) <= room)
    assert (bins is None) == (len(costs) > num_bins * room)
    if bins is not None:
        assert sorted(i for members in bins for i in members) == list(range(len(costs)))
        assert max(map(len, bins)) <= room


@given(costs=Lengths, num_ranks=st.integers(1, 5), rounds=st.integers(1, 4))
def test_ranks_get_equally_many_bins_and_differ_by_at_most_the_range_of_bins(
    costs: list[int], num_ranks: int, rounds: int
) -> None:
    bins = balance(costs, num_ranks * rounds)
    assert bins is not None
    ranks = deal(bins, costs, num_ranks)
    assert [len(dealt) for dealt in ranks] == [rounds] * num_ranks
    assert sorted(i for dealt in ranks for members in dealt for i in members) == list(range(len(costs)))
    held = [sum(costs[i] for i in members) for members in bins]
    work = [sum(costs[i] for members in dealt for i in members) for dealt in ranks]
    assert max(work) - min(work) <= max(held) - min(held)


def test_ranks_do_equal_work_on_lengths_like_those_of_long_reasoning() -> None:
    """The module's docstring states these figures."""
    rng = np.random.default_rng(0)
    lengths = np.clip(rng.lognormal(np.log(3000), 0.9, 512), 64, 20480).astype(int).tolist()
    cost = sequence_cost(QWEN3_8B)
    in_order = np.array([cost.of(n) for n in lengths]).reshape(DP, -1).sum(1)
    by_tokens, by_cost = (work_of(microbatches(lengths, of), cost) for of in (SequenceCost(), cost))
    figures = [busiest_over_mean(in_order[:, None]), busiest_over_mean(by_tokens), slowest_over_mean(by_tokens)]
    figures += [busiest_over_mean(by_cost), slowest_over_mean(by_cost)]
    assert [f"{figure:.3f}" for figure in figures] == re.findall(r" (1\.\d{3})", module.__doc__ or "")


def test_a_few_long_sequences_are_balanced_as_far_as_the_longest_allows() -> None:
    lengths = [20000, 9000, 5000, 4000, 4000, 3000, 2000, 1000] * 2 + [500] * 40
    cost = sequence_cost(QWEN3_8B)
    work = work_of(microbatches(lengths, cost), cost).sum(1)
    assert work.max() == pytest.approx(max(cost.of(20000), work.mean()), rel=0.01)


def microbatches(lengths: list[int], cost: SequenceCost) -> list[list[Microbatch]]:
    sequences = [TokenSequence(np.zeros(n, np.int64), np.arange(n) > 0) for n in lengths]
    return [make_microbatches(sequences, dp_rank=r, dp_size=DP, max_tokens=BUDGET, cost=cost) for r in range(DP)]


def work_of(ranks: list[list[Microbatch]], cost: SequenceCost) -> np.ndarray:
    """Return [ranks, microbatches] costs."""
    return np.array([[sum(cost.of(span.length) for span in m.spans) for m in dealt] for dealt in ranks])


def busiest_over_mean(work: np.ndarray) -> float:
    return float(work.sum(1).max() / work.sum(1).mean())


def slowest_over_mean(work: np.ndarray) -> float:
    return float(work.max(0).sum() / work.sum(1).mean())
