"""Corrections of the weights that say who sampled a token: a cap on b, a bound on w = b r.

    b = pi_prox / pi_behav        w = pi_theta / pi_behav

`truncate` makes a weight smaller and keeps the token; `mask` takes the token out of the loss. The denominator does not
change either way: it is counted before. Nothing here carries a gradient.
"""

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

Level = Literal["token", "sequence"]
Mode = Literal["truncate", "mask"]


@dataclass(frozen=True)
class BehaviorWeight:
    """What becomes of b. `level` sequence: b is the geometric mean over the sequence's trainable tokens."""

    cap: float = 0.0  # largest b; 0: no cap
    mode: Mode = "truncate"
    level: Level = "token"

    @property
    def drops(self) -> bool:
        """Whether it may take tokens out of the loss."""
        return self.cap != 0 and self.mode == "mask"

    def __call__(self, weight: Tensor) -> tuple[Tensor, Tensor]:
        """Return (b to use, bool: tokens to drop) for b [b, s]."""
        nothing = torch.zeros_like(weight, dtype=torch.bool)
        if not self.cap:
            return weight, nothing
        if self.mode == "mask":
            return weight, weight > self.cap
        return weight.clamp(max=self.cap), nothing


@dataclass(frozen=True)
class TotalWeight:
    """What becomes of w: `truncate` keeps the factor of A grad log pi at most at `bound`, `mask` drops outside [1/c, c]."""

    bound: float = 0.0  # c > 1; 0: none
    mode: Mode = "truncate"

    @property
    def drops(self) -> bool:
        """Whether it may take tokens out of the loss."""
        return self.bound != 0 and self.mode == "mask"

    def __call__(self, total: Tensor, ratio: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
        """Return (b to use, bool: tokens to drop), [b, s] each.

        `total`: w as it is, `ratio`: r, `weight`: b after its cap. Truncating scales b by min(1, c / (b r)).
        """
        nothing = torch.zeros_like(total, dtype=torch.bool)
        if not self.bound:
            return weight, nothing
        if self.mode == "mask":
            return weight, (total > self.bound) | (total < 1 / self.bound)
        return weight * (self.bound / (weight * ratio.detach())).clamp(max=1.0), nothing
