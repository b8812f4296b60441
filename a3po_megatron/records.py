"""The nouns that travel between roles: Problem, Sample, Group, Batch.

Every record is frozen and checks its lengths at construction; nobody downstream writes into one. Imports numpy only, so
that the controller's side stays free of torch.

Letters: P prompt tokens, R response tokens.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Int32 = NDArray[np.int32]
Float32 = NDArray[np.float32]
Bool = NDArray[np.bool_]


@dataclass(frozen=True)
class Problem:
    """One question. Made by `data/`, read by the controller."""

    id: str  # unique and stable over epochs
    prompt_ids: Int32  # [P], chat template already applied
    answer: str  # what the reward compares with
    source: str = ""  # name of its set


@dataclass(frozen=True)
class Sample:
    """One response to a problem. Made by the controller from what the fleet returns, read by `reward/` and `batching/`.

    Example: prompt `1+2=` and response `3<eos>` of which weight version 7 sampled the first token and version 8 the second:
    `response_ids=[5, 1], behavior_logprobs=[-0.1, -0.01], versions=[7, 8]`.
    """

    problem_id: str
    prompt_ids: Int32  # [P]
    response_ids: Int32  # [R]
    behavior_logprobs: Float32  # [R] log-probability under the distribution that sampled the token (after temperature)
    versions: Int32  # [R] weight version that sampled each token, from the engine's own spans
    finish_reason: str  # "stop" or "length"

    def __post_init__(self) -> None:
        lengths = {len(self.response_ids), len(self.behavior_logprobs), len(self.versions)}
        assert len(lengths) == 1, (
            f"sample of problem {self.problem_id}: token, log-prob and version counts differ: {lengths}"
        )


@dataclass(frozen=True)
class Verdict:
    """What one response is worth and why. Made by `reward/`, read by the controller and by people."""

    reward: float
    reason: str  # never empty
    extracted: str = ""  # the answer that was read from the response, where there is one


@dataclass(frozen=True)
class Group:
    """All samples of one prompt with their rewards. Made by the controller, read by `batching/`."""

    problem: Problem
    samples: tuple[Sample, ...]
    rewards: Float32  # [len(samples)]
    reasons: tuple[str, ...] = ()  # [len(samples)], why each reward is what it is; empty where nobody recorded it

    def __post_init__(self) -> None:
        assert len(self.samples) == len(self.rewards), f"group {self.problem.id}: one reward a sample"
        assert len(self.reasons) in (0, len(self.samples)), f"group {self.problem.id}: one reason a sample"

    @property
    def oldest_version(self) -> int:
        """Version of the oldest sampled token in the group."""
        return min(int(sample.versions.min()) for sample in self.samples if len(sample.versions))


@dataclass(frozen=True)
class Batch:
    """What one training step consumes. Made by the controller, read by every rank of the actor. One entry a sample."""

    samples: tuple[Sample, ...]
    rewards: Float32  # [len(samples)]
    advantages: Float32  # [len(samples)]; the same for every token of a sample
    kept: Bool  # [len(samples)]; False: filtered, takes no part in training

    def __post_init__(self) -> None:
        lengths = {len(self.samples), len(self.rewards), len(self.advantages), len(self.kept)}
        assert len(lengths) == 1, f"batch: one reward, advantage and mark a sample, not {lengths}"
