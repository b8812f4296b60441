"""log pi_prox against numbers worked by hand, and the two properties that the paper builds on."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from a3po_megatron.objective.alpha import InverseAlpha, StepContext
from a3po_megatron.objective.proximal import BehaviorProximal, LogLinearProximal, RecomputedProximal
from tests.unit.objective.test_alpha import SCHEDULES

LOGPROB = st.floats(-30.0, 0.0)
STALENESS = st.integers(-2, 64)


def loglinear(
    behavior: list[float], policy: list[float], staleness: list[int], fresh_anchor: str = "behavior"
) -> Tensor:
    fields = {
        "behavior_logprobs": torch.tensor([behavior], dtype=torch.float64),
        "staleness": torch.tensor([staleness]),
    }
    return LogLinearProximal(InverseAlpha(fresh_anchor))(torch.tensor([policy], dtype=torch.float64), fields)[0]


def test_worked_numbers_for_staleness_0_1_2_4_in_one_response() -> None:
    """behaviour -4, policy -2: d = 2 is halfway, d = 4 is a quarter behaviour and three quarters policy."""
    prox = loglinear([-4.0] * 4, [-2.0] * 4, [0, 1, 2, 4])
    assert prox.tolist() == [-4.0, -4.0, -3.0, -2.5]
    prox = loglinear([-4.0] * 4, [-2.0] * 4, [0, 1, 2, 4], fresh_anchor="target")
    assert prox.tolist() == [-2.0, -4.0, -3.0, -2.5]


@pytest.mark.parametrize("fresh_anchor", ["behavior", "target"])
def test_a_token_newer_than_the_actor_keeps_its_behavior_logprob_exactly(fresh_anchor: str) -> None:
    assert loglinear([-1.1, -0.7], [-3.3, -0.2], [-1, -7], fresh_anchor).tolist() == [-1.1, -0.7]


def test_minus_infinity_on_the_side_that_does_not_count_gives_no_nan() -> None:
    assert loglinear([-1.0], [-math.inf], [1]).tolist() == [-1.0]
    assert loglinear([-math.inf], [-1.0], [0], fresh_anchor="target").tolist() == [-1.0]


def test_no_gradient_flows_through_the_anchor() -> None:
    policy = torch.tensor([[-2.0, -1.0]], requires_grad=True)
    fields = {"behavior_logprobs": torch.tensor([[-3.0, -1.5]]), "staleness": torch.tensor([[3, 0]])}
    for schedule in (*SCHEDULES.values(), InverseAlpha("target")):
        assert not LogLinearProximal(schedule)(policy, fields).requires_grad


def test_the_other_anchors_are_the_fields_themselves() -> None:
    fields = {"behavior_logprobs": torch.tensor([[-3.0]]), "proximal_logprobs": torch.tensor([[-2.0]])}
    policy = torch.tensor([[-1.0]])
    assert BehaviorProximal()(policy, fields) is fields["behavior_logprobs"]
    assert RecomputedProximal()(policy, fields) is fields["proximal_logprobs"]


def test_a_reused_first_forward_is_the_recomputed_policy_of_the_first_step_only() -> None:
    proximal = RecomputedProximal(reuse_first_forward=True)
    fields, policy = {"proximal_logprobs": torch.tensor([[-2.0]])}, torch.tensor([[-1.0]], requires_grad=True)
    first, second = StepContext(0, 2), StepContext(1, 2)
    assert proximal.needs(first) == frozenset()
    assert proximal(policy, {}, first).tolist() == [[-1.0]]
    assert not proximal(policy, {}, first).requires_grad
    assert proximal.needs(second) == {"proximal_logprobs"}
    assert proximal(policy, fields, second).tolist() == [[-2.0]]


@settings(max_examples=300, deadline=None)
@given(
    kind=st.sampled_from(sorted(SCHEDULES)), behavior=LOGPROB, policy=LOGPROB, staleness=STALENESS, j=st.integers(0, 3)
)  # fmt: skip
def test_sandwich_the_anchor_lies_between_behavior_and_policy(
    kind: str, behavior: float, policy: float, staleness: int, j: int
) -> None:
    of = {name: torch.tensor([value], dtype=torch.float64) for name, value in (("b", behavior), ("p", policy))}
    fields = {"behavior_logprobs": of["b"], "staleness": torch.tensor([staleness])}
    prox = LogLinearProximal(SCHEDULES[kind])(of["p"], fields, StepContext(j, 4, 1.7)).item()
    slack = 1e-12 * max(abs(behavior), abs(policy))
    assert min(behavior, policy) - slack <= prox <= max(behavior, policy) + slack


@settings(max_examples=200, deadline=None)
@given(behavior=LOGPROB, policy=LOGPROB, staleness=st.integers(1, 64))
def test_contraction_r_is_the_dth_root_of_w_and_b_times_r_is_w(behavior: float, policy: float, staleness: int) -> None:
    prox = loglinear([behavior], [policy], [staleness]).item()
    log_w = policy - behavior
    assert policy - prox == pytest.approx(log_w / staleness, abs=1e-12)
    assert prox - behavior == pytest.approx(log_w * (1 - 1 / staleness), abs=1e-12)
