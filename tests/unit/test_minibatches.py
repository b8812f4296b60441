"""Batches become aligned sequences, and minibatches that every rank deals alike."""

from dataclasses import replace

import numpy as np

from a3po_megatron.batching.minibatches import split_minibatches, training_batch, with_logprobs
from a3po_megatron.batching.packing import make_microbatches
from a3po_megatron.records import Batch, Sample


def sample(prompt: list[int], response: list[int], versions: list[int]) -> Sample:
    logprobs = -np.arange(1, len(response) + 1, dtype=np.float32)
    ids = (np.array(prompt, np.int32), np.array(response, np.int32))
    return Sample("p", *ids, logprobs, np.array(versions, np.int32), "stop")


def batch(*samples: Sample) -> Batch:
    size = len(samples)
    return Batch(samples, np.ones(size, np.float32), np.arange(1, size + 1, dtype=np.float32), np.ones(size, np.bool_))


def test_every_array_talks_about_the_same_token() -> None:
    whole = training_batch(batch(sample([4, 5], [6, 7, 8], [7, 8, 9])), version=9, max_staleness=4)
    (sequence,) = whole.sequences
    assert sequence.tokens.tolist() == [4, 5, 6, 7, 8]
    assert sequence.trainable.tolist() == [False, False, True, True, True]
    assert sequence.fields["staleness"].tolist() == [0, 0, 2, 1, 0]
    assert sequence.fields["behavior_logprobs"].tolist() == [0, 0, -1, -2, -3]
    assert sequence.fields["advantages"].tolist() == [0, 0, 1, 1, 1]
    assert whole.staleness.tolist() == [2, 1, 0]


def test_versions_shift_with_labels_for_a_response_that_was_interrupted_twice() -> None:
    """The packer moves everything one to the left, once: at each label stands the version that sampled it."""
    whole = training_batch(batch(sample([1, 2, 3], [11, 12, 13, 14], [5, 6, 6, 8])), version=8, max_staleness=4)
    (packed,) = make_microbatches(whole.sequences, dp_rank=0, dp_size=1, max_tokens=64)
    staleness_of = dict(zip(packed.labels[0].tolist(), packed.fields["staleness"][0].tolist(), strict=True))
    assert {token: staleness_of[token] for token in (11, 12, 13, 14)} == {11: 3, 12: 2, 13: 2, 14: 0}
    assert packed.labels[packed.trainable].tolist() == [11, 12, 13, 14]


def test_tokens_older_than_the_bound_are_masked_and_counted_and_the_rest_of_the_sample_stays() -> None:
    whole = training_batch(batch(sample([1], [2, 3, 4], [3, 6, 8]), sample([1], [2], [2])), version=8, max_staleness=2)
    assert [sequence.trainable.tolist() for sequence in whole.sequences] == [[False, False, True, True], [False, False]]
    assert whole.num_overdue == 2
    assert [set(s.fields["sequence_tokens"].tolist()) for s in whole.sequences] == [{2}, {0}]


def test_a_filtered_sample_is_masked_and_counted_and_its_tokens_are_not_called_overdue() -> None:
    both = batch(sample([1], [2, 3], [0, 0]), sample([1], [2, 3], [0, 0]))
    whole = training_batch(replace(both, kept=np.array([False, True])), version=0, max_staleness=0)
    assert [sequence.trainable.tolist() for sequence in whole.sequences] == [[False] * 3, [False, True, True]]
    assert (whole.num_filtered, whole.num_overdue) == (1, 0)


def test_tokens_newer_than_the_actor_are_trained_with_negative_staleness() -> None:
    whole = training_batch(batch(sample([1], [2, 3], [8, 9])), version=8, max_staleness=0)
    assert whole.staleness.tolist() == [0, -1]


def test_tokens_newer_than_the_actor_are_masked_and_counted_where_that_is_asked_for() -> None:
    whole = training_batch(batch(sample([1], [2, 3], [8, 9])), version=8, max_staleness=0, mask_newer=True)
    assert whole.staleness.tolist() == [0]
    assert (whole.num_newer, whole.num_overdue) == (1, 0)
    assert whole.sequences[0].fields["sequence_tokens"].tolist() == [1, 1, 1]


def test_an_empty_response_is_left_out_and_counted_and_the_advantages_stay_with_their_samples() -> None:
    whole = training_batch(batch(sample([1], [], []), sample([1], [2], [0])), version=0, max_staleness=0)
    assert whole.num_empty == 1
    assert [sequence.fields["advantages"].tolist() for sequence in whole.sequences] == [[0, 2]]


def test_minibatches_hold_every_sequence_once_and_depend_on_seed_and_version_only() -> None:
    samples = [sample([1], [2 + i], [0]) for i in range(11)]
    sequences = training_batch(batch(*samples), version=0, max_staleness=0).sequences

    def dealt(seed: int, version: int) -> list[list[int]]:
        return [[int(s.tokens[1]) for s in part] for part in split_minibatches(sequences, 3, seed, version)]

    assert sorted(token for part in dealt(7, 2) for token in part) == list(range(2, 13))
    assert [len(part) for part in dealt(7, 2)] == [4, 4, 3]
    assert dealt(7, 2) == dealt(7, 2)
    assert dealt(7, 2) != dealt(7, 3)
    assert dealt(7, 2) != dealt(8, 2)


def test_proximal_logprobs_stand_at_their_tokens_and_are_nan_where_unknown() -> None:
    (sequence,) = training_batch(batch(sample([1, 2], [3, 4], [0, 0])), version=0, max_staleness=0).sequences
    known = with_logprobs(sequence, "proximal_logprobs", np.array([-1, -2, -3], np.float32)).fields["proximal_logprobs"]
    assert np.isnan(known[0])
    assert known[1:].tolist() == [-1, -2, -3]
    assert np.isnan(with_logprobs(sequence, "proximal_logprobs", None).fields["proximal_logprobs"]).all()
