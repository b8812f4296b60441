"""Sequences of tokens -> microbatches for each data-parallel rank, shifted here and nowhere else.

Every [b, s] array of a microbatch talks about the same thing at the same place: position t holds an input token, and
`labels`, `trainable` and every field hold what belongs to the token after it. For tokens 7 8 9 of which 8 and 9 are
trainable with field values 0.8 and 0.9:

    tokens     7    8    9
    labels     8    9    0      (a sequence's last position predicts nothing)
    trainable  1    1    0
    field      0.8  0.9  0

Invariants (tests/unit/batching): each sequence stands in exactly one microbatch of one rank; every rank has the same
number of microbatches; no microbatch is above the token budget; the token count is a multiple of `multiple_of`.

Letters: n tokens of a sequence, b rows of a microbatch, s tokens a row.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from a3po_megatron.errors import UserError

Array = NDArray[np.generic]


@dataclass(frozen=True)
class TokenSequence:
    """One sequence to compute log-probabilities or a loss on. Entry i of every array talks about token i."""

    tokens: NDArray[np.int64]  # [n], n >= 2
    trainable: NDArray[np.bool_]  # [n]; entry 0 must be False, nothing predicts the first token
    fields: Mapping[str, Array] = field(default_factory=dict)  # further per-token values, [n] each

    def __post_init__(self) -> None:
        lengths = {len(self.tokens), len(self.trainable), *(len(values) for values in self.fields.values())}
        assert len(lengths) == 1, f"sequence: arrays of different lengths {lengths}"
        assert len(self.tokens) >= 2, "sequence: needs at least two tokens, one of them to predict the other"
        assert not self.trainable[0], "sequence: the first token cannot be trainable"


@dataclass(frozen=True)
class Span:
    """Where a sequence stands in a microbatch: positions [start, start + length) of row `row`."""

    sequence: int  # index into the list that was packed
    row: int
    start: int
    length: int


@dataclass(frozen=True)
class Microbatch:
    """One forward pass of one data-parallel rank, shifted as the module's docstring says."""

    tokens: NDArray[np.int64]  # [b, s]; b = 1 when packed
    positions: NDArray[np.int64]  # [b, s], from 0 in each sequence
    labels: NDArray[np.int64]  # [b, s]
    trainable: NDArray[np.bool_]  # [b, s]
    fields: dict[str, Array]  # [b, s] each; `sequence` int64: the position's sequence in this microbatch, 0 in padding
    cu_seqlens: (
        NDArray[np.int32] | None
    )  # [sequences + 1] boundaries along s when packed, padding as a sequence; else None
    spans: tuple[Span, ...]

    def by_sequence(self, values: Array) -> dict[int, Array]:
        """Split [b, s] values back: sequence index -> [n - 1] values of its tokens 1..n-1."""
        return {
            span.sequence: values[span.row, span.start : span.start + span.length - 1].copy() for span in self.spans
        }


def make_microbatches(
    sequences: Sequence[TokenSequence],
    *,
    dp_rank: int,
    dp_size: int,
    max_tokens: int,
    packed: bool = True,
    multiple_of: int = 1,
    count_multiple_of: int = 1,
) -> list[Microbatch]:
    """Return the microbatches of one data-parallel rank.

    Every rank computes the same plan from the same sequences and takes its own part. `max_tokens` bounds a microbatch,
    padding counted; `multiple_of` is what tensor and sequence parallelism need; `count_multiple_of` is what an interleaved
    pipeline needs of the number of microbatches. Raises UserError for a sequence that no microbatch can hold.
    """
    lengths = [len(sequence.tokens) for sequence in sequences]
    longest = max(lengths, default=0)
    if _round_up(longest, multiple_of) > max_tokens:
        raise UserError(
            f"actor.max_tokens_per_microbatch={max_tokens}: a sequence of {longest} tokens does not fit; "
            f"raise it to at least {_round_up(longest, multiple_of)} or shorten prompts and responses"
        )
    plan = _plan(lengths, dp_size, max_tokens, packed, multiple_of, count_multiple_of)
    pack = _pack if packed else _pad
    return [pack(sequences, bins, multiple_of) for bins in plan[dp_rank::dp_size]]


def _plan(
    lengths: Sequence[int], dp_size: int, max_tokens: int, packed: bool, multiple_of: int, count_multiple_of: int
) -> list[list[int]]:
    """Return bins of sequence indices: bin m * dp_size + r is microbatch m of rank r. As few microbatches as fit."""

    def size(members: list[int]) -> int:
        held = [lengths[i] for i in members]
        used = sum(held) if packed else len(held) * _round_up(max(held, default=0), multiple_of)
        return _round_up(used, multiple_of)

    count = _round_up(max(1, -(-sum(lengths) // (max_tokens * dp_size))), count_multiple_of)
    while True:
        bins = balance(lengths, count * dp_size)
        if all(size(members) <= max_tokens for members in bins):
            return bins
        count += count_multiple_of


def balance(lengths: Sequence[int], num_bins: int) -> list[list[int]]:
    """Spread sequences over bins, longest first into the emptiest bin, so that bins hold about equally many tokens."""
    bins: list[list[int]] = [[] for _ in range(num_bins)]
    held = [0] * num_bins
    for index in sorted(range(len(lengths)), key=lambda i: (-lengths[i], i)):
        emptiest = min(range(num_bins), key=lambda b: (held[b], len(bins[b]), b))
        bins[emptiest].append(index)
        held[emptiest] += lengths[index]
    return [sorted(members) for members in bins]


def _pack(sequences: Sequence[TokenSequence], members: list[int], multiple_of: int) -> Microbatch:
    """Put the members end to end in one row; padding to `multiple_of` is a last sequence of its own."""
    lengths = [len(sequences[i].tokens) for i in members]
    starts = np.concatenate([[0], np.cumsum(lengths, dtype=np.int64)])
    used = int(starts[-1])
    # Two padding tokens at least where there is nothing else: a rank without sequences still runs its forward pass.
    total = _round_up(max(used, 2), multiple_of)
    boundaries = starts if total == used else np.append(starts, total)
    spans = tuple(
        Span(index, 0, int(start), length) for index, start, length in zip(members, starts[:-1], lengths, strict=True)
    )
    return _fill(sequences, spans, (1, total), boundaries.astype(np.int32))


def _pad(sequences: Sequence[TokenSequence], members: list[int], multiple_of: int) -> Microbatch:
    """Give each member a row of its own, padded behind to the longest."""
    lengths = [len(sequences[i].tokens) for i in members]
    width = _round_up(max(lengths, default=2), multiple_of)
    spans = tuple(Span(index, row, 0, length) for row, (index, length) in enumerate(zip(members, lengths, strict=True)))
    return _fill(sequences, spans, (max(len(members), 1), width), None)


def _fill(
    sequences: Sequence[TokenSequence],
    spans: tuple[Span, ...],
    size: tuple[int, int],
    cu_seqlens: NDArray[np.int32] | None,
) -> Microbatch:
    tokens, positions, labels = (np.zeros(size, np.int64) for _ in range(3))
    trainable = np.zeros(size, np.bool_)
    fields = {name: np.zeros(size, values.dtype) for name, values in (sequences[0].fields if sequences else {}).items()}
    fields["sequence"] = np.zeros(size, np.int64)
    for number, span in enumerate(spans):
        sequence = sequences[span.sequence]
        here = (span.row, slice(span.start, span.start + span.length))
        shifted = (span.row, slice(span.start, span.start + span.length - 1))
        tokens[here] = sequence.tokens
        positions[here] = np.arange(span.length)
        labels[shifted] = sequence.tokens[1:]
        trainable[shifted] = sequence.trainable[1:]
        fields["sequence"][here] = number
        for name, values in sequence.fields.items():
            fields[name][shifted] = values[1:]
    if cu_seqlens is not None and spans and cu_seqlens[-1] > (end := spans[-1].start + spans[-1].length):
        positions[0, end:] = np.arange(size[1] - end)
    elif not spans:
        positions[:] = np.arange(size[1])
    return Microbatch(tokens, positions, labels, trainable, fields, cu_seqlens, spans)


def _round_up(value: int, multiple_of: int) -> int:
    return -(-value // multiple_of) * multiple_of
