"""The proximal policy pi_prox: the anchor that the trained policy is kept close to.

    L = - b * min(r * A, clip(r) * A)        r = pi_theta / pi_prox,  b = pi_prox / pi_behav

Each class here is one choice of pi_prox, a function (policy_logprobs, fields, context) -> proximal_logprobs of [b, s]
tensors, without gradient. Fields: `behavior_logprobs` float, `staleness` int (d = version of the actor's weights - version
that sampled the token), and those that `needs` names.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor

from a3po_megatron.objective.alpha import AlphaSchedule, InverseAlpha, StepContext

START = StepContext()
PROXIMAL_FIELD = frozenset({"proximal_logprobs"})


class Proximal(Protocol):
    """What the policy loss asks of a proximal policy."""

    def needs(self, context: StepContext) -> frozenset[str]:
        """Return the fields that this optimizer step needs beside the usual ones."""

    def __call__(self, policy_logprobs: Tensor, fields: Mapping[str, Tensor], context: StepContext = START) -> Tensor:
        """Return log pi_prox [b, s], without gradient."""


@dataclass(frozen=True)
class LogLinearProximal:
    """A-3PO: log pi_prox = alpha log pi_behav + (1 - alpha) stop_grad(log pi_theta), alpha by the token's staleness.

    No forward pass, no collective, and no tensor larger than [b, s]. Since r = w^alpha and b = w^(1 - alpha) for
    w = pi_theta / pi_behav, the product b r = w whatever alpha is: alpha only moves the clip and cap boundaries.
    """

    schedule: AlphaSchedule = field(default_factory=InverseAlpha)

    def needs(self, context: StepContext) -> frozenset[str]:
        """Return the fields that this optimizer step needs beside the usual ones: none."""
        return frozenset()

    def __call__(self, policy_logprobs: Tensor, fields: Mapping[str, Tensor], context: StepContext = START) -> Tensor:
        """Return log pi_prox [b, s], without gradient."""
        alpha = self.schedule(fields["staleness"], context).to(policy_logprobs.dtype)
        return interpolate(alpha, fields["behavior_logprobs"], policy_logprobs.detach())


@dataclass(frozen=True)
class BehaviorProximal:
    """pi_prox = pi_behav: b = 1 and r = w, plain PPO; on stale data its clip hits tokens for their age."""

    def needs(self, context: StepContext) -> frozenset[str]:
        """Return the fields that this optimizer step needs beside the usual ones: none."""
        return frozenset()

    def __call__(self, policy_logprobs: Tensor, fields: Mapping[str, Tensor], context: StepContext = START) -> Tensor:
        """Return log pi_prox [b, s], without gradient."""
        return fields["behavior_logprobs"]


@dataclass(frozen=True)
class RecomputedProximal:
    """pi_prox = the policy at the start of the batch, from the extra forward pass that A-3PO saves.

    `reuse_first_forward`: the batch's first optimizer step starts from those very weights, so its own training forward is
    that policy, and its tokens need no extra pass. Nothing else changes.
    """

    reuse_first_forward: bool = False

    def needs(self, context: StepContext) -> frozenset[str]:
        """Return the fields that this optimizer step needs beside the usual ones."""
        return frozenset() if self._reuses(context) else PROXIMAL_FIELD

    def __call__(self, policy_logprobs: Tensor, fields: Mapping[str, Tensor], context: StepContext = START) -> Tensor:
        """Return log pi_prox [b, s], without gradient."""
        return policy_logprobs.detach() if self._reuses(context) else fields["proximal_logprobs"]

    def _reuses(self, context: StepContext) -> bool:
        return self.reuse_first_forward and context.index == 0


def interpolate(alpha: Tensor, behavior_logprobs: Tensor, policy_logprobs: Tensor) -> Tensor:
    """Return alpha * behaviour + (1 - alpha) * policy, exactly one of them where alpha is 1 or 0 (also for -inf)."""
    mixed = alpha * behavior_logprobs + (1 - alpha) * policy_logprobs
    return torch.where(alpha == 1, behavior_logprobs, torch.where(alpha == 0, policy_logprobs, mixed))
