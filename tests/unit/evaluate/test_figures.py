"""pass@k, avg@n and standard errors against numbers by hand and against every draw there is."""

import itertools
import math
from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from a3po_megatron.evaluate.figures import mean_over_problems, pass_at_k, reward_figures


def share_of_draws_with_a_right_one(right: Sequence[bool], k: int) -> float:
    """Draw every k of the samples once."""
    draws = list(itertools.combinations(right, k))
    return sum(any(draw) for draw in draws) / len(draws)


@pytest.mark.parametrize(
    ("num_samples", "num_right", "k", "expected"),
    [
        (1, 0, 1, 0.0),
        (1, 1, 1, 1.0),
        (4, 1, 1, 1 / 4),
        (4, 1, 2, 1 / 2),  # of 6 pairs 3 hold the right one
        (4, 2, 2, 5 / 6),  # of 6 pairs only that of the two wrong ones does not
        (4, 1, 4, 1.0),
        (5, 3, 3, 1.0),  # three samples cannot all be of the two wrong ones
        (10, 3, 5, 1 - 21 / 252),
        (16, 0, 16, 0.0),
    ],
)
def test_pass_at_k_by_hand(num_samples: int, num_right: int, k: int, expected: float) -> None:
    assert pass_at_k(num_samples, num_right, k) == pytest.approx(expected, rel=1e-15)


@given(st.lists(st.booleans(), min_size=1, max_size=9), st.data())
def test_pass_at_k_is_the_share_of_all_draws_that_hold_a_right_sample(right: list[bool], data: st.DataObject) -> None:
    k = data.draw(st.integers(1, len(right)))
    assert pass_at_k(len(right), sum(right), k) == pytest.approx(share_of_draws_with_a_right_one(right, k), abs=1e-12)


def test_pass_at_k_is_unbiased_where_the_plug_in_estimate_is_not() -> None:
    """Samples that are right with chance p: its expectation over n = 6 samples is that of k fresh ones."""
    n, k, p = 6, 3, 0.2
    chance = [math.comb(n, c) * p**c * (1 - p) ** (n - c) for c in range(n + 1)]
    truth = 1 - (1 - p) ** k
    assert sum(chance[c] * pass_at_k(n, c, k) for c in range(n + 1)) == pytest.approx(truth, abs=1e-12)
    assert sum(chance[c] * (1 - (1 - c / n) ** k) for c in range(n + 1)) < truth - 0.05


def test_pass_at_k_is_exact_for_many_samples() -> None:
    assert pass_at_k(10_000, 1, 1) == 1 / 10_000
    assert pass_at_k(10_000, 1, 2500) == 0.25
    product = 1.0
    for i in range(64):  # the product form of Chen et al.
        product *= 1 - 12 / (1024 - i)
    assert pass_at_k(1024, 12, 64) == pytest.approx(1 - product, rel=1e-12)


def test_figures_of_three_problems_by_hand() -> None:
    figures = reward_figures([[1, 0, 0, 0], [1, 1, 0, 0], [0, 0, 0, 0]], ks=[1, 2, 4])
    assert (figures.num_problems, figures.num_samples) == (3, 4)
    assert figures.average.value == figures.pass_at[1].value == pytest.approx(1 / 4)
    # 1/4, 1/2, 0: deviations 0, 1/4, -1/4; variance (1/16 + 1/16) / 2 = 1/16; error sqrt(1/16 / 3)
    assert figures.pass_at[1].standard_error == pytest.approx(1 / 4 / math.sqrt(3))
    assert figures.pass_at[2].value == pytest.approx((1 / 2 + 5 / 6 + 0) / 3)
    assert figures.pass_at[4].value == pytest.approx(2 / 3)
    assert list(figures.columns()) == ["pass@1", "pass@2", "pass@4", "avg@4"]


def test_a_reward_below_one_counts_for_the_average_only() -> None:
    figures = reward_figures([[0.5, 1.5], [0.0, 0.999]], ks=[1, 2])
    assert figures.average.value == pytest.approx((1.0 + 0.4995) / 2)
    assert (figures.pass_at[1].value, figures.pass_at[2].value) == (0.25, 0.5)


def test_one_problem_has_no_standard_error_and_says_so() -> None:
    estimate = mean_over_problems([0.5])
    assert (estimate.value, estimate.standard_error, str(estimate)) == (0.5, None, "0.500")


@settings(deadline=None)
@given(st.lists(st.floats(0, 1), min_size=2, max_size=50))
def test_the_standard_error_is_that_of_a_mean_over_problems(values: list[float]) -> None:
    estimate = mean_over_problems(values)
    array = np.array(values)
    assert estimate.value == pytest.approx(array.mean(), abs=1e-12)
    assert estimate.standard_error == pytest.approx(array.std(ddof=1) / math.sqrt(len(array)), abs=1e-9)


def test_the_standard_error_covers_what_another_draw_of_problems_would_give() -> None:
    """Half of the problems never, half always: of 400 draws of 100 problems about 95 in 100 lie within two errors."""
    generator = np.random.default_rng(0)
    covered = 0
    for _ in range(400):
        estimate = mean_over_problems(generator.integers(2, size=100).astype(float).tolist())
        assert estimate.standard_error is not None
        covered += abs(estimate.value - 0.5) <= 1.96 * estimate.standard_error
    assert 0.91 <= covered / 400 <= 0.98


def test_more_samples_than_there_are_is_a_mistake_of_the_caller() -> None:
    with pytest.raises(AssertionError, match="pass@5 of 4 samples"):
        pass_at_k(4, 1, 5)
    with pytest.raises(ValueError, match="too many values"):
        reward_figures([[1.0], [1.0, 0.0]], ks=[1])
