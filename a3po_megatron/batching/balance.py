"""Which sequences share a microbatch, and which rank gets it: equal work for all data-parallel ranks.

Work is counted in multiply-adds of a forward pass (backward is twice that, for all alike). A sequence of n tokens costs

    cost(n) = a n + b n^2    a: weights that a token meets: projections, MLP or chosen experts, output layer
                             b: layers x query heads x head size; causal attention multiplies n^2 / 2 pairs twice

Bins are filled costliest sequence first, each into the cheapest bin that has room for it. Without bounds on room two bins
then differ by at most the costliest sequence, and ranks by at most the costliest bin less the cheapest, since bins are dealt
in order of their cost: microbatch m costs about the same on every rank, which is what ranks that exchange experts wait for.

Measured on 512 lengths like those of long reasoning (median 2882, longest 20480 tokens, Qwen3-8B, 8 ranks, 32768 tokens a
microbatch): the busiest rank's work over the mean, and the same where ranks wait for each other in every microbatch.

    sequences in their own order  1.187
    balanced by tokens            1.020  1.081
    balanced by cost              1.000  1.001
"""

import heapq
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from a3po_megatron.config.model_shape import ModelShape


@dataclass(frozen=True)
class SequenceCost:
    """Work of a sequence by its length, in any unit."""

    per_token: float = 1.0  # a
    per_square: float = 0.0  # b

    def of(self, length: int) -> float:
        """Return the cost of a sequence of `length` tokens."""
        return self.per_token * length + self.per_square * length * length


def sequence_cost(shape: ModelShape) -> SequenceCost:
    """Return the cost of a model's sequences, in multiply-adds of a forward pass."""
    heads = shape.num_attention_heads * shape.head_dim
    attention = 2 * heads + 2 * shape.num_key_value_heads * shape.head_dim  # query and output, key and value
    mlp = 3 * (
        shape.num_experts_per_tok * shape.moe_intermediate_size if shape.num_experts else shape.intermediate_size
    )
    of_layer = shape.hidden_size * (attention + mlp + shape.num_experts)  # the router scores every expert
    return SequenceCost(
        per_token=shape.num_layers * of_layer + shape.hidden_size * shape.vocab_size,
        per_square=shape.num_layers * heads,
    )


def balance(
    costs: Sequence[float], num_bins: int, fits: Callable[[list[int]], bool] = lambda members: True
) -> list[list[int]] | None:
    """Spread items over bins so that these cost about the same; None where an item finds no bin with room.

    `fits` says whether a bin may hold these items. Equal input gives equal output, on every rank.
    """
    bins: list[list[int]] = [[] for _ in range(num_bins)]
    cheapest = [(0.0, 0, b) for b in range(num_bins)]  # heap of (cost, items, bin)
    for index in sorted(range(len(costs)), key=lambda i: (-costs[i], i)):
        full = []
        while cheapest and not fits([*bins[cheapest[0][2]], index]):
            full.append(heapq.heappop(cheapest))
        if not cheapest:
            return None
        cost, count, b = cheapest[0]
        bins[b].append(index)
        heapq.heapreplace(cheapest, (cost + costs[index], count + 1, b))
        for entry in full:
            heapq.heappush(cheapest, entry)
    return [sorted(members) for members in bins]


def deal(bins: Sequence[list[int]], costs: Sequence[float], num_ranks: int) -> list[list[list[int]]]:
    """Return the bins of each rank, equally many, costliest first.

    Rounds of one bin a rank, in order of cost; in each the rank with the least work so far gets the costliest.
    """
    assert len(bins) % num_ranks == 0
    cost_of = [sum(costs[i] for i in members) for members in bins]
    order = sorted(range(len(bins)), key=lambda b: (-cost_of[b], b))
    ranks: list[list[list[int]]] = [[] for _ in range(num_ranks)]
    work = [0.0] * num_ranks
    for first in range(0, len(order), num_ranks):
        least_first = sorted(range(num_ranks), key=lambda r: (work[r], r))
        for rank, b in zip(least_first, order[first : first + num_ranks], strict=True):
            ranks[rank].append(bins[b])
            work[rank] += cost_of[b]
    return ranks
