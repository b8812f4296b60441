"""Maximum likelihood of given tokens: the loss of warm starts and of parity tests."""

from collections.abc import Mapping

from torch import Tensor

from a3po_megatron.objective.aggregation import Counts
from a3po_megatron.objective.masked import sum_where


class SupervisedLoss:
    """L = - sum over trainable tokens of log pi_theta(token); the caller divides by their number."""

    metric_names: tuple[str, ...] = ()
    needs: frozenset[str] = frozenset()
    needs_entropy = False
    counts: Counts = "tokens"

    def __call__(
        self, logprobs: Tensor, trainable: Tensor, fields: Mapping[str, Tensor], entropy: Tensor | None = None
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """Return the scalar sum and no metrics, for float32 [b, s] log-probabilities and bool [b, s] `trainable`."""
        return -sum_where(trainable, logprobs), {}
