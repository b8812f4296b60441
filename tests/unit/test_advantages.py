"""Group advantages against hand-worked numbers, and batches made of groups."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from a3po_megatron.batching.advantages import group_advantages, group_has_signal, normalize_over_batch
from a3po_megatron.config.controller import AdvantageConfig
from a3po_megatron.controller.groups import batch_of
from a3po_megatron.records import Group, Problem, Sample
from a3po_megatron.reward.base import shuffled_rewards


def f32(*values: float) -> np.ndarray:
    return np.array(values, dtype=np.float32)


def advantages_of(*rewards: float, kept: list[bool] | None = None, **settings: Any) -> np.ndarray:
    mask = np.ones(len(rewards), np.bool_) if kept is None else np.array(kept)
    return group_advantages(f32(*rewards), mask, AdvantageConfig(**settings))


def test_advantages_match_hand_worked_numbers() -> None:
    # mean 1/4; squared deviations 9/16 + 3 * 1/16 = 3/4, divided by n - 1 = 3: variance 1/4, std 1/2
    np.testing.assert_allclose(advantages_of(1, 0, 0, 0), [1.5, -0.5, -0.5, -0.5], rtol=1e-6)
    # mean 2, std 1
    np.testing.assert_allclose(advantages_of(1, 2, 3), [-1, 0, 1], rtol=1e-6)
    # 8 samples, 2 right: mean 1/4, variance (2 * 9/16 + 6 * 1/16) / 7 = 3/14
    expected = [0.75 / np.sqrt(3 / 14)] * 2 + [-0.25 / np.sqrt(3 / 14)] * 6
    np.testing.assert_allclose(advantages_of(1, 1, 0, 0, 0, 0, 0, 0), expected, rtol=1e-6)


@pytest.mark.parametrize(
    "settings", [{}, {"baseline": "leave_one_out"}, {"scale": "none"}, {"std_floor": 1e-9}], ids=str
)
@pytest.mark.parametrize("rewards", [[0.35] * 7, [0.0] * 8, [1.0], [], [0.35, 0.35 + 1e-4, 0.35, 0.35]])
def test_a_group_without_signal_has_advantages_of_exactly_zero(rewards: list[float], settings: dict[str, Any]) -> None:
    advantages = advantages_of(*rewards, **settings)
    assert advantages.tolist() == [0.0] * len(rewards)
    assert advantages.dtype == np.float32


def test_leave_one_out_compares_with_the_mean_of_the_others() -> None:
    # 4 - mean(1, 1) = 3; 1 - mean(4, 1) = -1.5
    np.testing.assert_allclose(advantages_of(4, 1, 1, baseline="leave_one_out", scale="none"), [3, -1.5, -1.5])
    # std of (4, 1, 1): mean 2, squares 4 + 1 + 1 over 2 = 3
    expected = np.array([3, -1.5, -1.5]) / np.sqrt(3)
    np.testing.assert_allclose(advantages_of(4, 1, 1, baseline="leave_one_out"), expected, rtol=1e-6)


def test_mean_only_keeps_the_size_of_rewards() -> None:
    np.testing.assert_allclose(advantages_of(10, 0, 0, 2, scale="none"), [7, -3, -3, -1])


def test_a_small_std_is_floored() -> None:
    # mean .01, std .02 / sqrt(2) = .0141 < .1
    np.testing.assert_allclose(advantages_of(0, 0.02, std_floor=0.1), [-0.1, 0.1], rtol=1e-5)


def test_masked_members_stand_in_no_statistic_and_get_zero() -> None:
    kept = [True, False, True, True]
    np.testing.assert_allclose(advantages_of(1, 1000, 2, 3, kept=kept), [-1, 0, 0, 1], rtol=1e-6)
    assert advantages_of(1, 0, kept=[True, False]).tolist() == [0, 0]
    assert advantages_of(1, 0, kept=[False, False]).tolist() == [0, 0]


def test_normalisation_over_the_batch_weighs_samples_by_their_tokens_and_leaves_zeros() -> None:
    # tokens: 1 of value 1, 3 of value -1 -> mean -.5, variance .75; the third sample has no signal, the fourth no token
    counted = np.array([True, True, False, True])
    values = normalize_over_batch(f32(1, -1, 0, 9), counted, np.array([1, 3, 50, 0]), std_floor=1e-3)
    np.testing.assert_allclose(values, [1.5 / np.sqrt(0.75), -0.5 / np.sqrt(0.75), 0, 0], rtol=1e-6)
    assert normalize_over_batch(f32(0, 0), np.array([False, False]), np.array([3, 4]), 1e-3).tolist() == [0, 0]


def test_an_advantage_of_zero_in_a_group_with_signal_is_normalised_like_any_other() -> None:
    # std of (1, .5, 0) is .5: advantages 1, 0, -1; of (3, 0, 0): mean 1, std sqrt(3). One token each, so the mean is 0.
    batch = batch_of(
        [group("a", [1, 0.5, 0]), group("b", [2, 2]), group("c", [0, 0, 3])], AdvantageConfig(normalize_batch=True)
    )
    raw = np.array([1, 0, -1, -1 / np.sqrt(3), -1 / np.sqrt(3), 2 / np.sqrt(3)])
    expected = raw / np.sqrt(np.mean(raw**2))
    np.testing.assert_allclose(batch.advantages, [*expected[:3], 0, 0, *expected[3:]], rtol=1e-5, atol=1e-7)


def test_a_group_has_signal_by_the_members_that_are_kept() -> None:
    members = group("a", [1, 1, 0])
    cut = replace(members, samples=(*members.samples[:2], replace(members.samples[2], finish_reason="length")))
    assert group_has_signal(cut, AdvantageConfig())
    assert not group_has_signal(cut, AdvantageConfig(overlong_filtering=True))


def test_overlong_filtering_takes_cut_off_samples_out_of_statistics_and_training() -> None:
    members = group("a", [1, 2, 3, 100])
    cut = replace(members, samples=(*members.samples[:3], replace(members.samples[3], finish_reason="length")))
    batch = batch_of([cut], AdvantageConfig(overlong_filtering=True))
    np.testing.assert_allclose(batch.advantages, [-1, 0, 1, 0], rtol=1e-6)
    assert batch.kept.tolist() == [True, True, True, False]
    assert batch_of([cut], AdvantageConfig()).kept.all()


def group(name: str, rewards: list[float]) -> Group:
    ids, versions = np.array([2], dtype=np.int32), np.array([0], dtype=np.int32)
    samples = tuple(Sample(name, ids, ids, f32(-0.1), versions, "stop") for _ in rewards)
    return Group(Problem(name, ids, "0"), samples, f32(*rewards))


def test_a_batch_keeps_the_order_of_groups_and_judges_each_within_itself() -> None:
    batch = batch_of([group("a", [1, 2, 3]), group("b", [100, 100]), group("c", [0, 0, 0, 4])], AdvantageConfig())
    assert [sample.problem_id for sample in batch.samples] == ["a"] * 3 + ["b"] * 2 + ["c"] * 4
    assert batch.rewards.tolist() == [1, 2, 3, 100, 100, 0, 0, 0, 4]
    np.testing.assert_allclose(batch.advantages, [-1, 0, 1, 0, 0, -0.5, -0.5, -0.5, 1.5], rtol=1e-6, atol=1e-7)


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
    assert not batch_of(groups, AdvantageConfig()).advantages.any()
    shuffled = batch_of(groups, AdvantageConfig(), lambda rewards: shuffled_rewards(rewards, 0, 0))
    assert shuffled.advantages.any()
    assert sorted(shuffled.rewards) == [0] * 4 + [1] * 4
