"""The decoupled loss: its equations, the gradient identity, clip bands, and masks. Everything in float64 to 1e-10."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from a3po_megatron.objective.alpha import InverseAlpha, StepContext
from a3po_megatron.objective.corrections import BehaviorWeight
from a3po_megatron.objective.policy_loss import PolicyLoss
from a3po_megatron.objective.proximal import BehaviorProximal, LogLinearProximal, Proximal, RecomputedProximal
from a3po_megatron.objective.surrogate import CispoSurrogate, ClippedSurrogate
from tests.references import policy_loss as reference
from tests.unit.objective.cases import assert_close, gradients, random_case
from tests.unit.objective.test_alpha import SCHEDULES

UNCLIPPED = ClippedSurrogate(clip_low=1.0, clip_high=math.inf)
ANCHORS: dict[str, Proximal] = {
    **{name: LogLinearProximal(schedule) for name, schedule in SCHEDULES.items()},
    "inverse, fresh target": LogLinearProximal(InverseAlpha("target")),
    "recompute": RecomputedProximal(),
    "behavior": BehaviorProximal(),
}
EVERY_ANCHOR = pytest.mark.parametrize("anchor", ANCHORS.values(), ids=ANCHORS.keys())
STEP = StepContext(index=2, num_steps=4, strength=1.7)
ONE = torch.ones(1, 1, dtype=torch.bool)


def single(log_w: float, d: int, advantage: float) -> tuple[Tensor, dict[str, Tensor]]:
    """Return one token's log-prob, a leaf, and its fields."""
    policy = torch.tensor([[log_w]], dtype=torch.float64, requires_grad=True)
    return policy, {
        "behavior_logprobs": torch.zeros(1, 1, dtype=torch.float64),
        "advantages": torch.tensor([[advantage]], dtype=torch.float64),
        "staleness": torch.tensor([[d]]),
    }


@EVERY_ANCHOR
@pytest.mark.parametrize("cap", [0.0, 1.2])
def test_loss_and_gradient_equal_the_equation_token_by_token(anchor: Proximal, cap: float) -> None:
    loss = PolicyLoss(anchor, ClippedSurrogate(0.2, 0.28), BehaviorWeight(cap), context=STEP)
    for seed in range(5):
        case = random_case(seed)
        proximal = anchor(case.logprobs, case.fields, STEP)
        losses = [reference.decoupled(s, 0.2, 0.28, cap or math.inf) for s in case.responses(proximal)]
        expected = reference.aggregated(losses, "token", 0)
        assert_close(
            case.value_and_gradients(loss), (expected.detach(), *gradients(expected, case.logprobs, case.entropy))
        )


@EVERY_ANCHOR
@pytest.mark.parametrize("surrogate", [UNCLIPPED, CispoSurrogate(1.0, math.inf)], ids=["ppo", "cispo"])
def test_unclipped_and_uncapped_the_gradient_is_w_a_grad_log_pi_whatever_the_anchor(
    anchor: Proximal, surrogate: ClippedSurrogate | CispoSurrogate
) -> None:
    """Of a softmax policy's parameters."""
    case = random_case(3)
    size = case.logprobs.shape[1]
    logits = torch.randn(
        1, size, 7, generator=torch.Generator().manual_seed(1), dtype=torch.float64, requires_grad=True
    )
    logprobs = logits.log_softmax(-1)[..., 3]
    total, _ = PolicyLoss(anchor, surrogate, context=STEP)(logprobs, case.trainable, case.fields)
    (gradient,) = torch.autograd.grad(total, logits, retain_graph=True)

    w = (logprobs - case.fields["behavior_logprobs"]).exp().detach()
    weighted = torch.where(case.trainable, w * case.fields["advantages"], 0.0)
    (expected,) = torch.autograd.grad(-(weighted * logprobs).sum(), logits)
    assert_close((gradient,), (expected,))


def test_without_the_behavior_weight_it_would_be_another_algorithm() -> None:
    """The gradient with d = 4 is w, not w**(1/4): b is part of it."""
    policy, fields = single(2.0, d=4, advantage=1.0)
    total, _ = PolicyLoss(LogLinearProximal(), UNCLIPPED)(policy, ONE, fields)
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
    policy, fields = single(log_w, staleness, 1.0 if positive else -1.0)
    total, metrics = PolicyLoss(LogLinearProximal())(policy, ONE, fields)
    total.backward()
    clipped = log_w > high if positive else log_w < low
    assert (policy.grad.item() == 0) == clipped
    assert metrics["policy/clip_fraction"].item() == clipped


def test_the_cap_binds_where_w_is_above_cap_to_the_power_of_d_over_d_minus_1() -> None:
    """d = 2, cap 5: from w = 25 on; and the metrics are of the weights before the cap."""
    loss = PolicyLoss(LogLinearProximal(), UNCLIPPED, BehaviorWeight(5.0))
    for w, weight in ((24.0, 24.0**0.5), (36.0, 5.0)):
        policy, fields = single(math.log(w), d=2, advantage=1.0)
        total, metrics = loss(policy, ONE, fields)
        assert -total.item() == pytest.approx(weight * w**0.5)
        assert metrics["policy/behavior_weight_max"].item() == pytest.approx(w**0.5)


def test_hand_worked_losses_for_staleness_0_1_2_4_in_one_response() -> None:
    """w = 1.44, A = 1: d = 0 and 1 clip w at 1.2; d = 2 has r = b = 1.2, nothing clipped; d = 4 has r = 1.44^(1/4)."""
    policy = torch.full((1, 4), math.log(1.44), dtype=torch.float64)
    fields = {
        "behavior_logprobs": torch.zeros(1, 4).double(), "advantages": torch.ones(1, 4).double(),
        "staleness": torch.tensor([[0, 1, 2, 4]]),
    }  # fmt: skip
    for t, expected in enumerate((1.2, 1.2, 1.44, 1.44)):
        mask = torch.zeros(1, 4, dtype=torch.bool)
        mask[0, t] = True
        total, _ = PolicyLoss(LogLinearProximal())(policy, mask, fields)
        assert -total.item() == pytest.approx(expected, abs=1e-12)
    total, metrics = PolicyLoss(LogLinearProximal())(policy, torch.ones(1, 4, dtype=torch.bool), fields)
    assert -total.item() == pytest.approx(2 * 1.2 + 2 * 1.44, abs=1e-12)
    assert metrics["policy/clip_fraction"].item() == 2


@EVERY_ANCHOR
def test_masked_positions_give_neither_loss_nor_gradient_nor_nan_whatever_is_in_them(anchor: Proximal) -> None:
    """The cases hold NaN and infinities there; with zeros in their place nothing changes."""
    case, loss = random_case(0), PolicyLoss(anchor, context=STEP)
    found = case.value_and_gradients(loss)
    assert all(value.isfinite().all() for value in found)
    assert (found[1][~case.trainable] == 0).all()
    for name, values in case.fields.items():
        case.fields[name] = torch.where(case.trainable, values, torch.zeros_like(values))
    assert all(torch.equal(one, other) for one, other in zip(found, case.value_and_gradients(loss), strict=True))
    spoilt = torch.where(case.trainable, case.logprobs.detach(), torch.nan).requires_grad_()
    total, _ = loss(spoilt, case.trainable, case.fields)
    assert torch.equal(total, found[0])
    assert torch.equal(gradients(total, spoilt)[0], found[1])


def test_an_all_masked_microbatch_is_zero_and_has_no_maximum() -> None:
    case = random_case(0)
    total, metrics = PolicyLoss(LogLinearProximal())(case.logprobs, torch.zeros_like(case.trainable), case.fields)
    assert total.item() == 0
    assert (gradients(total, case.logprobs)[0] == 0).all()
    assert metrics["policy/ratio_max"].item() == -math.inf
    assert metrics["policy/behavior_weight_mean"].item() == 0


def test_a_hopeless_ratio_is_bounded_and_a_nan_is_not_hidden() -> None:
    for log_w in (600.0, -600.0):
        for d in (1, 2, 64):
            policy, fields = single(log_w, d, advantage=-1.0)
            total, metrics = PolicyLoss(LogLinearProximal())(policy, ONE, fields)
            total.backward()
            assert total.isfinite()
            assert policy.grad.isfinite().all()
            assert all(value.isfinite() for name, value in metrics.items() if "fresh" not in name)
    for name in ("behavior_logprobs", "advantages"):
        policy, fields = single(0.1, 1, 1.0)
        fields[name] = torch.full((1, 1), torch.nan)
        assert PolicyLoss(LogLinearProximal())(policy, ONE, fields)[0].isnan()
    policy, fields = single(math.nan, 1, 1.0)
    assert PolicyLoss(LogLinearProximal())(policy, ONE, fields)[0].isnan()


def test_a_token_that_the_behavior_policy_calls_impossible_stops_the_step_or_is_bounded_but_never_vanishes() -> None:
    policy, fields = single(-0.1, 1, 1.0)
    fields["behavior_logprobs"] = torch.full((1, 1), -math.inf, dtype=torch.float64)
    assert PolicyLoss(LogLinearProximal(), UNCLIPPED)(policy, ONE, fields)[0] != 0


def test_tokens_newer_than_the_actor_are_trained_as_plain_ppo() -> None:
    policy, fields = single(math.log(1.1), -3, 1.0)
    total, _ = PolicyLoss(LogLinearProximal())(policy, ONE, fields)
    assert -total.item() == pytest.approx(1.1, abs=1e-12)
