"""Group advantages against hand-worked numbers, and batches made of groups."""

import numpy as np
import pytest

from a3po_megatron.batching.advantages import group_advantages
from a3po_megatron.controller.groups import batch_of
from a3po_megatron.records import Group, Problem, Sample
from a3po_megatron.reward.base import shuffled_rewards


def f32(*values: float) -> np.ndarray:
    return np.array(values, dtype=np.float32)


def test_advantages_match_hand_worked_numbers() -> None:
    # mean 1/4; squared deviations 9/16 + 3 * 1/16 = 3/4, divided by n - 1 = 3: variance 1/4, std 1/2
    np.testing.assert_allclose(group_advantages(f32(1, 0, 0, 0)), [1.5, -0.5, -0.5, -0.5], rtol=3e-6)
    # mean 2, std 1
    np.testing.assert_allclose(group_advantages(f32(1, 2, 3)), [-1, 0, 1], rtol=3e-6)
    # 8 samples, 2 right: mean 1/4, variance (2 * 9/16 + 6 * 1/16) / 7 = 3/14
    expected = [0.75 / np.sqrt(3 / 14)] * 2 + [-0.25 / np.sqrt(3 / 14)] * 6
    np.testing.assert_allclose(group_advantages(f32(1, 1, 0, 0, 0, 0, 0, 0)), expected, rtol=6e-6)


@pytest.mark.parametrize("rewards", [[0.35] * 7, [0.0] * 8, [1.0], [0.35, 0.35 + 1e-4, 0.35, 0.35]])
def test_a_group_without_signal_has_advantages_of_exactly_zero(rewards: list[float]) -> None:
    advantages = group_advantages(f32(*rewards))
    assert advantages.tolist() == [0.0] * len(rewards)
    assert advantages.dtype == np.float32


def group(name: str, rewards: list[float]) -> Group:
    ids, versions = np.array([2], dtype=np.int32), np.array([0], dtype=np.int32)
    samples = tuple(Sample(name, ids, ids, f32(-0.1), versions, "stop") for _ in rewards)
    return Group(Problem(name, ids, "0"), samples, f32(*rewards))


def test_a_batch_keeps_the_order_of_groups_and_judges_each_within_itself() -> None:
    batch = batch_of([group("a", [1, 2, 3]), group("b", [100, 100]), group("c", [0, 0, 0, 4])])
    assert [sample.problem_id for sample in batch.samples] == ["a"] * 3 + ["b"] * 2 + ["c"] * 4
    assert batch.rewards.tolist() == [1, 2, 3, 100, 100, 0, 0, 0, 4]
    np.testing.assert_allclose(batch.advantages, [-1, 0, 1, 0, 0, -0.5, -0.5, -0.5, 1.5], rtol=3e-6, atol=1e-7)


def test_shuffled_rewards_keep_their_values_and_repeat_by_seed_and_batch() -> None:
    rewards = f32(*range(50))
    first = shuffled_rewards(rewards, seed=1, batch_index=4)
    assert sorted(first) == sorted(rewards)
    assert not np.array_equal(first, rewards)
    np.testing.assert_array_equal(first, shuffled_rewards(rewards, seed=1, batch_index=4))
    assert not np.array_equal(first, shuffled_rewards(rewards, seed=1, batch_index=5))
    assert rewards.tolist() == list(range(50))


def test_shuffling_crosses_groups_and_changes_the_advantages() -> None:
    groups = [group("a", [1, 1, 1, 1]), group("b", [0, 0, 0, 0])]
    assert not batch_of(groups).advantages.any()
    shuffled = batch_of(groups, lambda rewards: shuffled_rewards(rewards, 0, 0))
    assert shuffled.advantages.any()
    assert sorted(shuffled.rewards) == [0] * 4 + [1] * 4
