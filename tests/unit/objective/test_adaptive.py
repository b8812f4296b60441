"""The steering of alpha: direction, bounds, and that it arrives."""

import math
from dataclasses import asdict

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from a3po_megatron.objective.adaptive import AdaptiveControl, AdaptiveState
from a3po_megatron.objective.alpha import AdaptiveAlpha, StepContext
from a3po_megatron.objective.metrics import figures
from a3po_megatron.objective.policy_loss import PolicyLoss
from a3po_megatron.objective.proximal import LogLinearProximal
from tests.unit.objective.cases import random_case


def test_hand_worked_moves() -> None:
    clip = AdaptiveControl("clip_fraction", target=0.1, gain=0.5)
    assert clip.next(AdaptiveState(2.0), 0.1).strength == 2.0
    assert clip.next(AdaptiveState(2.0), 0.15).strength == pytest.approx(2 * math.exp(-0.25))  # too much clipping
    assert clip.next(AdaptiveState(2.0), 9.0).strength == pytest.approx(2 * math.exp(-0.5))  # at most e^gain
    assert clip.next(AdaptiveState(2.0), 0.0).strength == pytest.approx(2 * math.exp(0.5))
    kl = AdaptiveControl("behavior_kl", target=0.1, gain=0.5)
    assert kl.next(AdaptiveState(2.0), 0.15).strength == pytest.approx(2 * math.exp(0.25))  # too far from behaviour
    assert kl.next(AdaptiveState(2.0), -0.01).strength == pytest.approx(2 * math.exp(-0.5))


@pytest.mark.parametrize("measured", [None, math.nan, math.inf])
def test_what_is_no_measurement_moves_nothing(measured: float | None) -> None:
    assert AdaptiveControl().next(AdaptiveState(3.0), measured) == AdaptiveState(3.0)


@settings(max_examples=100, deadline=None)
@given(measurements=st.lists(st.floats(-1, 10), max_size=40))
def test_the_strength_stays_within_its_bounds(measurements: list[float]) -> None:
    control, state = AdaptiveControl(min_strength=0.5, max_strength=4.0), AdaptiveState()
    for measured in measurements:
        state = control.next(state, measured)
        assert 0.5 <= state.strength <= 4.0


def test_the_state_is_a_plain_value() -> None:
    assert AdaptiveState(**asdict(AdaptiveState(1.5))) == AdaptiveState(1.5)


def test_the_clip_fraction_of_a_loss_is_steered_to_its_target() -> None:
    """Log-probs stand still here, so the clip fraction is a rising staircase in the strength: it ends within a step of it."""
    case, control, state = random_case(2, lengths=(400,), spread=0.3), AdaptiveControl(target=0.25), AdaptiveState()
    num_tokens = int(case.trainable.sum())

    def clip_fraction(strength: float) -> float:
        loss = PolicyLoss(LogLinearProximal(AdaptiveAlpha())).at(StepContext(strength=strength))
        totals = {name: value.item() for name, value in case.call(loss)[1].items()}
        found = figures(totals, num_tokens)[control.figure]
        assert found is not None
        return found

    steps = [clip_fraction(strength) for strength in torch.linspace(0.3, 12, 20).tolist()]
    assert steps == sorted(steps)
    for _ in range(150):
        state = control.next(state, clip_fraction(state.strength))
    assert clip_fraction(state.strength) == pytest.approx(0.25, abs=0.01)
