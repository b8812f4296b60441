"""From the losses of tokens to one number: who counts as much as whom. Megatron divides the sum by the count, once.

    token         sum_t l_t                     / trainable tokens      every token alike (DAPO)
    sequence      sum_i 1/n_i sum_t l_t         / sequences             every sequence alike (GRPO's first form)
    fixed_length  1/L sum_t l_t                 / sequences             every token alike, whatever a batch's lengths (Dr. GRPO)

n_i: trainable tokens of sequence i, before any correction mask. Counted are sequences with a trainable token. The sum of a
microbatch is a part of the sum of the step, so the way a step is split does not matter.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

Counts = Literal["tokens", "sequences"]


@dataclass(frozen=True)
class Aggregation:
    """How token losses are summed, and what the denominator counts."""

    kind: Literal["token", "sequence", "fixed_length"] = "token"
    length: int = 0  # L of fixed_length

    @property
    def counts(self) -> Counts:
        """What the denominator counts."""
        return "tokens" if self.kind == "token" else "sequences"

    def __call__(self, losses: Tensor, trainable: Tensor, fields: Mapping[str, Tensor]) -> Tensor:
        """Return the sum, a float64 scalar, of `losses` [b, s], which are 0 where not trainable."""
        if self.kind == "sequence":
            losses = losses / torch.where(trainable, fields["sequence_tokens"], 1)
        # float64: the sum of many float32 terms would lose the digits that two layouts are compared by.
        total = losses.sum(dtype=torch.float64)
        return total / self.length if self.kind == "fixed_length" else total
