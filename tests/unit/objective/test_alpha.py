"""alpha(d) of every schedule against numbers worked by hand and a table written apart."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from a3po_megatron.objective.alpha import (
    AdaptiveAlpha,
    AlphaSchedule,
    ConstantAlpha,
    ExponentialAlpha,
    InverseAlpha,
    MinibatchAlpha,
    ShiftedAlpha,
    StepContext,
)
from tests.references.policy_loss import alpha as reference

SCHEDULES = {
    "inverse": InverseAlpha(),
    "constant": ConstantAlpha(0.35),
    "exponential": ExponentialAlpha(0.7),
    "shifted": ShiftedAlpha(),
    "minibatch": MinibatchAlpha(),
    "adaptive": AdaptiveAlpha(),
}


def alphas(schedule: AlphaSchedule, staleness: list[int], context: StepContext | None = None) -> list[float]:
    return schedule(torch.tensor(staleness, dtype=torch.int32), context or StepContext()).tolist()


def test_hand_worked_tables_for_staleness_0_1_2_4() -> None:
    d = [0, 1, 2, 4]
    assert alphas(InverseAlpha(), d) == [1, 1, 0.5, 0.25]
    assert alphas(InverseAlpha("target"), d) == [0, 1, 0.5, 0.25]
    assert alphas(ConstantAlpha(0.35), d) == [0.35] * 4
    assert alphas(ExponentialAlpha(math.log(2)), d) == pytest.approx([1, 0.5, 0.25, 0.0625], abs=1e-15)
    assert alphas(ShiftedAlpha(), d) == [1, 1 / 2, 1 / 3, 1 / 5]
    assert alphas(AdaptiveAlpha(), d, StepContext(strength=2.0)) == [1, 1, 1, 0.5]
    assert alphas(AdaptiveAlpha(), d) == alphas(InverseAlpha(), d)


def test_the_minibatch_schedule_counts_optimizer_steps_of_the_batch() -> None:
    """Four steps a batch: at d = 2 the sampling policy is 8 + j steps away, j of them in this batch."""
    table = [alphas(MinibatchAlpha(), [0, 1, 2], StepContext(j, 4)) for j in range(4)]
    assert table == [[1, 0, 0], [1, 1 / 5, 1 / 9], [1, 2 / 6, 2 / 10], [1, 3 / 7, 3 / 11]]
    assert alphas(MinibatchAlpha(), [2], StepContext(5, 8)) == [5 / 21]  # the second of two epochs goes on counting


def test_alpha_is_per_token_in_a_response_that_was_interrupted_twice() -> None:
    """Versions 5 5 | 6 | 8 at actor version 9."""
    staleness = (9 - torch.tensor([5, 5, 6, 8])).tolist()
    assert alphas(InverseAlpha(), staleness) == [0.25, 0.25, 1 / 3, 1.0]


@settings(max_examples=200, deadline=None)
@given(
    kind=st.sampled_from(sorted(SCHEDULES)), d=st.integers(-3, 64), n=st.integers(1, 16), j=st.integers(0, 15),
    strength=st.floats(0.25, 16),
)  # fmt: skip
def test_every_schedule_equals_its_table_and_is_a_share(kind: str, d: int, n: int, j: int, strength: float) -> None:
    (found,) = alphas(SCHEDULES[kind], [d], StepContext(min(j, n - 1), n, strength))
    expected = reference(kind, d, value=0.35, rate=0.7, strength=strength, j=min(j, n - 1), n=n)
    assert found == pytest.approx(expected, abs=1e-12)
    assert 0 <= found <= 1
