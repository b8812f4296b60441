"""The check of a golden recording: how near a ratio may come to an edge of the clip."""

import math

import pytest
import torch

from a3po_megatron.errors import UserError
from a3po_megatron.objective.surrogate import CLIP, ClippedSurrogate
from tests.golden.edges import MARGIN, check, distance_to_edge


@pytest.mark.parametrize(
    ("ratio", "advantage", "distance"),
    [
        (1.2, 1.0, 0.0),
        (1.212, 0.5, 0.01),
        (0.8, 1.0, 1 / 3),  # the edge that counts is 1.2
        (0.8, -1.0, 0.0),
        (0.792, -1.0, 0.01),
        (1.2, -1.0, 0.5),  # here it is 0.8
        (1.2, 0.0, math.inf),
    ],
)
def test_the_distance_is_to_the_edge_that_counts(ratio: float, advantage: float, distance: float) -> None:
    found = distance_to_edge(torch.tensor([[ratio, 1.0]]), torch.tensor([[advantage, 0.0]]), 0.2, 0.2)
    assert found == pytest.approx(distance, abs=1e-7)  # float32


def test_only_within_that_distance_does_a_change_of_the_ratio_change_who_is_clipped() -> None:
    """Against the surrogate itself, at ratios of both sides and signs."""
    ratio = torch.linspace(0.7, 1.3, 601, dtype=torch.float64)[:, None].repeat(1, 3)
    advantages = torch.tensor([-1.0, 0.0, 1.0], dtype=torch.float64).expand_as(ratio)

    def clipped(values: torch.Tensor) -> torch.Tensor:
        return ClippedSurrogate(0.2, 0.28)(values.log(), values, torch.ones_like(values), advantages)[1][CLIP]

    change = 5e-3
    flips = (clipped(ratio * (1 + change)) != clipped(ratio)) | (clipped(ratio * (1 - change)) != clipped(ratio))
    near = [
        [distance_to_edge(r[None], a[None], 0.2, 0.28) <= change / (1 - change) for r, a in zip(*pair, strict=True)]
        for pair in zip(ratio, advantages, strict=True)
    ]
    assert flips.any()
    assert torch.equal(flips & torch.tensor(near), flips)
    assert torch.tensor(near).sum() <= flips.sum() + 4  # two values at the ends of each stretch


def test_a_recording_that_another_cpu_may_not_repeat_is_refused() -> None:
    check("sync", 2 * MARGIN)
    with pytest.raises(UserError, match=r"sync: a token's ratio is only 2.5e-05 \(relative\) from an edge") as refused:
        check("sync", MARGIN / 2)
    assert "\n" not in str(refused.value)
