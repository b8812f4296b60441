"""Group-relative advantages: a sample is judged against its siblings, the other samples of the same prompt.

    A_i = (r_i - mean(r)) / (std(r) + eps)        std over the group's n members, divided by n - 1

The mean and std are of the group alone, taken in float64 before anything is masked.
"""

import numpy as np

from a3po_megatron.records import Float32

# Rewards that differ by less are equal up to rounding (0.35 in float32 leaves residues near 1e-8, a sum of several such
# terms near 1e-4). Divided by their own tiny std they would become advantages of full size made of noise.
SMALLEST_SPREAD = 1e-3


def group_advantages(rewards: Float32, eps: float = 1e-6) -> Float32:
    """Return the advantages [n] of one group's rewards [n].

    A group whose members have all the same reward carries no signal: its advantages are exactly 0, also for n = 1.
    """
    values = rewards.astype(np.float64)
    if np.ptp(values) < SMALLEST_SPREAD:
        return np.zeros(len(rewards), dtype=np.float32)
    return ((values - values.mean()) / (values.std(ddof=1) + eps)).astype(np.float32)
