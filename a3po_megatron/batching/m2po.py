"""M2PO: drop the tokens whose ratios make the second moment of a batch too large, and no others.

    M2 = mean of (log pi_prox / pi_behav)^2 over the tokens that are kept      must be at most the threshold

The largest are dropped first, as few as it takes, whatever their advantage. All tokens count in the mean: fresh ones, whose
ratio is 1 up to rounding, do so whichever way the rounding went, and the mask does not depend on it. The batch is judged as a
whole, before its first optimizer step, so every rank comes to the same mask. Source: arXiv 2510.01161. Imports no torch.
"""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from a3po_megatron.batching.packing import TokenSequence
from a3po_megatron.records import Bool


def second_moment_mask(log_ratio: NDArray[np.floating], threshold: float) -> Bool:
    """Return [tokens] bool: False where a token is dropped.

    `log_ratio`: log pi_prox - log pi_behav of all trainable tokens of a batch, [tokens]. Tokens of equal size are kept or
    dropped together, so the order of tokens does not matter. A NaN is kept: the loss shows it.
    """
    squares = log_ratio.astype(np.float64) ** 2
    ordered = np.sort(squares[~np.isnan(squares)])
    means = np.cumsum(ordered) / np.arange(1, len(ordered) + 1)  # of the k smallest; never falls with k
    num_kept = int(np.searchsorted(means, threshold, side="right"))
    if num_kept == len(ordered):
        return np.ones(len(squares), np.bool_)
    return ~(squares >= ordered[num_kept])


def correction_masks(
    sequences: Sequence[TokenSequence], proximal_logprobs: NDArray[np.floating], threshold: float
) -> list[Bool]:
    """Return for each sequence of a batch, bool [n], which of its tokens are kept; what is not trainable is kept.

    `proximal_logprobs`: those of all tokens of the sequences, end to end.
    """
    trainable = np.concatenate([sequence.trainable for sequence in sequences])
    behavior = np.concatenate([sequence.fields["behavior_logprobs"].astype(np.float64) for sequence in sequences])
    log_ratio = np.subtract(proximal_logprobs, behavior)[trainable]
    kept = np.ones(len(trainable), np.bool_)
    kept[trainable] = second_moment_mask(log_ratio, threshold)
    return np.split(kept, np.cumsum([len(sequence.tokens) for sequence in sequences])[:-1])
