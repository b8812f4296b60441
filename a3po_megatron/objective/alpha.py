"""alpha(d): how much of the behaviour policy is in A-3PO's proximal policy, by the staleness d of the token.

    log pi_prox = alpha log pi_behav + (1 - alpha) log pi_theta        alpha = 1: behaviour, alpha = 0: target

One class is one schedule: a pure function (staleness, context) -> alpha in float64, of the shape of `staleness`. The
paper's is `InverseAlpha`; the others are open questions of the literature. With every schedule, tokens newer than the
actor (d < 0, after a resume from an older checkpoint) are anchored at the behaviour policy: alpha = 1.

`StepContext` carries what a schedule may depend on beside d: the place of the optimizer step in its batch, and the
strength that `adaptive.py` steers. It is frozen, and made anew for every optimizer step.
"""

from dataclasses import dataclass
from typing import Literal, Protocol

import torch
from torch import Tensor

FreshAnchor = Literal["behavior", "target"]


@dataclass(frozen=True)
class StepContext:
    """Which optimizer step of its batch this is; the same on every rank and for every microbatch of the step."""

    index: int = 0  # j: optimizer steps taken on this batch so far, counted over epochs
    num_steps: int = 1  # N: optimizer steps that this batch will have, over all epochs
    strength: float = 1.0  # of `AdaptiveAlpha`


class AlphaSchedule(Protocol):
    """What the log-linear proximal policy asks of a schedule."""

    def __call__(self, staleness: Tensor, context: StepContext) -> Tensor:
        """Return alpha in [0, 1], float64, for integer staleness d of any shape."""


@dataclass(frozen=True)
class InverseAlpha:
    """The paper's: 1/d for d >= 1, so that r = w^(1/d).

    For d = 0 the sources disagree: `behavior` gives alpha = 1 (plain clipped PPO, the paper's second version), `target`
    gives alpha = 0 (r is identically 1, nothing clips).
    """

    fresh_anchor: FreshAnchor = "behavior"

    def __call__(self, staleness: Tensor, context: StepContext) -> Tensor:
        """Return alpha, float64, of the shape of `staleness`."""
        alpha = 1.0 / staleness.clamp(min=1).double()
        return alpha.masked_fill(staleness == 0, 0.0) if self.fresh_anchor == "target" else alpha


@dataclass(frozen=True)
class ConstantAlpha:
    """The same for all d >= 0: the clip band in w is [(1 - eps)^(1/alpha), (1 + eps)^(1/alpha)] at every age."""

    value: float = 0.5

    def __call__(self, staleness: Tensor, context: StepContext) -> Tensor:
        """Return alpha, float64, of the shape of `staleness`."""
        return _unless_newer(staleness, torch.full_like(staleness, self.value, dtype=torch.float64))


@dataclass(frozen=True)
class ExponentialAlpha:
    """e^(-rate d): 1 for fresh tokens, falling faster than 1/d."""

    rate: float = 1.0

    def __call__(self, staleness: Tensor, context: StepContext) -> Tensor:
        """Return alpha, float64, of the shape of `staleness`."""
        return _unless_newer(staleness, (-self.rate * staleness.double()).exp())


@dataclass(frozen=True)
class ShiftedAlpha:
    """1/(1 + d): 1 for fresh tokens without a special case; half behaviour already at d = 1."""

    def __call__(self, staleness: Tensor, context: StepContext) -> Tensor:
        """Return alpha, float64, of the shape of `staleness`."""
        return 1.0 / (1.0 + staleness.clamp(min=0).double())


@dataclass(frozen=True)
class MinibatchAlpha:
    """j / (d N + j): where the start of the batch lies if log-probs moved evenly, in optimizer steps.

    At step j the policy is d N + j steps away from the one that sampled the token, j of them inside this batch. Then the
    policy at the start of the batch, which `recompute` evaluates, is alpha of the way back to the behaviour policy. At
    j = 0 this is 0 (target) for stale tokens; fresh ones (d = 0) are always at the behaviour policy, j / j = 1.
    """

    def __call__(self, staleness: Tensor, context: StepContext) -> Tensor:
        """Return alpha, float64, of the shape of `staleness`."""
        stale = staleness.clamp(min=1).double()
        alpha = context.index / (stale * context.num_steps + context.index)
        return alpha.masked_fill(staleness <= 0, 1.0)


@dataclass(frozen=True)
class AdaptiveAlpha:
    """min(1, strength / d): the paper's schedule at strength 1, plain PPO from strength = d on.

    `adaptive.py` moves the strength between batches, so that a measured quantity stays at its target.
    """

    def __call__(self, staleness: Tensor, context: StepContext) -> Tensor:
        """Return alpha, float64, of the shape of `staleness`."""
        alpha = (context.strength / staleness.clamp(min=1).double()).clamp(max=1.0)
        return alpha.masked_fill(staleness <= 0, 1.0)


def _unless_newer(staleness: Tensor, alpha: Tensor) -> Tensor:
    return alpha.masked_fill(staleness < 0, 1.0)
