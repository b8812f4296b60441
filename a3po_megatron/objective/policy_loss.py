"""The decoupled clipped surrogate of A-3PO, token by token.

    L = - sum_t b_t * min(r_t * A_t, clip(r_t, 1 - eps_low, 1 + eps_high) * A_t)

    r = pi_theta / pi_prox      carries the gradient
    b = min(pi_prox / pi_behav, cap)      does not: it corrects for who sampled the token

The caller divides by the number of trainable tokens of the whole optimizer step, taken before any clip or cap. Masked
positions are taken out with `where`, before any exponential: a product with a mask would turn inf * 0 into NaN.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from a3po_megatron.objective.proximal import Proximal

# Ratios are kept within e^-20 .. e^20, where float32 still squares and sums them; beyond that there is no gradient.
MAX_LOG_RATIO = 20.0


@dataclass(frozen=True)
class PolicyLoss:
    """The loss of one microbatch; `proximal` decides between A-3PO and its baselines."""

    proximal: Proximal
    clip_low: float = 0.2  # eps_low
    clip_high: float = 0.2  # eps_high
    behavior_weight_cap: float = 0.0  # largest b; 0: no cap

    metric_names: tuple[str, ...] = (
        "policy/clip_fraction",  # tokens whose clipped term is the smaller one
        "policy/ratio_max",  # of r
        "policy/behavior_weight_mean",  # of b, before the cap
        "policy/behavior_weight_max",  # of b, before the cap
        "policy/fresh_logprob_gap_max",  # |log pi_theta - log pi_behav| of tokens with d = 0; -inf where there are none
    )

    needs_entropy: bool = False

    def __call__(
        self, logprobs: Tensor, trainable: Tensor, fields: Mapping[str, Tensor], entropy: Tensor | None = None
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """Return the scalar loss and the metrics: sums over trainable tokens, or maxima under names that end in `max`.

        `logprobs`: log pi_theta [b, s] with gradient. `trainable`: bool [b, s]. Fields, [b, s] each: `advantages`,
        `behavior_logprobs`, `staleness`, and what `proximal` needs.
        """
        behavior, advantages = fields["behavior_logprobs"], fields["advantages"]
        proximal = self.proximal(logprobs, fields)  # [b, s]
        ratio = _exp_where(trainable, logprobs - proximal)  # r
        weight = _exp_where(trainable, proximal - behavior)  # b
        capped = weight.clamp(max=self.behavior_weight_cap) if self.behavior_weight_cap else weight

        surrogate = ratio * advantages
        clipped = ratio.clamp(1 - self.clip_low, 1 + self.clip_high) * advantages
        loss = -torch.where(trainable, capped * torch.minimum(surrogate, clipped), 0.0)

        with torch.no_grad():
            fresh = trainable & (fields["staleness"] == 0)
            metrics = {
                "policy/clip_fraction": _sum_where(trainable & (clipped < surrogate), torch.ones_like(ratio)),
                "policy/ratio_max": _max_where(trainable, ratio),
                "policy/behavior_weight_mean": _sum_where(trainable, weight),
                "policy/behavior_weight_max": _max_where(trainable, weight),
                "policy/fresh_logprob_gap_max": _max_where(fresh, (logprobs - behavior).abs()),
            }
        # float64: the sum of many float32 terms would lose the digits that two layouts are compared by.
        return loss.sum(dtype=torch.float64), metrics


def _exp_where(mask: Tensor, log_ratio: Tensor) -> Tensor:
    """Return e^log_ratio, bounded, and 1 where the mask is off: no NaN gets in there, nor out as a gradient."""
    return torch.where(mask, log_ratio, 0.0).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()


def _sum_where(mask: Tensor, values: Tensor) -> Tensor:
    return torch.where(mask, values, 0.0).sum(dtype=torch.float64)


def _max_where(mask: Tensor, values: Tensor) -> Tensor:
    return torch.where(mask, values, -torch.inf).max()
