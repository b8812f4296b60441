"""The second-moment mask against a loop that drops one token at a time."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from a3po_megatron.batching.m2po import correction_masks, second_moment_mask
from a3po_megatron.batching.packing import TokenSequence
from tests.references.policy_loss import second_moment_kept

DISTINCT = st.lists(st.tuples(st.integers(1, 3000), st.booleans()), unique_by=lambda item: item[0])


def mask(log_ratio: list[float], threshold: float) -> list[bool]:
    return second_moment_mask(np.array(log_ratio, np.float32), threshold).tolist()


def test_a_hand_worked_batch() -> None:
    """Squares .01, .04, .25: their mean .1 is above .04, without the last it is .025."""
    assert mask([0.1, -0.2, 0.5], 0.04) == [True, True, False]
    assert mask([0.1, -0.2, 0.5], 0.11) == [True] * 3
    assert mask([0.1, -0.2, 0.5], 0.005) == [False] * 3
    assert mask([0.5, -0.5, 1.0], 0.25) == [True, True, False]  # at most the threshold: these squares have no rounding
    assert mask([0.5, 0.0, 1.0], 0.0) == [False, True, False]


@given(tokens=DISTINCT, threshold=st.sampled_from([1e-3, 0.04, 0.5, 3.0]))
def test_it_drops_what_the_loop_drops(tokens: list[tuple[int, bool]], threshold: float) -> None:
    log_ratio = [float(np.float32((size if up else -size) / 1000)) for size, up in tokens]
    assert mask(log_ratio, threshold) == second_moment_kept(log_ratio, threshold)


@given(log_ratio=st.lists(st.sampled_from([-0.6, -0.2, 0.1, 0.6])))
def test_the_order_of_tokens_does_not_matter_and_the_bound_holds(log_ratio: list[float]) -> None:
    kept = mask(log_ratio, 0.04)
    assert mask(log_ratio[::-1], 0.04) == kept[::-1]
    squares = [x**2 for x, keep in zip(log_ratio, kept, strict=True) if keep]
    assert not squares or sum(squares) / len(squares) <= 0.04 + 1e-9


def test_rounding_of_fresh_tokens_does_not_change_the_mask() -> None:
    up, down = [1e-7] * 9 + [0.3, 0.5], [-1e-7] * 9 + [0.3, 0.5]
    assert mask(up, 0.02) == mask(down, 0.02) == [True] * 10 + [False]


@pytest.mark.parametrize(("log_ratio", "kept"), [([], []), ([5.0], [False]), ([math.inf, 0.1], [False, True])])
def test_no_token_one_token_and_an_infinite_ratio(log_ratio: list[float], kept: list[bool]) -> None:
    assert mask(log_ratio, 0.04) == kept


def test_a_nan_is_left_for_the_loss_to_show() -> None:
    assert mask([math.nan, 3.0], 0.04) == [True, False]


def test_a_batch_is_judged_as_a_whole_and_only_by_its_trainable_tokens() -> None:
    def sequence(trainable: list[bool], behavior: list[float]) -> TokenSequence:
        fields = {"behavior_logprobs": np.array(behavior, np.float32)}
        return TokenSequence(np.zeros(len(trainable), np.int64), np.array(trainable), fields)

    sequences = [sequence([False, True, True], [9, 0, 0.5]), sequence([False, True], [9, 0.1])]
    first, second = correction_masks(sequences, np.zeros(5), threshold=0.04)
    assert first.tolist() == [True, True, False]
    assert second.tolist() == [True, True]
