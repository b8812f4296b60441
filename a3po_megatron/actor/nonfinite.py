"""A loss or gradient that is NaN or infinite: the error, and which sample made it."""

from collections.abc import Callable, Sequence

from a3po_megatron.batching.packing import TokenSequence


class NonFiniteError(RuntimeError):
    """The loss or a gradient is NaN or infinite; nothing has been updated."""


def find_culprit(
    sequences: Sequence[TokenSequence], is_finite: Callable[[Sequence[TokenSequence]], bool]
) -> int | None:
    """Return the index of a sequence that alone is not finite, None where only several together are.

    `is_finite` tells whether the loss and gradient of some of the sequences are. Asked of halves of halves, so all of it
    costs about as much as one step more.
    """
    indices = [index for index, sequence in enumerate(sequences) if sequence.trainable.any()]
    while len(indices) > 1:
        halves = indices[: len(indices) // 2], indices[len(indices) // 2 :]
        bad = next((half for half in halves if not is_finite([sequences[index] for index in half])), None)
        if bad is None:
            return None
        indices = bad
    return indices[0] if indices else None
