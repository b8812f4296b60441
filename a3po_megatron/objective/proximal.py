"""The proximal policy pi_prox: the anchor that the trained policy is kept close to.

    L = - b * min(r * A, clip(r) * A)        r = pi_theta / pi_prox,  b = pi_prox / pi_behav

Each class here is one choice of pi_prox, a function (policy_logprobs, fields) -> proximal_logprobs of [b, s] tensors,
without gradient. Fields: `behavior_logprobs` float, `staleness` int (d = version of the actor's weights - version that
sampled the token), and for `RecomputedProximal` also `proximal_logprobs` float.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, Protocol

import torch
from torch import Tensor

FreshAnchor = Literal["behavior", "target"]


class Proximal(Protocol):
    """What the policy loss asks of a proximal policy."""

    def __call__(self, policy_logprobs: Tensor, fields: Mapping[str, Tensor]) -> Tensor:
        """Return log pi_prox [b, s], without gradient."""


@dataclass(frozen=True)
class LogLinearProximal:
    """A-3PO: log pi_prox = alpha log pi_behav + (1 - alpha) stop_grad(log pi_theta), with alpha = 1/d.

    No forward pass, no collective, and no tensor larger than [b, s]. Since r = w^alpha and b = w^(1 - alpha) for
    w = pi_theta / pi_behav, the product b r = w whatever alpha is: alpha only moves the clip and cap boundaries.
    """

    fresh_anchor: FreshAnchor = "behavior"

    def __call__(self, policy_logprobs: Tensor, fields: Mapping[str, Tensor]) -> Tensor:
        """Return log pi_prox [b, s], without gradient."""
        alpha = inverse_alpha(fields["staleness"], self.fresh_anchor).to(policy_logprobs.dtype)
        return interpolate(alpha, fields["behavior_logprobs"], policy_logprobs.detach())


class BehaviorProximal:
    """pi_prox = pi_behav: b = 1 and r = w, plain PPO; on stale data its clip hits tokens for their age."""

    def __call__(self, policy_logprobs: Tensor, fields: Mapping[str, Tensor]) -> Tensor:
        """Return log pi_prox [b, s], without gradient."""
        return fields["behavior_logprobs"]


class RecomputedProximal:
    """pi_prox = the policy at the start of the batch, from the extra forward pass that A-3PO saves."""

    def __call__(self, policy_logprobs: Tensor, fields: Mapping[str, Tensor]) -> Tensor:
        """Return log pi_prox [b, s], without gradient."""
        return fields["proximal_logprobs"]


def inverse_alpha(staleness: Tensor, fresh_anchor: FreshAnchor) -> Tensor:
    """Return alpha(d) in float64, of the shape of `staleness`: 1/d for d >= 1.

    For d = 0 the sources disagree: `behavior` gives alpha = 1 (plain clipped PPO, the paper's second version), `target`
    gives alpha = 0 (r is identically 1, nothing clips). Tokens newer than the actor (d < 0, after a resume) are
    anchored at the behaviour policy: alpha = 1.
    """
    alpha = 1.0 / staleness.clamp(min=1).double()
    return alpha.masked_fill(staleness == 0, 0.0) if fresh_anchor == "target" else alpha


def interpolate(alpha: Tensor, behavior_logprobs: Tensor, policy_logprobs: Tensor) -> Tensor:
    """Return alpha * behaviour + (1 - alpha) * policy, exactly one of them where alpha is 1 or 0 (also for -inf)."""
    mixed = alpha * behavior_logprobs + (1 - alpha) * policy_logprobs
    return torch.where(alpha == 1, behavior_logprobs, torch.where(alpha == 0, policy_logprobs, mixed))
