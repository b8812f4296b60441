"""One prompt becomes a group (n samples side by side, then their rewards), and B groups become a batch."""

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from a3po_megatron.batching.advantages import batch_advantages
from a3po_megatron.config.controller import AdvantageConfig
from a3po_megatron.data.source import Draw
from a3po_megatron.records import Batch, Float32, Group, Problem, Sample
from a3po_megatron.reward.base import Reward
from a3po_megatron.rollout.client import PartialGeneration, RequestOverdue
from a3po_megatron.rollout.generator import Generator, request_seed
from a3po_megatron.rollout.sampling import SamplingSettings


class Straggler(TimeoutError):
    """A group whose responses did not all come in time; one line that says how far they got."""


@dataclass(frozen=True)
class RunningGroup:
    """A group in generation. Made by the loop when it starts the group, read by snapshots."""

    place: int  # that it fills among all groups of the run
    draw: Draw
    responses: tuple[PartialGeneration, ...]  # by sample index; the fleet appends to them, a snapshot copies them


async def generate_group(
    running: RunningGroup,
    fleet: Generator,
    sampling: SamplingSettings,
    run_seed: int,
    reward: Reward,
    timeout_s: float,
) -> Group:
    """Sample one response for each of `running.responses`, all at once, and score them.

    The order of the samples is that of their indices, whichever finishes first. Raises Straggler after `timeout_s`, or when
    the fleet gave up a response that took it too long.
    """
    draw = running.draw

    async def sample(index: int, partial: PartialGeneration) -> Sample:
        settings = replace(sampling, seed=request_seed(run_seed, draw.problem.id, draw.epoch, index))
        request_id = f"draw{draw.index}-sample{index}"
        response = await fleet.generate(draw.problem.prompt_ids, settings, request_id, partial)
        return Sample(
            draw.problem.id,
            draw.problem.prompt_ids,
            response.token_ids,
            response.logprobs,
            response.versions,
            response.finish_reason,
        )

    def straggler(waited: str) -> Straggler:
        arrived = [len(response.token_ids) for response in running.responses]
        return Straggler(f"{waited} {draw.problem.id!r}; tokens that arrived: {arrived}; the rollout log says why")

    try:
        async with asyncio.timeout(timeout_s), asyncio.TaskGroup() as siblings:
            tasks = [siblings.create_task(sample(index, part)) for index, part in enumerate(running.responses)]
    except TimeoutError:
        raise straggler(f"waited {timeout_s:g} s (controller.group_timeout_s) for the responses to problem") from None
    except ExceptionGroup as failures:
        if failures.split(RequestOverdue)[1] is not None:
            raise
        raise straggler(f"waited too long ({failures.exceptions[0]}) for the responses to problem") from None
    samples = tuple(task.result() for task in tasks)
    return await judged(reward, draw.problem, samples)


async def judged(reward: Reward, problem: Problem, samples: Sequence[Sample]) -> Group:
    """Return the group of `samples` with their rewards and the reasons for them."""
    verdicts = await reward.judge(problem, samples)
    rewards = np.asarray([verdict.reward for verdict in verdicts], dtype=np.float32)
    return Group(problem, tuple(samples), rewards, tuple(verdict.reason for verdict in verdicts))


def batch_of(
    groups: Sequence[Group], settings: AdvantageConfig, reshuffle: Callable[[Float32], Float32] | None = None
) -> Batch:
    """Return the groups' samples end to end with their advantages, each computed within its own group.

    `reshuffle` maps the rewards of the whole batch [samples] before the advantages are taken (the negative control).
    """
    rewards = np.concatenate([group.rewards for group in groups])
    if reshuffle is not None:
        rewards = reshuffle(rewards)
    ends = np.cumsum([len(group.samples) for group in groups])[:-1]
    advantages, kept = batch_advantages(groups, np.split(rewards, ends), settings)
    samples = tuple(sample for group in groups for sample in group.samples)
    return Batch(samples, rewards, advantages, kept)
