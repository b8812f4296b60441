"""The objective's options as they stand in their papers: slow, scalar by scalar, in float64, one function an option.

Written from the equations, not from the code that they check. Every function takes one response, whose tensors [n] are its
trainable tokens only, and returns the losses of its tokens, a list of scalars with gradient.
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass
class Response:
    """One response's trainable tokens, float64 [n] each but `d`."""

    logp: Tensor  # log pi_theta, with gradient
    behav: Tensor
    prox: Tensor  # of whatever proximal policy is meant; no gradient
    ref: Tensor
    adv: Tensor
    entropy: Tensor  # with gradient
    d: list[int]


def tokens(s: Response) -> range:
    return range(len(s.logp))


def constant(value: float) -> Tensor:
    return torch.tensor(value, dtype=torch.float64)


def clipped_value(r: Tensor, a: float, low: float, high: float) -> Tensor:
    inside = r if 1 - low <= r <= 1 + high else constant(1 - low if r < 1 else 1 + high)
    return r * a if r * a <= inside * a else inside * a


def b(s: Response, t: int) -> float:
    return math.exp(s.prox[t].item() - s.behav[t].item())


def w(s: Response, t: int) -> float:
    return math.exp(s.logp[t].item() - s.behav[t].item())


def r(s: Response, t: int) -> Tensor:
    return torch.exp(s.logp[t] - s.prox[t])


def sequence_b(s: Response) -> float:
    return math.prod(b(s, t) for t in tokens(s)) ** (1 / len(s.logp))


def decoupled(s: Response, low: float = 0.2, high: float = 0.2, cap: float = math.inf) -> list[Tensor]:
    return [-min(b(s, t), cap) * clipped_value(r(s, t), s.adv[t].item(), low, high) for t in tokens(s)]


def dual_clip(s: Response, c: float) -> list[Tensor]:
    losses = []
    for t in tokens(s):
        a = s.adv[t].item()
        value = clipped_value(r(s, t), a, 0.2, 0.2)
        if a < 0 and value < c * a:
            value = constant(c * a)
        losses.append(-b(s, t) * value)
    return losses


def behavior_masked(s: Response, cap: float) -> list[Tensor]:
    return [0 * s.logp[t] if b(s, t) > cap else loss for t, loss in enumerate(decoupled(s))]


def behavior_sequence(s: Response, cap: float, mode: str) -> list[Tensor]:
    weight = sequence_b(s)
    if mode == "mask" and weight > cap:
        return [0 * s.logp[t] for t in tokens(s)]
    return [-min(weight, cap) * clipped_value(r(s, t), s.adv[t].item(), 0.2, 0.2) for t in tokens(s)]


def total_truncated(s: Response, c: float, cap: float) -> list[Tensor]:
    """The factor of A grad log pi, b r, is brought down to c; the surrogate's clip stays as it is."""
    losses = []
    for t in tokens(s):
        weight = min(b(s, t), cap)
        if weight * r(s, t).item() > c:
            weight = c / r(s, t).item()
        losses.append(-weight * clipped_value(r(s, t), s.adv[t].item(), 0.2, 0.2))
    return losses


def total_masked(s: Response, c: float) -> list[Tensor]:
    return [loss if 1 / c <= w(s, t) <= c else 0 * s.logp[t] for t, loss in enumerate(decoupled(s))]


def both_masked(s: Response, cap: float, c: float) -> list[Tensor]:
    return [0 * s.logp[t] if b(s, t) > cap else loss for t, loss in enumerate(total_masked(s, c))]


def gspo(s: Response, low: float, high: float, cap: float = math.inf) -> list[Tensor]:
    ratio = torch.exp((s.logp - s.prox).sum() / len(s.logp))
    return [-min(sequence_b(s), cap) * clipped_value(ratio, s.adv[t].item(), low, high) for t in tokens(s)]


def cispo(s: Response, low: float, high: float) -> list[Tensor]:
    return [-min(max(w(s, t), 1 - low), 1 + high) * s.adv[t].item() * s.logp[t] for t in tokens(s)]


def reference_kl(s: Response, estimator: str, coefficient: float) -> list[Tensor]:
    losses = []
    for t, loss in enumerate(decoupled(s)):
        x = s.logp[t] - s.ref[t]
        kl = {"k1": x, "k2": x * x / 2, "k3": 1 / torch.exp(x) - 1 + x}[estimator]
        losses.append(loss + coefficient * kl)
    return losses


def behavior_kl(s: Response, beta: float, clamp: float) -> list[Tensor]:
    losses = []
    for t, loss in enumerate(decoupled(s)):
        log_w = s.logp[t] - s.behav[t]
        penalty = log_w**2 if abs(log_w) <= clamp else constant(clamp**2)
        losses.append(loss + beta / 2 * penalty)
    return losses


def entropy_bonus(s: Response, coefficient: float) -> list[Tensor]:
    return [loss - coefficient * s.entropy[t] for t, loss in enumerate(decoupled(s))]


def aggregated(responses: list[list[Tensor]], kind: str, length: int) -> Tensor:
    """The sum before it is divided by tokens or sequences."""
    total = constant(0.0)
    for losses in responses:
        for loss in losses:
            total = total + loss / {"token": 1, "sequence": len(losses), "fixed_length": length}[kind]
    return total


def second_moment_kept(log_ratio: list[float], threshold: float) -> list[bool]:
    """Drop the largest token until the mean square of the others is small enough."""
    kept = [True] * len(log_ratio)
    while True:
        there = [i for i in range(len(kept)) if kept[i]]
        if not there or sum(log_ratio[i] ** 2 for i in there) / len(there) <= threshold:
            return kept
        kept[max(there, key=lambda i: abs(log_ratio[i]))] = False


def alpha(kind: str, d: int, *, value: float, rate: float, strength: float, j: int, n: int) -> float:
    """Every schedule's table, d >= 0 and d < 0."""
    if d < 0:
        return 1.0
    if kind == "constant":
        return value
    if d == 0:
        return 1.0
    return {
        "inverse": 1 / d,
        "exponential": math.exp(-rate * d),
        "shifted": 1 / (1 + d),
        "minibatch": j / (d * n + j),
        "adaptive": min(1.0, strength / d),
    }[kind]
