"""problems x n samples -> responses -> verdicts, against anything that generates.

    problem --> n requests, each in one of `max_concurrent` slots --> n samples --> reward --> Answers

Knows no server and no file. Weights may change under it: every token of a sample says which version drew it.
"""

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from a3po_megatron.errors import first_cause
from a3po_megatron.records import Problem, Sample, Verdict
from a3po_megatron.reward.base import Reward
from a3po_megatron.rollout.client import RequestOverdue
from a3po_megatron.rollout.generator import Generator, request_seed
from a3po_megatron.rollout.sampling import SamplingSettings


@dataclass(frozen=True)
class Answers:
    """All samples of one problem and what they are worth. Made here, read by `result.py`."""

    problem: Problem
    samples: tuple[Sample, ...]
    verdicts: tuple[Verdict, ...]  # one a sample


@dataclass(frozen=True)
class EvaluationPlan:
    """How problems are asked."""

    sampling: SamplingSettings  # of evaluation; each request gets a seed of its own where they are drawn at random
    num_samples: int  # of each problem
    max_concurrent: int  # requests in flight
    timeout_s: float  # of the whole
    timeout_setting: str  # what `timeout_s` is called in the settings, for the message
    seed: int = 0


def nobody(num_done: int, num_requests: int) -> None:
    """Follow no progress."""


async def answer_problems(
    fleet: Generator,
    problems: Sequence[Problem],
    reward: Reward,
    plan: EvaluationPlan,
    name: str = "eval",
    progress: Callable[[int, int], None] = nobody,
) -> list[Answers]:
    """Ask every problem `plan.num_samples` times and return the answers in the order of the problems.

    `name` begins the ids of all requests. `progress` hears (responses that came, all of them) after each response. Raises
    TimeoutError after `plan.timeout_s` or when the fleet gave up a response that took it too long, and inside an
    ExceptionGroup what else the fleet or the reward raise.
    """
    slots = asyncio.Semaphore(plan.max_concurrent)
    num_done, num_requests = 0, len(problems) * plan.num_samples

    async def sample(problem: Problem, problem_index: int, index: int) -> Sample:
        nonlocal num_done
        settings = plan.sampling
        if settings.temperature > 0:
            settings = replace(settings, seed=request_seed(plan.seed, problem.id, 0, index))
        async with slots:
            response = await fleet.generate(problem.prompt_ids, settings, f"{name}-{problem_index}-{index}")
        num_done += 1
        progress(num_done, num_requests)
        return Sample(
            problem.id,
            problem.prompt_ids,
            response.token_ids,
            response.logprobs,
            response.versions,
            response.finish_reason,
        )

    async def answer(problem_index: int, problem: Problem) -> Answers:
        async with asyncio.TaskGroup() as siblings:
            tasks = [siblings.create_task(sample(problem, problem_index, i)) for i in range(plan.num_samples)]
        samples = tuple(task.result() for task in tasks)
        return Answers(problem, samples, tuple(await reward.judge(problem, samples)))

    try:
        async with asyncio.timeout(plan.timeout_s), asyncio.TaskGroup() as all_problems:
            tasks = [all_problems.create_task(answer(index, problem)) for index, problem in enumerate(problems)]
    except TimeoutError:
        raise TimeoutError(
            f"waited {plan.timeout_s:g} s ({plan.timeout_setting}) for {num_requests} responses to {len(problems)} "
            f"problems; {num_done} came"
        ) from None
    except ExceptionGroup as failures:
        if failures.split(RequestOverdue)[1] is not None:
            raise
        raise TimeoutError(f"{num_done} of {num_requests} responses came: {first_cause(failures)}") from None
    return [task.result() for task in tasks]
