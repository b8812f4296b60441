"""A loss or gradient that is NaN or infinite: the error, and which sample made it."""

from collections.abc import Callable, Sequence

import numpy as np

from a3po_megatron.batching.packing import TokenSequence


class NonFiniteError(RuntimeError):
    """The loss or a gradient is NaN or infinite; nothing has been updated."""


def find_culprit(
    sequences: Sequence[TokenSequence], is_finite: Callable[[Sequence[TokenSequence]], bool]
) -> int | None:
    """Return the index of a sequence that alone is not finite, None where only several together are.

    `is_finite` tells whether the loss and gradient of a step are. It is asked of all sequences, most of them blank, so that
    each stays on the rank that computes its loss, and that alone knows what other policies said of it. About 2 log2(n) steps.
    """
    suspects = [index for index, sequence in enumerate(sequences) if sequence.trainable.any()]

    def finite_with(indices: Sequence[int]) -> bool:
        return is_finite([s if index in indices else blank(s) for index, s in enumerate(sequences)])

    while len(suspects) > 1:
        halves = suspects[: len(suspects) // 2], suspects[len(suspects) // 2 :]
        bad = next((half for half in halves if not finite_with(half)), None)
        if bad is None:
            return None
        suspects = bad
    return suspects[0] if suspects else None


def blank(sequence: TokenSequence) -> TokenSequence:
    """Return a sequence of the same length that trains nothing."""
    return TokenSequence(
        np.zeros_like(sequence.tokens),
        np.zeros_like(sequence.trainable),
        {name: np.zeros_like(values) for name, values in sequence.fields.items()},
        sequence.name,
    )
