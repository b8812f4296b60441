"""Invariants of packing, for any sequences and layout."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from a3po_megatron.batching.balance import SequenceCost
from a3po_megatron.batching.packing import TokenSequence, context_places, make_microbatches
from a3po_megatron.errors import UserError


def sequence(tokens: list[int], first_trainable: int = 1) -> TokenSequence:
    ids = np.array(tokens, np.int64)
    return TokenSequence(ids, np.arange(len(ids)) >= first_trainable, {"value": ids.astype(np.float32) / 10})


def test_the_shift_of_a_hand_made_example() -> None:
    (microbatch,) = make_microbatches(
        [sequence([7, 8, 9]), sequence([4, 5])], dp_rank=0, dp_size=1, max_tokens=8, multiple_of=4
    )
    assert microbatch.tokens.tolist() == [[7, 8, 9, 4, 5, 0, 0, 0]]
    assert microbatch.labels.tolist() == [[8, 9, 0, 5, 0, 0, 0, 0]]
    assert microbatch.trainable.tolist() == [[True, True, False, True, False, False, False, False]]
    assert np.allclose(microbatch.fields["value"], [[0.8, 0.9, 0, 0.5, 0, 0, 0, 0]])
    assert microbatch.positions.tolist() == [[0, 1, 2, 0, 1, 0, 1, 2]]
    assert microbatch.fields["sequence"].tolist() == [[0, 0, 0, 1, 1, 0, 0, 0]]
    assert microbatch.cu_seqlens is not None
    assert microbatch.cu_seqlens.tolist() == [0, 3, 5, 8]


def test_padded_rows_of_a_hand_made_example() -> None:
    (microbatch,) = make_microbatches(
        [sequence([7, 8, 9]), sequence([4, 5])], dp_rank=0, dp_size=1, max_tokens=8, packed=False
    )
    assert microbatch.tokens.tolist() == [[7, 8, 9], [4, 5, 0]]
    assert microbatch.labels.tolist() == [[8, 9, 0], [5, 0, 0]]
    assert microbatch.trainable.tolist() == [[True, True, False], [True, False, False]]
    assert microbatch.fields["sequence"].tolist() == [[0, 0, 0], [1, 1, 0]]
    assert microbatch.cu_seqlens is None


def test_two_context_parallel_ranks_share_a_hand_made_example() -> None:
    """Sequences are padded to 4 chunks; rank 0 holds the first and the last chunk of each, rank 1 those between."""
    sequences = [sequence([1, 2, 3, 4, 5, 6, 7]), sequence([11, 12, 13], first_trainable=2)]
    parts = [
        make_microbatches(sequences, dp_rank=0, dp_size=1, max_tokens=16, multiple_of=2, cp_rank=rank, cp_size=2)[0]
        for rank in range(2)
    ]
    assert parts[0].tokens.tolist() == [[1, 2, 7, 0, 11, 0, 0, 0]]
    assert parts[1].tokens.tolist() == [[3, 4, 5, 6, 12, 13, 0, 0]]
    assert parts[0].labels.tolist() == [[2, 3, 0, 0, 12, 0, 0, 0]]
    assert parts[1].labels.tolist() == [[4, 5, 6, 7, 13, 0, 0, 0]]
    assert parts[0].positions.tolist() == [[0, 1, 6, 7, 0, 3, 0, 3]]
    assert parts[1].positions.tolist() == [[2, 3, 4, 5, 1, 2, 1, 2]]
    assert [part.num_tokens for part in parts] == [2, 5]
    assert [part.num_sequences for part in parts] == [2, 0]
    for part in parts:
        assert part.cu_seqlens is not None
        assert part.cu_seqlens.tolist() == [0, 8, 12, 16]
    whole = parts[0].by_sequence(parts[0].join([part.labels for part in parts]))
    assert {index: labels.tolist() for index, labels in whole.items()} == {0: [2, 3, 4, 5, 6, 7], 1: [12, 13]}


@given(sizes=st.lists(st.integers(1, 5), min_size=1, max_size=6), cp_size=st.integers(1, 4))
def test_context_parallel_ranks_hold_each_position_once_and_equal_causal_work(sizes: list[int], cp_size: int) -> None:
    boundaries = np.cumsum([0, *sizes]) * 2 * cp_size
    places = [context_places(boundaries, rank, cp_size) for rank in range(cp_size)]
    assert sorted(np.concatenate(places).tolist()) == list(range(boundaries[-1]))
    position = np.arange(boundaries[-1]) - np.repeat(boundaries[:-1], np.diff(boundaries))
    assert len({int((position[own] + 1).sum()) for own in places}) == 1  # keys that a rank's queries look at


@given(
    lengths=st.lists(st.integers(2, 30), max_size=30),
    dp_size=st.integers(1, 4),
    budget=st.integers(48, 80),
    packed=st.booleans(),
    multiple_of=st.sampled_from([1, 2, 4]),
    count_multiple_of=st.sampled_from([1, 2, 3]),
    cp_size=st.sampled_from([1, 2, 3]),
    cost=st.sampled_from([None, SequenceCost(1.0, 0.0), SequenceCost(1.0, 0.3), SequenceCost(0.0, 1.0)]),
)
def test_packing_keeps_every_trainable_token_exactly_once(
    lengths: list[int], dp_size: int, budget: int, packed: bool, multiple_of: int, count_multiple_of: int, cp_size: int,
    cost: SequenceCost | None,
) -> None:  # fmt: skip
    start = np.cumsum([0, *lengths])
    sequences = [sequence(list(range(1000 + s, 1000 + s + n))) for s, n in zip(start[:-1], lengths, strict=True)]
    ranks = [
        make_microbatches(
            sequences, dp_rank=rank, dp_size=dp_size, max_tokens=budget, packed=packed, multiple_of=multiple_of,
            count_multiple_of=count_multiple_of, cp_rank=cp_rank, cp_size=cp_size,
            cost=cost,
        )
        for rank in range(dp_size)
        for cp_rank in range(cp_size)
    ]  # fmt: skip
    assert len({len(microbatches) for microbatches in ranks}) == 1
    assert len(ranks[0]) % count_multiple_of == 0
    everything = [microbatch for microbatches in ranks for microbatch in microbatches]
    labels = np.concatenate([microbatch.labels[microbatch.trainable] for microbatch in everything])
    expected = np.concatenate([s.tokens[s.trainable] for s in sequences]) if sequences else np.array([])
    assert sorted(labels.tolist()) == sorted(expected.tolist())
    assert sum(microbatch.num_tokens for microbatch in everything) == len(expected)
    assert sum(microbatch.num_sequences for microbatch in everything) == len(sequences)
    for microbatch in everything:
        assert microbatch.tokens.size * cp_size <= budget
        assert microbatch.tokens.shape[1] % multiple_of == 0
        assert np.allclose(
            microbatch.fields["value"][microbatch.trainable] if sequences else 0,
            microbatch.labels[microbatch.trainable] / 10,
        )
        if packed:
            assert microbatch.cu_seqlens is not None
            assert microbatch.cu_seqlens[-1] == microbatch.tokens.size * cp_size
            assert (np.diff(microbatch.cu_seqlens) > 0).all()
    of_data_ranks = [zip(*ranks[first : first + cp_size], strict=True) for first in range(0, len(ranks), cp_size)]
    wholes = [(parts[0], [m.labels for m in parts]) for microbatches in of_data_ranks for parts in microbatches]
    back = {i: values for m, labels in wholes for i, values in m.by_sequence(m.join(labels)).items()}
    assert back.keys() == set(range(len(sequences)))
    assert all(np.array_equal(back[i], s.tokens[1:]) for i, s in enumerate(sequences))


def test_a_sequence_that_no_microbatch_can_hold_is_refused() -> None:
    with pytest.raises(
        UserError,
        match=r"actor\.max_tokens_per_microbatch=8: a sequence of 9 tokens does not fit; raise it to at least 12",
    ):
        make_microbatches([sequence(list(range(9)))], dp_rank=0, dp_size=1, max_tokens=8, multiple_of=4)


def test_a_sequence_whose_first_token_is_trainable_is_a_fault_of_ours() -> None:
    with pytest.raises(AssertionError, match="first token"):
        sequence([1, 2, 3], first_trainable=0)
