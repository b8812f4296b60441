"""avg@n, pass@1 and pass@k of one set of problems, with standard errors. Pure numbers.

P problems with n samples each; a sample is right when its reward is at least 1, c of the n samples of a problem are.

    avg@n    mean over problems of the mean reward of a problem's samples
    pass@k   mean over problems of 1 - C(n - c, k) / C(n, k): the chance that of k samples, drawn without putting back from the n,
             at least one is right. Its expectation is that of k fresh samples (Chen et al. 2021, "Evaluating Large Language
             Models Trained on Code", eq. 1), which 1 - (1 - c / n)^k would underestimate. pass@1 is the mean of c / n

The standard error is that of a mean over P problems, s / sqrt(P) with P - 1 in the variance s^2: how far another draw of problems
(and samples) of the same kind might lie. Samples of one problem are not independent and are not counted as if they were.
"""

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

RIGHT = 1.0  # smallest reward of a right response


@dataclass(frozen=True)
class Estimate:
    """A mean over problems."""

    value: float
    standard_error: float | None  # None: one problem says nothing about others

    def __str__(self) -> str:
        return f"{self.value:.3f}" if self.standard_error is None else f"{self.value:.3f} +- {self.standard_error:.3f}"


@dataclass(frozen=True)
class RewardFigures:
    """What the rewards of one set, or of all sets together, come to."""

    num_problems: int
    num_samples: int  # of each problem
    average: Estimate  # avg@n
    pass_at: dict[int, Estimate]  # by k

    def columns(self) -> dict[str, Estimate]:
        """Return the estimates under the names that people use."""
        return {
            **{f"pass@{k}": estimate for k, estimate in self.pass_at.items()},
            f"avg@{self.num_samples}": self.average,
        }


def pass_at_k(num_samples: int, num_right: int, k: int) -> float:
    """Return 1 - C(n - c, k) / C(n, k), exact to the last bit whatever the sizes."""
    assert 0 <= num_right <= num_samples, f"{num_right} of {num_samples} samples are right"
    assert 1 <= k <= num_samples, f"pass@{k} of {num_samples} samples"
    draws = math.comb(num_samples, k)
    return (draws - math.comb(num_samples - num_right, k)) / draws


def reward_figures(rewards: Sequence[Sequence[float]], ks: Sequence[int]) -> RewardFigures:
    """Return the figures of `rewards` [P][n]; every problem has the same n, and n is at least every k."""
    assert rewards, "no problem"
    (num_samples,) = {len(one) for one in rewards}
    num_right = [sum(reward >= RIGHT for reward in one) for one in rewards]
    return RewardFigures(
        len(rewards),
        num_samples,
        mean_over_problems([statistics.fmean(one) for one in rewards]),
        {k: mean_over_problems([pass_at_k(num_samples, c, k) for c in num_right]) for k in ks},
    )


def mean_over_problems(values: Sequence[float]) -> Estimate:
    """Return the mean of one value a problem, with its standard error."""
    mean = statistics.fmean(values)
    if len(values) == 1:
        return Estimate(mean, None)
    return Estimate(mean, math.sqrt(statistics.variance(values, mean) / len(values)))
