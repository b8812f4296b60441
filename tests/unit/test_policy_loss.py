"""The decoupled clipped surrogate against a slow loop in float64, the gradient identity, clip bands, and masks."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from a3po_megatron.objective.policy_loss import PolicyLoss
from a3po_megatron.objective.proximal import BehaviorProximal, LogLinearProximal, Proximal, RecomputedProximal

UNCLIPPED = {"clip_low": 1.0, "clip_high": math.inf}
ANCHORS = {
    "loglinear": LogLinearProximal(),
    "loglinear, fresh target": LogLinearProximal("target"),
    "recompute": RecomputedProximal(),
    "behavior": BehaviorProximal(),
}
EVERY_ANCHOR = pytest.mark.parametrize("anchor", ANCHORS.values(), ids=ANCHORS.keys())


def random_fields(seed: int, tokens: int = 40) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    """Return policy log-probs, mask and fields [1, tokens] in float64, ratios well beyond the clip range."""
    draw = torch.Generator().manual_seed(seed)
    policy = -3 * torch.rand(1, tokens, generator=draw, dtype=torch.float64)
    near = lambda: policy + 0.5 * torch.randn(1, tokens, generator=draw, dtype=torch.float64)  # noqa: E731
    fields = {
        "behavior_logprobs": near(),
        "proximal_logprobs": near(),
        "advantages": torch.randn(1, tokens, generator=draw, dtype=torch.float64),
        "staleness": torch.randint(-1, 6, (1, tokens), generator=draw),
    }
    return policy, torch.rand(1, tokens, generator=draw) < 0.8, fields


def slow_reference(
    policy: Tensor, trainable: Tensor, fields: dict[str, Tensor], proximal: Tensor, loss: PolicyLoss
) -> tuple:
    """Return loss, clipped tokens, largest r, largest b and sum of b, one token at a time."""
    total, clipped, ratios, weights = 0.0, 0, [], []
    for t in range(policy.shape[1]):
        if not trainable[0, t]:
            continue
        r = math.exp(policy[0, t] - proximal[0, t])
        b = math.exp(proximal[0, t] - fields["behavior_logprobs"][0, t])
        a = float(fields["advantages"][0, t])
        free, bound = r * a, min(max(r, 1 - loss.clip_low), 1 + loss.clip_high) * a
        total -= (min(b, loss.behavior_weight_cap) if loss.behavior_weight_cap else b) * min(free, bound)
        clipped += bound < free
        ratios.append(r)
        weights.append(b)
    return total, clipped, max(ratios), max(weights), sum(weights)


@EVERY_ANCHOR
@pytest.mark.parametrize("cap", [0.0, 1.2])
def test_loss_and_metrics_equal_a_loop_over_tokens(anchor: Proximal, cap: float) -> None:
    loss = PolicyLoss(anchor, clip_low=0.2, clip_high=0.28, behavior_weight_cap=cap)
    for seed in range(5):
        policy, trainable, fields = random_fields(seed)
        total, metrics = loss(policy, trainable, fields)
        expected = slow_reference(policy, trainable, fields, anchor(policy, fields), loss)
        found = [
            metrics[f"policy/{name}"]
            for name in ("clip_fraction", "ratio_max", "behavior_weight_max", "behavior_weight_mean")
        ]
        assert [total.item(), *(value.item() for value in found)] == pytest.approx(expected, abs=1e-12)
        assert tuple(metrics) == loss.metric_names


@EVERY_ANCHOR
def test_unclipped_and_uncapped_the_gradient_is_w_a_grad_log_pi_whatever_the_anchor(anchor: Proximal) -> None:
    """Of a softmax policy's parameters, in float64."""
    _, trainable, fields = random_fields(3)
    logits = torch.randn(1, 40, 7, generator=torch.Generator().manual_seed(1), dtype=torch.float64, requires_grad=True)
    tokens = torch.arange(40).remainder(7)[None, :, None]
    logprobs = logits.log_softmax(-1).gather(-1, tokens)[..., 0]
    total, _ = PolicyLoss(anchor, **UNCLIPPED)(logprobs, trainable, fields)
    (gradient,) = torch.autograd.grad(total, logits, retain_graph=True)

    w = (logprobs - fields["behavior_logprobs"]).exp().detach()
    weighted = torch.where(trainable, w * fields["advantages"], 0.0)
    (expected,) = torch.autograd.grad(-(weighted * logprobs).sum(), logits)
    torch.testing.assert_close(gradient, expected, atol=1e-10, rtol=0)


def test_without_the_behavior_weight_it_would_be_another_algorithm() -> None:
    """The gradient with d = 4 is w, not w**(1/4): b is part of it."""
    policy = torch.tensor([[-1.0]], dtype=torch.float64, requires_grad=True)
    fields = {
        "behavior_logprobs": torch.tensor([[-3.0]]).double(),
        "advantages": torch.ones(1, 1).double(),
        "staleness": torch.tensor([[4]]),
    }
    total, _ = PolicyLoss(LogLinearProximal(), **UNCLIPPED)(policy, torch.ones(1, 1, dtype=torch.bool), fields)
    total.backward()
    assert -policy.grad.item() == pytest.approx(math.exp(2.0), abs=1e-10)


@settings(max_examples=200, deadline=None)
@given(log_w=st.floats(-3, 3), staleness=st.integers(1, 8), positive=st.booleans())
def test_the_clip_band_in_w_is_one_plus_minus_eps_to_the_power_of_d(
    log_w: float, staleness: int, positive: bool
) -> None:
    low, high = staleness * math.log(0.8), staleness * math.log(1.2)
    if min(abs(log_w - low), abs(log_w - high)) < 1e-9:
        return
    policy = torch.tensor([[log_w]], dtype=torch.float64, requires_grad=True)
    fields = {
        "behavior_logprobs": torch.zeros(1, 1).double(),
        "advantages": torch.tensor([[1.0 if positive else -1.0]]).double(),
        "staleness": torch.tensor([[staleness]]),
    }
    total, metrics = PolicyLoss(LogLinearProximal())(policy, torch.ones(1, 1, dtype=torch.bool), fields)
    total.backward()
    clipped = log_w > high if positive else log_w < low
    assert (policy.grad.item() == 0) == clipped
    assert metrics["policy/clip_fraction"].item() == clipped


def test_the_cap_binds_where_w_is_above_cap_to_the_power_of_d_over_d_minus_1() -> None:
    """d = 2, cap 5: from w = 25 on; and the metrics are of the weights before the cap."""
    loss = PolicyLoss(LogLinearProximal(), behavior_weight_cap=5.0, **UNCLIPPED)
    for w, weight in ((24.0, 24.0**0.5), (36.0, 5.0)):
        policy = torch.tensor([[0.0]], dtype=torch.float64)
        fields = {
            "behavior_logprobs": policy - math.log(w),
            "advantages": torch.ones(1, 1).double(),
            "staleness": torch.tensor([[2]]),
        }
        total, metrics = loss(policy, torch.ones(1, 1, dtype=torch.bool), fields)
        assert -total.item() == pytest.approx(weight * w**0.5)
        assert metrics["policy/behavior_weight_max"].item() == pytest.approx(w**0.5)


def test_masked_positions_give_neither_loss_nor_gradient_nor_nan_whatever_is_in_them() -> None:
    policy, trainable, fields = random_fields(0)
    clean, expected = PolicyLoss(LogLinearProximal())(policy, trainable, fields)
    spoilt = {name: values.clone() for name, values in fields.items()}
    for name, value in (("behavior_logprobs", -math.inf), ("advantages", math.nan)):
        spoilt[name][~trainable] = value
    leaf = torch.where(trainable, policy, -1e30).requires_grad_()
    total, metrics = PolicyLoss(LogLinearProximal())(leaf, trainable, spoilt)
    total.backward()
    assert total.item() == clean.item()
    assert {name: value.item() for name, value in metrics.items()} == {n: v.item() for n, v in expected.items()}
    assert leaf.grad.isfinite().all()
    assert (leaf.grad[~trainable] == 0).all()


def test_an_all_masked_microbatch_is_zero_and_has_no_maximum() -> None:
    policy, trainable, fields = random_fields(0)
    total, metrics = PolicyLoss(LogLinearProximal())(policy.requires_grad_(), torch.zeros_like(trainable), fields)
    total.backward()
    assert total.item() == 0
    assert metrics["policy/ratio_max"].item() == -math.inf
    assert metrics["policy/behavior_weight_mean"].item() == 0


def test_the_fresh_gap_is_of_trainable_tokens_of_staleness_0_only() -> None:
    policy = torch.tensor([[-1.0, -1.0, -1.0]])
    fields = {
        "behavior_logprobs": torch.tensor([[-1.25, -3.0, -5.0]]),
        "advantages": torch.ones(1, 3),
        "staleness": torch.tensor([[0, 1, 0]]),
    }
    _, metrics = PolicyLoss(LogLinearProximal())(policy, torch.tensor([[True, True, False]]), fields)
    assert metrics["policy/fresh_logprob_gap_max"].item() == 0.25


def test_a_hopeless_ratio_is_bounded_and_a_nan_is_not_hidden() -> None:
    fields = {
        "behavior_logprobs": torch.tensor([[-500.0]]),
        "advantages": torch.tensor([[-1.0]]),
        "staleness": torch.tensor([[1]]),
    }
    one = torch.ones(1, 1, dtype=torch.bool)
    total, _ = PolicyLoss(LogLinearProximal())(torch.tensor([[-0.1]]), one, fields)
    assert total.isfinite()
    total, _ = PolicyLoss(LogLinearProximal())(torch.tensor([[math.nan]]), one, fields)
    assert total.isnan()
