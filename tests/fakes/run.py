"""A controller on a fake fleet, and an actor that trains nothing, for tests of the loop over the real HTTP app."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import msgspec

from a3po_megatron import wire
from a3po_megatron.config.controller import AdvantageConfig, ControllerConfig
from a3po_megatron.config.data import ArithmeticTaskConfig
from a3po_megatron.controller.app import create_app
from a3po_megatron.controller.loop import Controller
from a3po_megatron.controller.parts import Parts
from a3po_megatron.controller.rows import RunFiles
from a3po_megatron.data.arithmetic import ArithmeticTask, decode_ids
from a3po_megatron.data.source import PromptSource
from a3po_megatron.records import Batch
from a3po_megatron.reward.base import Part, WeightedSum
from a3po_megatron.reward.exact import judge_exact
from a3po_megatron.rollout.sampling import SamplingSettings
from tests.fakes.fleet import FakeFleet

TOKEN = "the-token-of-this-run"
SMALL = ControllerConfig(
    prompts_per_batch=3,
    samples_per_prompt=4,
    max_staleness=2,
    max_concurrent_groups=8,
    eval_every=2,
    max_eval_problems=10,
    poll_s=0.2,
)

EXACT = WeightedSum([Part("answer", 1.0, judge_exact)])
Train = Callable[[int, Batch], Awaitable[None]]  # (version, batch)


async def nothing() -> None:
    """Close what is not open."""


def make_controller(
    run_dir: Path, fleet: FakeFleet, num_steps: int = 6, *, seed: int = 0, shuffle: bool = False, **changes: Any
) -> Controller:
    """Return a controller of 3 x 4 samples a batch; `changes` are fields of ControllerConfig."""
    config = replace(SMALL, **changes)
    task = ArithmeticTask(ArithmeticTaskConfig(max_operand=20, num_heldout=30))
    parts = Parts(
        fleet=fleet,
        source=PromptSource(task.problems(task.train_questions[:7]), seed),
        heldout=task.problems(task.heldout_questions[: config.max_eval_problems]),
        reward=EXACT,
        evaluation_reward=EXACT,
        advantage=AdvantageConfig(),
        shuffle_rewards=shuffle,
        sampling=SamplingSettings(temperature=1.0, max_tokens=4),
        evaluation_sampling=SamplingSettings(config.eval_temperature, max_tokens=4, evaluation=True),
        files=RunFiles(run_dir, decode_ids, resume=False),
        say=lambda line: None,
        close_rewards=nothing,
    )
    return Controller(config, num_steps, seed, parts)


@asynccontextmanager
async def running(controller: Controller) -> AsyncIterator[tuple[httpx.AsyncClient, asyncio.Task[None]]]:
    """Run the controller; yield a client of its app that has the token, and the task of the run."""
    transport = httpx.ASGITransport(create_app(controller, TOKEN))
    headers = {"Authorization": f"Bearer {TOKEN}"}
    run = asyncio.create_task(controller.run())
    try:
        async with httpx.AsyncClient(transport=transport, base_url="http://controller", headers=headers) as client:
            yield client, run
    finally:
        run.cancel()
        await asyncio.wait((run,))


async def post(client: httpx.AsyncClient, path: str, **fields: Any) -> httpx.Response:
    """Post `fields` as a msgpack map."""
    return await client.post(path, content=msgspec.msgpack.encode(fields), timeout=20)


async def register(client: httpx.AsyncClient) -> None:
    """Register the one replica."""
    answer = await post(client, "/replicas/register", name="r0", url="http://127.0.0.1:1", world_size=1)
    assert answer.status_code == 200, answer.text


async def next_batch(client: httpx.AsyncClient, version: int) -> Batch | None:
    """Ask until there is a batch; None when the run is over."""
    while (answer := await post(client, "/batch", version=version)).status_code == 204:
        pass
    if answer.status_code == 410:
        return None
    assert answer.status_code == 200, answer.text
    return wire.decode(answer.content, Batch)


async def publish(client: httpx.AsyncClient, version: int) -> None:
    """Publish weights that are not there."""
    manifest = {"names": ["w"], "dtypes": ["float32"], "shapes": [[2, 3]]}
    answer = await post(client, "/publish/begin", version=version, **manifest)
    assert answer.status_code == 200, answer.text
    answer = await post(client, "/publish/finish", version=version)
    assert answer.status_code == 200, answer.text


async def act(client: httpx.AsyncClient, train: Train | None = None) -> list[Batch]:
    """Be the actor until the run is over; return the batches that were trained."""
    batches: list[Batch] = []
    while (batch := await next_batch(client, len(batches))) is not None:
        version = len(batches)
        if train is not None:
            await train(version, batch)
        batches.append(batch)
        await publish(client, version + 1)
        answer = await post(client, "/step", step=version, version=version, metrics={"loss": 0.5, "grad_norm": None})
        assert answer.status_code == 200, answer.text
    assert (await post(client, "/done", reason="finished")).status_code == 200
    return batches


def whole_run(controller: Controller, train: Train | None = None) -> list[Batch]:
    """Run controller, replica and actor to the end; return the batches."""

    async def main() -> list[Batch]:
        async with asyncio.timeout(30), running(controller) as (client, run):
            await register(client)
            batches = await act(client, train)
            await run
            return batches

    return asyncio.run(main())
