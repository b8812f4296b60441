"""The search for the sample that spoils a step."""

from collections.abc import Sequence

import numpy as np
import pytest

from a3po_megatron.actor.nonfinite import blank, find_culprit
from a3po_megatron.batching.packing import TokenSequence


def sequence(number: int, trainable: bool = True, length: int = 2) -> TokenSequence:
    return TokenSequence(np.full(length, number), np.array([False, *[trainable] * (length - 1)]))


def numbers(sequences: Sequence[TokenSequence]) -> list[int]:
    """The sequences that are not blank."""
    return [int(s.tokens[1]) for s in sequences if s.trainable.any()]


@pytest.mark.parametrize("bad", range(7))
def test_the_one_bad_sequence_is_found_in_few_questions_about_steps_of_the_same_shape(bad: int) -> None:
    asked = []

    def is_finite(some: Sequence[TokenSequence]) -> bool:
        assert [len(s.tokens) for s in some] == [2 + i for i in range(7)]
        asked.append(numbers(some))
        return bad not in numbers(some)

    assert find_culprit([sequence(i, length=2 + i) for i in range(7)], is_finite) == bad
    assert len(asked) <= 6


def test_masked_sequences_are_not_suspects_and_a_sum_that_overflows_has_no_culprit() -> None:
    assert find_culprit([sequence(0, False), sequence(1), sequence(2, False)], lambda some: False) == 1
    assert find_culprit([sequence(i) for i in range(8)], lambda some: len(numbers(some)) <= 4) is None
    assert find_culprit([sequence(0, False)], lambda some: False) is None


def test_a_blank_sequence_has_the_shape_of_what_it_stands_for_and_nothing_of_its_values() -> None:
    fields = {"advantages": np.full(3, np.nan, np.float32), "staleness": np.ones(3, np.int32)}
    empty = blank(TokenSequence(np.array([5, 6, 7]), np.array([False, True, True]), fields))
    assert (empty.tokens.tolist(), empty.trainable.any()) == ([0, 0, 0], False)
    assert {name: (values.dtype, values.tolist()) for name, values in empty.fields.items()} == {
        "advantages": (np.float32, [0, 0, 0]),
        "staleness": (np.int32, [0, 0, 0]),
    }
