"""The share of choices that differ, by hand."""

import numpy as np
import pytest

from a3po_megatron.actor.routing import routing_mismatch


def chosen(*experts: tuple[int, int]) -> np.ndarray:
    """One layer of four experts: bool [tokens, 1, 4]."""
    routing = np.zeros((len(experts), 1, 4), np.bool_)
    for token, of_token in enumerate(experts):
        routing[token, 0, list(of_token)] = True
    return routing


def test_one_of_six_choices_differs() -> None:
    one = {0: chosen((0, 1), (2, 3)), 5: chosen((1, 2))}
    other = {0: chosen((1, 0), (2, 3)), 5: chosen((1, 3))}
    assert routing_mismatch(one, one) == 0
    assert routing_mismatch(one, other) == routing_mismatch(other, one) == pytest.approx(1 / 6)


def test_choices_that_all_differ_are_the_whole() -> None:
    assert routing_mismatch({0: chosen((0, 1))}, {0: chosen((2, 3))}) == 1


def test_other_sequences_are_not_compared() -> None:
    with pytest.raises(ValueError, match=r"sequences \[0\] are compared with sequences \[1\]"):
        routing_mismatch({0: chosen((0, 1))}, {1: chosen((0, 1))})
