"""The second-moment mask against a loop that drops one token at a time."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from a3po_megatron.batching.m2po import second_moment_mask
from tests.references.policy_loss import second_moment_kept

DISTINCT = st.lists(st.tuples(st.integers(1, 3000), st.booleans(), st.booleans()), unique_by=lambda item: item[0])


def mask(log_ratio: list[float], advantages: list[float], threshold: float) -> list[bool]:
    return second_moment_mask(np.array(log_ratio, np.float32), np.array(advantages, np.float32), threshold).tolist()


def test_a_hand_worked_batch() -> None:
    """Squares of the outward tokens: .01, .04, .25; their mean .1 is above .04, without the last it is .025."""
    log_ratio, advantages = [0.1, 0.2, 0.5, 0.9, -0.9], [1.0, 1.0, 1.0, -1.0, 1.0]
    assert mask(log_ratio, advantages, 0.04) == [True, True, False, True, True]
    assert mask(log_ratio, advantages, 0.11) == [True] * 5
    assert mask(log_ratio, advantages, 0.005) == [False, False, False, True, True]


@given(tokens=DISTINCT, threshold=st.sampled_from([1e-3, 0.04, 0.5, 3.0]))
def test_it_drops_what_the_loop_drops(tokens: list[tuple[int, bool, bool]], threshold: float) -> None:
    log_ratio = [float(np.float32((size if up else -size) / 1000)) for size, up, _ in tokens]
    advantages = [1.0 if good else -1.0 for _, _, good in tokens]
    assert mask(log_ratio, advantages, threshold) == second_moment_kept(log_ratio, advantages, threshold)


@given(tokens=st.lists(st.tuples(st.sampled_from([-0.6, -0.2, 0.1, 0.6]), st.sampled_from([-1.0, 0.0, 1.0]))))
def test_the_order_of_tokens_does_not_matter_and_the_bound_holds(tokens: list[tuple[float, float]]) -> None:
    log_ratio, advantages = [x for x, _ in tokens], [a for _, a in tokens]
    kept = mask(log_ratio, advantages, 0.04)
    assert mask(log_ratio[::-1], advantages[::-1], 0.04) == kept[::-1]
    outward = [x**2 for (x, a), keep in zip(tokens, kept, strict=True) if keep and x * a > 0]
    assert not outward or sum(outward) / len(outward) <= 0.04 + 1e-9
    assert all(keep for (x, a), keep in zip(tokens, kept, strict=True) if x * a <= 0)


@pytest.mark.parametrize(("log_ratio", "kept"), [([], []), ([5.0], [False]), ([math.inf, 0.1], [False, True])])
def test_no_token_one_token_and_an_infinite_ratio(log_ratio: list[float], kept: list[bool]) -> None:
    assert mask(log_ratio, [1.0] * len(log_ratio), 0.04) == kept


def test_a_nan_is_left_for_the_loss_to_show() -> None:
    assert mask([math.nan, 3.0], [1.0, 1.0], 0.04) == [True, False]
