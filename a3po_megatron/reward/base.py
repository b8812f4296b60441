"""The one interface of rewards, and how several become one.

A reward judges all samples of a problem at once: `await reward.judge(problem, samples)` returns one Verdict a sample, in
their order, and holds up the event loop nowhere. It reads token ids, as they were sampled; a part that needs text decodes
them with the run's tokenizer.
"""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from a3po_megatron.records import Float32, Problem, Sample, Verdict

Decoder = Callable[[Sequence[int]], str]
Judge = Callable[[Problem, Sequence[Sample]], Awaitable[list[Verdict]]]


class RewardError(Exception):
    """A reward cannot be computed, through no fault of the response: a broken user function, endpoint or truth."""


class Reward(Protocol):
    """What the controller's loop asks."""

    async def judge(self, problem: Problem, samples: Sequence[Sample]) -> list[Verdict]:
        """Return one verdict a sample. Raises RewardError where no response is to blame: the run then ends."""
        ...


@dataclass(frozen=True)
class Part:
    """One of the rewards that are added up."""

    name: str
    weight: float
    judge: Judge


class WeightedSum:
    """The sum of `weight x reward` over its parts; the reason names every part, in their order."""

    def __init__(self, parts: Sequence[Part]) -> None:
        assert parts, "a reward has at least one part"
        self.parts = tuple(parts)

    async def judge(self, problem: Problem, samples: Sequence[Sample]) -> list[Verdict]:
        """Return one verdict a sample; all parts judge at the same time."""
        by_part = await asyncio.gather(*(part.judge(problem, samples) for part in self.parts))
        for part, verdicts in zip(self.parts, by_part, strict=True):
            assert len(verdicts) == len(samples), (
                f"reward {part.name}: {len(verdicts)} verdicts for {len(samples)} samples"
            )
        return [self._sum(verdicts) for verdicts in zip(*by_part, strict=True)]

    def _sum(self, verdicts: tuple[Verdict, ...]) -> Verdict:
        reward = sum(part.weight * verdict.reward for part, verdict in zip(self.parts, verdicts, strict=True))
        if len(verdicts) == 1:
            return Verdict(reward, verdicts[0].reason, verdicts[0].extracted)
        reasons = [
            f"{part.name} {part.weight * verdict.reward:+.4g} ({verdict.reason})"
            for part, verdict in zip(self.parts, verdicts, strict=True)
        ]
        return Verdict(reward, "; ".join(reasons), verdicts[0].extracted)


def shuffled_rewards(rewards: Float32, seed: int, batch_index: int) -> Float32:
    """Return `rewards` [samples of a batch] permuted: their distribution stays, what they say about a response goes.

    The permutation depends on (seed, batch_index) only.
    """
    return np.random.default_rng([seed, batch_index]).permutation(rewards)
