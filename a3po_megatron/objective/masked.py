"""Masks and exponents, as every file of the objective uses them.

A mask is applied with `where`, before any exponential: a product with a mask would turn inf * 0 into NaN. What is not
masked is never repaired: a NaN in a trainable token reaches the loss, which then stops the step.
"""

import torch
from torch import Tensor

# Ratios are kept within e^-20 .. e^20, where float32 still squares and sums them; beyond that there is no gradient.
MAX_LOG_RATIO = 20.0


def keep(mask: Tensor, values: Tensor) -> Tensor:
    """Return `values` where the mask is on, and 0, without gradient, where it is off."""
    return torch.where(mask, values, 0.0)


def bounded_exp(log_ratio: Tensor) -> Tensor:
    """Return e^log_ratio, bounded."""
    return log_ratio.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()


def sum_where(mask: Tensor, values: Tensor) -> Tensor:
    """Return the sum over the mask, in float64: two layouts are compared by digits that float32 would lose."""
    return keep(mask, values).sum(dtype=torch.float64)


def max_where(mask: Tensor, values: Tensor) -> Tensor:
    """Return the largest value under the mask, -inf where it is off everywhere."""
    return torch.where(mask, values, -torch.inf).max()
