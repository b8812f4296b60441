"""Sums, maxima and counts of token values by staleness, in buckets whose number does not depend on the data.

newer   d0   d1   d2   d3-4   d5-8   d9+        `newer`: d < 0, sampled by weights that this run does not have yet
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from a3po_megatron.objective.masked import keep

BUCKETS = ("newer", "d0", "d1", "d2", "d3-4", "d5-8", "d9+")
_FIRST = (0, 1, 2, 3, 5, 9)  # the smallest d of each bucket but the first


@dataclass(frozen=True)
class StalenessBuckets:
    """The trainable tokens of one microbatch, by age."""

    index: Tensor  # int64 [b s]: the token's place in BUCKETS
    trainable: Tensor  # bool [b, s]

    @staticmethod
    def of(staleness: Tensor, trainable: Tensor) -> "StalenessBuckets":
        """Sort tokens by `staleness`, int [b, s]."""
        first = torch.tensor(_FIRST, dtype=staleness.dtype, device=staleness.device)
        return StalenessBuckets(torch.bucketize(staleness.flatten(), first, right=True), trainable)

    def counts(self) -> Tensor:
        """Return the number of tokens in each bucket, float64 [buckets]."""
        return self.sums(torch.ones_like(self.trainable, dtype=torch.float64))

    def sums(self, values: Tensor) -> Tensor:
        """Return the sum of `values` [b, s] in each bucket, float64 [buckets]."""
        empty = torch.zeros(len(BUCKETS), dtype=torch.float64, device=values.device)
        return empty.index_add(0, self.index, keep(self.trainable, values.double()).flatten())

    def maxima(self, values: Tensor) -> Tensor:
        """Return the largest of `values` [b, s] in each bucket, float64 [buckets], -inf where it is empty."""
        empty = torch.full((len(BUCKETS),), -torch.inf, dtype=torch.float64, device=values.device)
        there = torch.where(self.trainable, values.double(), -torch.inf).flatten()
        return empty.scatter_reduce(0, self.index, there, "amax")


def names(family: str, ending: str = "") -> tuple[str, ...]:
    """Return FAMILY/BUCKET, with an ending, for each bucket."""
    return tuple(f"{family}/{bucket}{ending}" for bucket in BUCKETS)


def named(family: str, values: Tensor, ending: str = "") -> dict[str, Tensor]:
    """Return a metric for each bucket of `values` [buckets]."""
    return dict(zip(names(family, ending), values.unbind(), strict=True))
