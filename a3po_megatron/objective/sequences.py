"""Quantities of a whole sequence, in a microbatch that holds several, of which context parallelism may hold only a part.

The token ratios of a sequence of n trainable tokens become one, their geometric mean (GSPO):

    s = (prod_t r_t)^(1/n) = exp(1/n sum_t log r_t)

The sum runs over `sequence`, the token's sequence number in the microbatch, and is made whole over the context-parallel
ranks by a callable that the caller gives: its forward adds the ranks up, its backward adds up their gradients.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from a3po_megatron.objective.masked import keep

SumOverCp = Callable[[Tensor], Tensor]


def one_rank(sums: Tensor) -> Tensor:
    """Return `sums`: without context parallelism every sequence is whole."""
    return sums


@dataclass(frozen=True)
class Sequences:
    """The sequences of one microbatch."""

    trainable: Tensor  # bool [b, s]
    number: Tensor  # int64 [b, s], 0 .. b s - 1 where trainable
    num_tokens: Tensor  # [b, s]: trainable tokens of the token's whole sequence, over all ranks; >= 1 where trainable
    sum_over_cp: SumOverCp

    @staticmethod
    def of(trainable: Tensor, fields: Mapping[str, Tensor], sum_over_cp: SumOverCp) -> "Sequences":
        """Read the fields `sequence` and `sequence_tokens`, which may hold anything where not trainable."""
        number = torch.where(trainable, fields["sequence"], 0)
        num_tokens = torch.where(trainable, fields["sequence_tokens"], 1)
        return Sequences(trainable, number, num_tokens, sum_over_cp)

    def mean(self, values: Tensor) -> Tensor:
        """Return at every trainable token [b, s] the mean of `values` over its sequence's trainable tokens, elsewhere 0.

        The buffer has one place a position, whatever the number of sequences: no rank needs to look at the data to know
        its size, and all context-parallel ranks have the same. Sums are in float64, so that their order does not show.
        """
        where = self.number.flatten()
        local = values.new_zeros(where.numel(), dtype=torch.float64)
        sums = self.sum_over_cp(local.index_add(0, where, keep(self.trainable, values).flatten().double()))
        means = sums[where].view_as(values) / self.num_tokens
        return keep(self.trainable, means).to(values.dtype)
