"""Maximum likelihood of given tokens: the loss of warm starts and of parity tests."""

from collections.abc import Mapping

import torch
from torch import Tensor


class SupervisedLoss:
    """L = - sum over trainable tokens of log pi_theta(token); the caller divides by their number."""

    metric_names: tuple[str, ...] = ()
    needs_entropy = False

    def __call__(
        self, logprobs: Tensor, trainable: Tensor, fields: Mapping[str, Tensor], entropy: Tensor | None = None
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """Return the scalar sum and no metrics, for float32 [b, s] log-probabilities and bool [b, s] `trainable`."""
        # float64: the sum of many float32 terms would lose the digits that two layouts are compared by.
        return -torch.where(trainable, logprobs, 0.0).sum(dtype=torch.float64), {}
