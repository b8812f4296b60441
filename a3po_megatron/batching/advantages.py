"""Group-relative advantages: a sample is judged against its siblings, the other samples of the same prompt.

    A_i = (r_i - base_i) / scale        base: mean of the group, or of the others; scale: max(std, floor), or 1

Means and stds are of the kept members alone, in float64; the std is divided by n - 1. Members that are masked (an overlong
sample that is filtered) stand in no statistic and have advantage 0, and so has a group whose rewards are all the same.
"""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from a3po_megatron.config.controller import AdvantageConfig
from a3po_megatron.records import Bool, Float32, Group

# Rewards that differ by less are equal up to rounding (0.35 in float32 leaves residues near 1e-8, a sum of several such
# terms near 1e-4). Divided by their own tiny std they would become advantages of full size made of noise.
SMALLEST_SPREAD = 1e-3


def has_signal(rewards: NDArray[np.floating]) -> bool:
    """Whether the rewards [n] tell one response from another."""
    return len(rewards) > 1 and bool(np.ptp(rewards.astype(np.float64)) >= SMALLEST_SPREAD)


def group_advantages(rewards: Float32, kept: Bool, settings: AdvantageConfig) -> Float32:
    """Return the advantages [n] of one group's rewards [n]; 0 where `kept` [n] is off.

    A group whose kept members have all the same reward carries no signal: its advantages are exactly 0, also for n = 1.
    """
    advantages = np.zeros(len(rewards), dtype=np.float32)
    values = rewards[kept].astype(np.float64)
    if not has_signal(values):
        return advantages
    above_mean = values - values.mean()
    if settings.baseline == "leave_one_out":  # r_i - mean of the others = (r_i - mean) n / (n - 1)
        above_mean *= len(values) / (len(values) - 1)
    scale = max(values.std(ddof=1), settings.std_floor) if settings.scale == "group_std" else 1.0
    advantages[kept] = above_mean / scale
    return advantages


def normalize_over_batch(
    advantages: Float32, counted: Bool, num_tokens: NDArray[np.int64], std_floor: float
) -> Float32:
    """Return advantages [samples] with mean 0 and std 1 over the tokens of the batch, `num_tokens` [samples] each.

    Where `counted` [samples] is off (masked samples, groups without signal) they stay 0 and out of the statistics.
    """
    here = counted & (num_tokens > 0)
    if not here.any():
        return advantages
    values, weights = advantages[here].astype(np.float64), num_tokens[here]
    mean = np.average(values, weights=weights)
    std = np.sqrt(np.average((values - mean) ** 2, weights=weights))
    normalized = np.zeros(len(advantages), dtype=np.float32)
    normalized[here] = (values - mean) / max(std, std_floor)
    return normalized


def kept_samples(group: Group, settings: AdvantageConfig) -> Bool:
    """Return [samples] which members are trained and counted: with `overlong_filtering` not those that were cut off."""
    cut_off = [sample.finish_reason == "length" for sample in group.samples]
    return ~np.array(cut_off, dtype=np.bool_) if settings.overlong_filtering else np.ones(len(cut_off), np.bool_)


def group_has_signal(group: Group, settings: AdvantageConfig) -> bool:
    """Whether the rewards of the members that are kept differ, so that its advantages are not all 0."""
    return has_signal(group.rewards[kept_samples(group, settings)])


def batch_advantages(
    groups: Sequence[Group], rewards: Sequence[Float32], settings: AdvantageConfig
) -> tuple[Float32, Bool]:
    """Return (advantages, kept) of all samples end to end, for the rewards [members] of each group."""
    kept = [kept_samples(group, settings) for group in groups]
    advantages = np.concatenate(
        [group_advantages(own, keep, settings) for own, keep in zip(rewards, kept, strict=True)]
    )
    if settings.normalize_batch:
        counted = [keep & has_signal(own[keep]) for own, keep in zip(rewards, kept, strict=True)]
        num_tokens = np.array([len(sample.response_ids) for group in groups for sample in group.samples])
        advantages = normalize_over_batch(advantages, np.concatenate(counted), num_tokens, settings.std_floor)
    return advantages, np.concatenate(kept)
