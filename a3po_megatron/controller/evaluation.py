"""Accuracy on held-out problems: greedy responses of the live fleet, all by one version of the weights."""

import asyncio
import math
import time
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from a3po_megatron.controller.groups import Generator
from a3po_megatron.records import Problem, Sample
from a3po_megatron.reward.base import Reward
from a3po_megatron.rollout.sampling import SamplingSettings


@dataclass(frozen=True)
class Evaluation:
    """One line of evals.jsonl."""

    version: int
    num_problems: int
    accuracy: float  # mean reward, which is the share of right answers for rewards of 0 and 1
    standard_error: float  # of `accuracy` over the choice of problems: sqrt(p (1 - p) / n) for rewards of 0 and 1
    time_s: float

    def line(self) -> str:
        """Return the result as people follow it."""
        return (
            f"version {self.version}  held-out accuracy {self.accuracy:.3f} +- {self.standard_error:.3f}  "
            f"({self.num_problems} problems, {self.time_s:.1f} s)"
        )


async def evaluate(
    fleet: Generator,
    problems: Sequence[Problem],
    reward: Reward,
    greedy: SamplingSettings,
    version: int,
    max_concurrent: int,
    timeout_s: float,
) -> Evaluation:
    """Answer every problem once. The caller publishes no weights meanwhile: the result belongs to `version` alone.

    Raises TimeoutError after `timeout_s`.
    """
    started = time.monotonic()
    slots = asyncio.Semaphore(max_concurrent)

    async def answer(index: int, problem: Problem) -> float:
        async with slots:
            response = await fleet.generate(problem.prompt_ids, greedy, f"eval{version}-{index}")
        versions = set(response.versions.tolist())
        assert versions <= {version}, f"evaluation of version {version} was answered by versions {versions}"
        sample = Sample(
            problem.id,
            problem.prompt_ids,
            response.token_ids,
            response.logprobs,
            response.versions,
            response.finish_reason,
        )
        (verdict,) = await reward.judge(problem, [sample])
        return verdict.reward

    try:
        async with asyncio.timeout(timeout_s), asyncio.TaskGroup() as answers:
            tasks = [answers.create_task(answer(index, problem)) for index, problem in enumerate(problems)]
    except TimeoutError:
        raise TimeoutError(
            f"waited {timeout_s:g} s (controller.evaluation_timeout_s) for version {version}'s answers to "
            f"{len(problems)} held-out problems"
        ) from None
    scores = np.array([task.result() for task in tasks])
    return Evaluation(
        version,
        len(problems),
        float(scores.mean()),
        float(scores.std() / math.sqrt(len(scores))),
        time.monotonic() - started,
    )
