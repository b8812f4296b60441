"""The search for the sample that spoils a step."""

import numpy as np
import pytest

from a3po_megatron.actor.nonfinite import find_culprit
from a3po_megatron.batching.packing import TokenSequence


def sequence(number: int, trainable: bool = True) -> TokenSequence:
    return TokenSequence(np.array([0, number]), np.array([False, trainable]))


@pytest.mark.parametrize("bad", range(7))
def test_the_one_bad_sequence_is_found_in_few_questions(bad: int) -> None:
    asked = []

    def is_finite(some: list[TokenSequence]) -> bool:
        asked.append(len(some))
        return all(s.tokens[1] != bad for s in some)

    assert find_culprit([sequence(i) for i in range(7)], is_finite) == bad
    assert sum(asked) <= 2 * 7


def test_masked_sequences_are_not_suspects_and_a_sum_that_overflows_has_no_culprit() -> None:
    assert find_culprit([sequence(0, False), sequence(1), sequence(2, False)], lambda some: False) == 1
    assert find_culprit([sequence(i) for i in range(8)], lambda some: len(some) <= 4) is None
    assert find_culprit([sequence(0, False)], lambda some: False) is None
