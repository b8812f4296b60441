"""Sequences of tokens -> microbatches for each data-parallel rank, shifted here and nowhere else.

Every [b, s] array of a microbatch talks about the same thing at the same place: position t holds an input token, and
`labels`, `trainable` and every field hold what belongs to the token after it. For tokens 7 8 9 of which 8 and 9 are
trainable with field values 0.8 and 0.9:

    tokens     7    8    9
    labels     8    9    0      (a sequence's last position predicts nothing)
    trainable  1    1    0
    field      0.8  0.9  0

Under context parallelism a microbatch is shifted first and then cut along s: of each sequence, padded to 2 cp equal chunks,
rank r of cp holds chunks r and 2 cp - 1 - r, so that causal attention costs every rank the same (`context_places`).

Invariants (tests/unit/batching): each sequence stands in exactly one microbatch of one data-parallel rank, each of its tokens
on one context-parallel rank; every rank has the same number of microbatches; no microbatch is above the token budget; the
token count on each context-parallel rank is a multiple of `multiple_of`; ranks do about equal work (`balance.py`); the same
sequences give the same microbatches.

Letters: n tokens of a sequence, b rows of a microbatch, s tokens a row, cp context-parallel ranks.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

import numpy as np
from numpy.typing import NDArray

from a3po_megatron.batching.balance import SequenceCost, balance, deal
from a3po_megatron.errors import UserError

Array = NDArray[np.generic]


@dataclass(frozen=True)
class TokenSequence:
    """One sequence to compute log-probabilities or a loss on. Entry i of every array talks about token i."""

    tokens: NDArray[np.int64]  # [n], n >= 2
    trainable: NDArray[np.bool_]  # [n]; entry 0 must be False, nothing predicts the first token
    fields: Mapping[str, Array] = field(default_factory=dict)  # further per-token values, [n] each
    name: str = ""  # for people

    def __post_init__(self) -> None:
        lengths = {len(self.tokens), len(self.trainable), *(len(values) for values in self.fields.values())}
        assert len(lengths) == 1, f"sequence: arrays of different lengths {lengths}"
        assert len(self.tokens) >= 2, "sequence: needs at least two tokens, one of them to predict the other"
        assert not self.trainable[0], "sequence: the first token cannot be trainable"


@dataclass(frozen=True)
class Span:
    """Where a sequence stands in a whole microbatch: positions [start, start + length) of row `row`."""

    sequence: int  # index into the list that was packed
    row: int
    start: int
    length: int


@dataclass(frozen=True)
class Microbatch:
    """One forward pass of one data-parallel rank, shifted as the module's docstring says.

    Under context parallelism its arrays are this rank's part, [b, s/cp]; `cu_seqlens` and `spans` are those of the whole.
    """

    tokens: NDArray[np.int64]  # [b, s]; b = 1 when packed
    positions: NDArray[np.int64]  # [b, s], from 0 in each sequence
    labels: NDArray[np.int64]  # [b, s]
    trainable: NDArray[np.bool_]  # [b, s]
    fields: dict[str, Array]  # [b, s] each; `sequence` int64: the position's sequence in this microbatch, 0 in padding
    cu_seqlens: (
        NDArray[np.int32] | None
    )  # [sequences + 1] boundaries along s when packed, padding as a sequence; else None
    spans: tuple[Span, ...]
    num_sequences: int  # with a trainable token; counted on context-parallel rank 0, 0 on the others

    @property
    def num_tokens(self) -> int:
        """Trainable tokens on this rank."""
        return int(self.trainable.sum())

    def join(self, parts: Sequence[Array]) -> Array:
        """Put the [b, s/cp] values of every context-parallel rank, in rank order, together to the [b, s] of the whole."""
        joined = np.concatenate(parts, axis=1)
        whole = np.empty_like(joined)
        boundaries = _boundaries(self.cu_seqlens, joined.shape[1])
        for rank, part in enumerate(parts):
            whole[:, context_places(boundaries, rank, len(parts))] = part
        return whole

    def by_sequence(self, values: Array) -> dict[int, Array]:
        """Split the [b, s] values of the whole back: sequence index -> [n - 1] values of its tokens 1..n-1."""
        return {
            span.sequence: values[span.row, span.start : span.start + span.length - 1].copy() for span in self.spans
        }


def context_places(boundaries: Array, cp_rank: int, cp_size: int) -> NDArray[np.int64]:
    """Return [s/cp]: the positions along a whole row that a context-parallel rank holds, in its order.

    `boundaries` are those of the row's sequences, each a multiple of 2 cp long unless cp is 1. For a sequence of 8 and cp 2
    they are 0 1 6 7 on rank 0 and 2 3 4 5 on rank 1.
    """
    if cp_size == 1:
        return np.arange(int(boundaries[-1]))
    chunks = []
    for start, end in zip(boundaries[:-1].tolist(), boundaries[1:].tolist(), strict=True):
        size = (end - start) // (2 * cp_size)
        chunks += [np.arange(start + i * size, start + (i + 1) * size) for i in (cp_rank, 2 * cp_size - 1 - cp_rank)]
    return np.concatenate(chunks)


def make_microbatches(
    sequences: Sequence[TokenSequence],
    *,
    dp_rank: int,
    dp_size: int,
    max_tokens: int,
    packed: bool = True,
    multiple_of: int = 1,
    count_multiple_of: int = 1,
    cp_rank: int = 0,
    cp_size: int = 1,
    cost: SequenceCost | None = None,
) -> list[Microbatch]:
    """Return the microbatches of one data-parallel rank, of which context-parallel rank `cp_rank` takes its part.

    Every rank computes the same plan from the same sequences and takes its own part. `max_tokens` bounds a microbatch,
    padding counted, over all its context-parallel ranks; `multiple_of` is what sequence parallelism needs of a rank's
    tokens; `count_multiple_of` is what an interleaved pipeline needs of the number of microbatches; `cost` is what is
    balanced (default: tokens). Raises UserError for a sequence that no microbatch can hold.
    """
    chunks = 2 * cp_size if cp_size > 1 else 1
    rounding = _Rounding(packed, chunks, chunks * multiple_of)
    lengths = [len(sequence.tokens) for sequence in sequences]
    longest = max(lengths, default=0)
    if (needed := rounding.size([longest])) > max_tokens:
        raise UserError(
            f"actor.max_tokens_per_microbatch={max_tokens}: a sequence of {longest} tokens does not fit; "
            f"raise it to at least {needed} or shorten prompts and responses"
        )
    plan = _plan(lengths, dp_size, max_tokens, rounding, count_multiple_of, cost or SequenceCost())
    pack = _pack if packed else _pad
    wholes = [pack(sequences, members, rounding) for members in plan[dp_rank]]
    return wholes if cp_size == 1 else [_part(whole, cp_rank, cp_size) for whole in wholes]


@dataclass(frozen=True)
class _Rounding:
    """What lengths are padded to. A packed row ends in one padding sequence, of a multiple of `sequence` like all others."""

    packed: bool
    sequence: int  # each packed sequence
    row: int  # each row; a multiple of `sequence`

    def size(self, lengths: Sequence[int]) -> int:
        """Return the tokens of a microbatch of sequences of these lengths."""
        if self.packed:
            return _round_up(sum(_round_up(length, self.sequence) for length in lengths), self.row)
        return len(lengths) * _round_up(max(lengths, default=0), self.row)


def _plan(
    lengths: Sequence[int],
    dp_size: int,
    max_tokens: int,
    rounding: _Rounding,
    count_multiple_of: int,
    cost: SequenceCost,
) -> list[list[list[int]]]:
    """Return the sequences of each microbatch of each rank. As few microbatches as fit, balanced by cost where that fits too."""

    def fits(members: list[int]) -> bool:
        return rounding.size([lengths[i] for i in members]) <= max_tokens

    costs = [cost.of(length) for length in lengths]
    count = _round_up(max(1, -(-sum(lengths) // (max_tokens * dp_size))), count_multiple_of)
    while True:
        for weights in (costs, [float(length) for length in lengths]):
            if (bins := balance(weights, count * dp_size, fits)) is not None:
                return deal(bins, costs, dp_size)
        count += count_multiple_of


def _pack(sequences: Sequence[TokenSequence], members: list[int], rounding: _Rounding) -> Microbatch:
    """Put the members end to end in one row, each padded; what pads the row is a last sequence of its own."""
    lengths = [len(sequences[i].tokens) for i in members]
    starts = np.cumsum([0, *(_round_up(length, rounding.sequence) for length in lengths)], dtype=np.int64)
    used = int(starts[-1])
    # Two padding tokens at least where there is nothing else: a rank without sequences still runs its forward pass.
    total = _round_up(max(used, 2), rounding.row)
    boundaries = starts if total == used else np.append(starts, total)
    spans = tuple(
        Span(index, 0, int(start), length) for index, start, length in zip(members, starts[:-1], lengths, strict=True)
    )
    return _fill(sequences, spans, (1, total), boundaries.astype(np.int32))


def _pad(sequences: Sequence[TokenSequence], members: list[int], rounding: _Rounding) -> Microbatch:
    """Give each member a row of its own, padded behind to the longest."""
    lengths = [len(sequences[i].tokens) for i in members]
    width = _round_up(max(lengths, default=2), rounding.row)
    spans = tuple(Span(index, row, 0, length) for row, (index, length) in enumerate(zip(members, lengths, strict=True)))
    return _fill(sequences, spans, (max(len(members), 1), width), None)


def _fill(
    sequences: Sequence[TokenSequence],
    spans: tuple[Span, ...],
    size: tuple[int, int],
    cu_seqlens: NDArray[np.int32] | None,
) -> Microbatch:
    tokens, labels = (np.zeros(size, np.int64) for _ in range(2))
    trainable = np.zeros(size, np.bool_)
    fields = {name: np.zeros(size, values.dtype) for name, values in (sequences[0].fields if sequences else {}).items()}
    fields["sequence"] = np.zeros(size, np.int64)
    for number, span in enumerate(spans):
        sequence = sequences[span.sequence]
        here = (span.row, slice(span.start, span.start + span.length))
        shifted = (span.row, slice(span.start, span.start + span.length - 1))
        tokens[here] = sequence.tokens
        labels[shifted] = sequence.tokens[1:]
        trainable[shifted] = sequence.trainable[1:]
        fields["sequence"][here] = number
        for name, values in sequence.fields.items():
            fields[name][shifted] = values[1:]
    starts = _boundaries(cu_seqlens, size[1])
    row = np.arange(size[1]) - np.repeat(starts[:-1], np.diff(starts))
    positions = np.tile(row.astype(np.int64), (size[0], 1))
    num_sequences = sum(bool(sequences[span.sequence].trainable.any()) for span in spans)
    return Microbatch(tokens, positions, labels, trainable, fields, cu_seqlens, spans, num_sequences)


def _part(whole: Microbatch, cp_rank: int, cp_size: int) -> Microbatch:
    """Return what one context-parallel rank holds."""
    places = context_places(_boundaries(whole.cu_seqlens, whole.tokens.shape[1]), cp_rank, cp_size)
    cut = partial(np.take, indices=places, axis=1)
    return replace(
        whole,
        tokens=cut(whole.tokens),
        positions=cut(whole.positions),
        labels=cut(whole.labels),
        trainable=cut(whole.trainable),
        fields={name: cut(values) for name, values in whole.fields.items()},
        num_sequences=whole.num_sequences if cp_rank == 0 else 0,
    )


def _boundaries(cu_seqlens: NDArray[np.int32] | None, width: int) -> Array:
    """Return the boundaries of the sequences in a row; a padded row is one."""
    return np.array([0, width]) if cu_seqlens is None else cu_seqlens


def _round_up(value: int, multiple_of: int) -> int:
    return -(-value // multiple_of) * multiple_of
