"""What is maximised for a token: the clipped surrogate (PPO, GSPO) or the clipped weight of CISPO.

    clipped  b * min(r A, clip(r, 1 - eps_low, 1 + eps_high) A)
             and with dual clip c, where A < 0:  b * max(min(...), c A)
    CISPO    stop_grad(clip(w, 1 - eps_low, 1 + eps_high)) * A * log pi_theta,   w = b r

GSPO is the clipped surrogate with r and b of the whole sequence (sequences.py). In CISPO no token loses its gradient: only
its weight is clipped.
"""

from dataclasses import dataclass
from typing import Literal, Protocol

import torch
from torch import Tensor

CLIP, DUAL_CLIP = "policy/clip_fraction", "policy/dual_clip_fraction"


class Surrogate(Protocol):
    """What the policy loss asks of a surrogate."""

    @property
    def level(self) -> Literal["token", "sequence"]:
        """Whether r is of the token or the geometric mean over its sequence."""

    @property
    def metric_names(self) -> tuple[str, ...]:
        """Names of the masks it returns."""

    def __call__(
        self, logprobs: Tensor, ratio: Tensor, weight: Tensor, advantages: Tensor
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """Return what is to be maximised, [b, s], and which tokens it clipped, bool [b, s] by metric name.

        `logprobs` and `ratio` carry the gradient, `weight` (b) does not.
        """


@dataclass(frozen=True)
class ClippedSurrogate:
    """PPO's, of the decoupled loss; `level` sequence makes it GSPO's."""

    clip_low: float = 0.2  # eps_low
    clip_high: float = 0.2  # eps_high; above eps_low: clip-higher (DAPO)
    dual_clip: float = 0.0  # c > 1: bounds what one token of A < 0 can cost; 0: none
    level: Literal["token", "sequence"] = "token"

    @property
    def metric_names(self) -> tuple[str, ...]:
        """Names of the masks it returns."""
        return (CLIP, DUAL_CLIP) if self.dual_clip else (CLIP,)

    def __call__(
        self, logprobs: Tensor, ratio: Tensor, weight: Tensor, advantages: Tensor
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """Return what is to be maximised, [b, s], and which tokens it clipped: their gradient is 0."""
        free = ratio * advantages
        clipped = ratio.clamp(1 - self.clip_low, 1 + self.clip_high) * advantages
        value, hits = torch.minimum(free, clipped), {CLIP: clipped < free}
        if self.dual_clip:
            floor = self.dual_clip * advantages
            hits[DUAL_CLIP] = (advantages < 0) & (value < floor)
            value = torch.where(hits[DUAL_CLIP], floor, value)
        return weight * value, hits


@dataclass(frozen=True)
class CispoSurrogate:
    """CISPO's: the clipped, detached total weight."""

    clip_low: float = 0.2
    clip_high: float = 0.2

    @property
    def level(self) -> Literal["token", "sequence"]:
        """The weight is the token's."""
        return "token"

    @property
    def metric_names(self) -> tuple[str, ...]:
        """Names of the masks it returns."""
        return (CLIP,)

    def __call__(
        self, logprobs: Tensor, ratio: Tensor, weight: Tensor, advantages: Tensor
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """Return what is to be maximised, [b, s], and which tokens have a clipped weight."""
        total = (weight * ratio).detach()
        clipped = total.clamp(1 - self.clip_low, 1 + self.clip_high)
        return clipped * advantages * logprobs, {CLIP: clipped != total}
