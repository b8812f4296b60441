"""What every optimizer step reports: totals that add up over microbatches, ranks and steps, and the figures made of them.

Totals, by name:
    .../max, ..._max   the largest value
    tokens/...         a number of tokens
    NAME/BUCKET        a sum over the trainable tokens of that age (buckets.py), of which tokens/BUCKET is the number
    ..._square         a sum of squares, for the effective sample size
    anything else      a sum over all trainable tokens

`figures` divides, once, when everything has been added up; a figure of no tokens is None.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from a3po_megatron.objective.buckets import BUCKETS, StalenessBuckets, named, names
from a3po_megatron.objective.masked import MAX_LOG_RATIO, bounded_exp, max_where, sum_where
from a3po_megatron.objective.surrogate import CLIP

Metrics = dict[str, Tensor]
WEIGHTS = ("policy/ratio", "policy/behavior_weight", "policy/weight")  # r, b (before any cap), w = b r
FRESH_GAP_MAX, FRESH_GAP, FRESH_KL = "policy/fresh_logprob_gap_max", "policy/fresh_logprob_gap/d0", "policy/fresh_kl/d0"
_APPROXIMATION = tuple(
    f"approximation/{what}"
    for what in ("logprob_abs", "kl_true_approximate", "kl_approximate_true", "ratio_abs", "behavior_weight_abs")
)

POLICY_METRICS: tuple[str, ...] = (
    *(f"{weight}_{kind}" for weight in WEIGHTS for kind in ("mean", "square", "max")),
    "policy/behavior_kl",
    "policy/behavior_kl_k3",
    *(FRESH_GAP_MAX, FRESH_GAP, FRESH_KL),
    *names("tokens"),
    *names(CLIP),
)
APPROXIMATION_METRICS: tuple[str, ...] = (
    "approximation/logprob_abs_max",
    *names("approximation/logprob_abs", "/max"),
    *_APPROXIMATION,
    *(name for family in _APPROXIMATION for name in names(family)),
)


@dataclass(frozen=True)
class TokenRatios:
    """The ratios that the loss worked with, [b, s] each."""

    ratio: Tensor  # r
    weight: Tensor  # b before any cap
    total: Tensor  # w = b r
    log_w: Tensor  # log pi_theta - log pi_behav of the token itself, at whatever level the others are


@torch.no_grad()
def policy_metrics(ratios: TokenRatios, clipped: Tensor, trainable: Tensor, buckets: StalenessBuckets) -> Metrics:
    """Return the totals that every loss reports, named by POLICY_METRICS.

    KL(behaviour, policy) is estimated on tokens that the behaviour policy sampled: -log w has no heavy tail but may be
    negative on average, w - 1 - log w (k3) is never negative. The mismatch between rollout engine and trainer is the
    same k3 on fresh tokens, exact to second order in the gap; it means that in a batch's first step only.
    """
    metrics = {}
    for name, value in zip(WEIGHTS, (ratios.ratio, ratios.weight, ratios.total), strict=True):
        metrics[f"{name}_mean"] = sum_where(trainable, value)
        metrics[f"{name}_square"] = sum_where(trainable, value.double().square())
        metrics[f"{name}_max"] = max_where(trainable, value)
    log_w = ratios.log_w.double()
    k3 = _k3(log_w)
    fresh = BUCKETS.index("d0")
    gap = buckets.maxima(log_w.abs()), buckets.sums(log_w.abs())
    return {
        **metrics,
        "policy/behavior_kl": sum_where(trainable, -log_w),
        "policy/behavior_kl_k3": sum_where(trainable, k3),
        FRESH_GAP_MAX: gap[0][fresh],
        FRESH_GAP: gap[1][fresh],
        FRESH_KL: buckets.sums(k3)[fresh],
        **named("tokens", buckets.counts()),
        **named(CLIP, buckets.sums(clipped)),
    }


@torch.no_grad()
def approximation_metrics(
    logprobs: Tensor, proximal: Tensor, true_proximal: Tensor, behavior: Tensor, buckets: StalenessBuckets
) -> Metrics:
    """Return how far the proximal policy in use is from the one of an extra forward pass, by staleness; [b, s] each.

    Absolute errors of log pi_prox, of r and of b, and both KL divergences as k3 estimates on the sampled tokens, without
    reweighting them to either policy.
    """
    error = (proximal - true_proximal).double()
    values = (
        error.abs(),
        _k3(error),
        _k3(-error),
        (bounded_exp(logprobs - proximal) - bounded_exp(logprobs - true_proximal)).abs(),
        (bounded_exp(proximal - behavior) - bounded_exp(true_proximal - behavior)).abs(),
    )
    largest = buckets.maxima(values[0])
    metrics = {"approximation/logprob_abs_max": largest.max()} | named("approximation/logprob_abs", largest, "/max")
    for family, value in zip(_APPROXIMATION, values, strict=True):
        sums = buckets.sums(value)
        metrics |= {family: sums.sum()} | named(family, sums)
    return metrics


def add_up(totals: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Return the totals of several optimizer steps, which have the same names, as those of one."""
    assert totals, "there is nothing to add up"
    return {name: (max if name.endswith("max") else sum)(step[name] for step in totals) for name in totals[0]}


def figures(totals: Mapping[str, float], num_tokens: int) -> dict[str, float | None]:
    """Return the final figures: means, maxima, token counts, and effective sample sizes as shares of the tokens.

    `num_tokens`: trainable tokens behind the totals. The effective sample size is (sum w)^2 / sum w^2, 1 where all
    weights are alike. None: no token is behind the figure.
    """
    found: dict[str, float | None] = {}
    for name, total in totals.items():
        bucket = name.rpartition("/")[2]
        if name.endswith("max"):
            found[name] = None if total == -math.inf else total
        elif name.startswith("tokens/"):
            found[name] = int(total)
        elif not name.endswith("_square"):
            found[name] = _divided(total, totals[f"tokens/{bucket}"] if bucket in BUCKETS else num_tokens)
    for weight in WEIGHTS:
        if f"{weight}_square" in totals:
            sum_of_squares = totals[f"{weight}_square"] * num_tokens
            found[f"{weight}_ess"] = _divided(totals[f"{weight}_mean"] ** 2, sum_of_squares)
    return found


def _divided(total: float, count: float) -> float | None:
    return total / count if count else None


def _k3(log_ratio: Tensor) -> Tensor:
    """Return e^x - 1 - x, bounded in its exponent, in the digits that x near 0 needs."""
    bounded = log_ratio.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    return bounded.expm1() - bounded
