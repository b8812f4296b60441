"""Batch -> sequences with everything the objective needs, token by token -> minibatches, the same on every rank."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from a3po_megatron.batching.packing import TokenSequence
from a3po_megatron.batching.staleness import is_overdue, staleness
from a3po_megatron.records import Batch, Bool, Sample


@dataclass(frozen=True)
class TrainingBatch:
    """What is trained at one version."""

    sequences: tuple[TokenSequence, ...]  # in the batch's order; samples without a response token are left out
    num_overdue: int  # response tokens that are older than the bound, and masked
    num_newer: int  # response tokens that are newer than the actor's weights, and masked
    num_empty: int  # samples without a response token
    num_filtered: int  # samples with tokens that the controller took out, and whose tokens are masked

    @property
    def staleness(self) -> NDArray[np.int32]:
        """Staleness of every trainable token, [tokens]."""
        parts = [sequence.fields["staleness"][sequence.trainable] for sequence in self.sequences]
        return np.concatenate(parts).astype(np.int32) if parts else np.zeros(0, np.int32)


def training_batch(batch: Batch, version: int, max_staleness: int, mask_newer: bool = False) -> TrainingBatch:
    """Return the batch as sequences whose arrays are aligned token by token (the packer shifts them, once).

    Trainable are the response tokens of samples that are kept, but not those older than `max_staleness` versions, nor,
    with `mask_newer`, those newer than the weights (there are such after a resume from an older checkpoint).
    Example at version 8 with a bound of 1, for prompt [4, 5] and response [6, 7] sampled by versions [6, 8] with
    advantage 0.5:

        tokens 4 5 6 7    staleness 0 0 2 0    trainable 0 0 0 1    advantages 0 0 .5 .5
    """
    sequences, num_overdue, num_newer = [], 0, 0
    for index, sample in enumerate(batch.samples):
        if len(sample.response_ids):
            overdue = is_overdue(sample, version, max_staleness)
            newer = (staleness(sample, version) < 0) & mask_newer
            num_overdue += int(overdue.sum())
            num_newer += int(newer.sum())
            name = f"sample {index} of the batch (problem {sample.problem_id!r})"
            sequences.append(
                _sequence(name, sample, float(batch.advantages[index]), version, ~overdue & ~newer & batch.kept[index])
            )
    return TrainingBatch(
        tuple(sequences),
        num_overdue,
        num_newer,
        num_empty=len(batch.samples) - len(sequences),
        num_filtered=int((~batch.kept).sum()),
    )


def split_minibatches(
    sequences: Sequence[TokenSequence], num_minibatches: int, seed: int, version: int
) -> list[list[TokenSequence]]:
    """Deal `sequences` in a random order, which depends on seed and version only, into parts of about equal number.

    Siblings of a group may land in different parts: their advantages are known already.
    """
    order = np.random.default_rng([seed, version]).permutation(len(sequences))
    return [[sequences[i] for i in part] for part in np.array_split(order, num_minibatches)]


def with_logprobs(sequence: TokenSequence, field: str, logprobs: NDArray[np.float32] | None) -> TokenSequence:
    """Return the sequence with one field more, from the [n-1] log-probs of its tokens but the first.

    None where this rank will not compute the loss of the sequence. NaN stands for what is not known, so that a loss
    that uses it by mistake stops the run.
    """
    values = np.full(len(sequence.tokens), np.nan, np.float32)
    if logprobs is not None:
        values[1:] = logprobs
    return replace(sequence, fields={**sequence.fields, field: values})


def with_correction(sequence: TokenSequence, kept: Bool) -> TokenSequence:
    """Return the sequence with the field `correction`: bool [n], False for tokens that the policy term drops."""
    return replace(sequence, fields={**sequence.fields, "correction": kept})


def _sequence(name: str, sample: Sample, advantage: float, version: int, trainable: Bool) -> TokenSequence:
    num_prompt, num_response = len(sample.prompt_ids), len(sample.response_ids)

    def behind_prompt[T: np.generic](values: NDArray[T]) -> NDArray[T]:
        return np.concatenate([np.zeros(num_prompt, values.dtype), values])

    return TokenSequence(
        tokens=np.concatenate([sample.prompt_ids, sample.response_ids]).astype(np.int64),
        trainable=behind_prompt(trainable),
        fields={
            "advantages": behind_prompt(np.full(num_response, advantage, np.float32)),
            "behavior_logprobs": behind_prompt(sample.behavior_logprobs.astype(np.float32)),
            "staleness": behind_prompt(staleness(sample, version)),
            "sequence_tokens": np.full(num_prompt + num_response, trainable.sum(), np.int32),
        },
        name=name,
    )
