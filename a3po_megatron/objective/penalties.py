"""What is added to the loss of a token beside the policy term: KL penalties and the entropy bonus.

Per-token estimators on the sampled tokens, differentiated as they stand, as the usual open implementations do:

    reference, x = log pi_theta - log pi_ref      behaviour, log w = log pi_theta - log pi_behav
      k1 = x              gradient  grad log pi                 beta/2 (log w)^2, |log w| clamped
      k2 = x^2 / 2        gradient  x grad log pi                 gradient  beta log w grad log pi, 0 beyond the clamp
      k3 = e^-x - 1 + x   gradient  (1 - e^-x) grad log pi

On fresh samples the mean of k1 and k3 is KL(pi_theta, pi_ref), that of k2 to second order. The gradient is that of this KL
for k2 only, 0 on average for k1, and for k3 that of KL(pi_ref, pi_theta). Nothing reweights stale samples.
"""

from dataclasses import dataclass
from typing import Literal

from torch import Tensor

from a3po_megatron.objective.masked import MAX_LOG_RATIO

Estimator = Literal["k1", "k2", "k3"]


@dataclass(frozen=True)
class ReferenceKL:
    """Keeps the policy near the reference policy."""

    coefficient: float
    estimator: Estimator = "k3"

    def __call__(self, log_ratio: Tensor) -> Tensor:
        """Return the estimate [b, s], without the coefficient, for log pi_theta - log pi_ref [b, s]."""
        match self.estimator:
            case "k1":
                return log_ratio
            case "k2":
                return 0.5 * log_ratio.square()
            case "k3":
                # The whole estimate stops at the bound: the exponent alone would leave a gradient of the wrong sign.
                bounded = log_ratio.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
                return (-bounded).expm1() + bounded


@dataclass(frozen=True)
class BehaviorKL:
    """Keeps the policy near the one that sampled the token, on tokens that are not lost yet."""

    coefficient: float  # beta
    clamp: float = 5.0  # of |log w|

    def __call__(self, log_w: Tensor) -> Tensor:
        """Return (log w)^2 / 2 [b, s], without the coefficient."""
        return 0.5 * log_w.clamp(-self.clamp, self.clamp).square()
