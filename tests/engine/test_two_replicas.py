"""Two real vLLM servers behind one fleet: exact per version, nothing lost or twice, and what happens when one fails."""

import asyncio
import re
import signal
import time
from collections.abc import Sequence

import numpy as np
import psutil
import pytest

from a3po_megatron.rollout.client import Generation, PartialGeneration
from a3po_megatron.rollout.sampling import SamplingSettings
from tests.engine.conftest import LiveFleet, LiveServer, SecondServer
from tests.engine.paced_scheduler import slow_from
from tests.engine.tiny_model import make_model, reference_logprobs

pytestmark = pytest.mark.timeout(300)

TOLERANCE = 1e-4
NUM_PROMPTS = 200
CATCH_UP_S = 60.0
NUM_PUBLICATIONS = 5
NUM_LONG = 8  # responses that outlast all publications


def prompts_and_lengths() -> tuple[list[list[int]], list[int]]:
    """Return prompts of 2 to 60 tokens and the length of each response: most short, a few long."""
    generator = np.random.default_rng(5)
    prompts = [generator.integers(2, 96, size=generator.integers(2, 61)).tolist() for _ in range(NUM_PROMPTS)]
    lengths = np.clip(generator.lognormal(4.0, 0.8, NUM_PROMPTS), 5, 400).astype(int)
    lengths[:NUM_LONG] = 1200
    return prompts, lengths.tolist()


def sampling(length: int, seed: int) -> SamplingSettings:
    return SamplingSettings(temperature=1.0, max_tokens=length, seed=seed, ignore_eos=True)


def check_exact(live: LiveServer, prompts: Sequence[list[int]], results: Sequence[Generation]) -> None:
    """Compare every token's log-probability with transformers' of the token's version."""
    for prompt, result in zip(prompts, results, strict=True):
        assert (np.diff(result.versions) >= 0).all()
        for version in set(result.versions.tolist()):
            here = result.versions == version
            expected = reference_logprobs(live.models[version], prompt, result.token_ids.tolist(), 1.0)
            np.testing.assert_allclose(result.logprobs[here], expected[here], atol=TOLERANCE, rtol=0)


async def two_replicas(live: LiveServer, second: SecondServer, name: str, **changes) -> LiveFleet:
    """Return a fleet of both servers, the second one brought to the current version like any late joiner."""
    ready = await live.fleet(**changes)
    await ready.publish(make_model(live.version + 501))
    assert (await ready.fleet.register(name, second.server.url, 1))["state"] == "behind"
    async with asyncio.timeout(CATCH_UP_S):  # it reads the kept files
        while {replica["state"] for replica in ready.fleet.status()["replicas"].values()} != {"current"}:
            await asyncio.sleep(0.05)
    return ready


def test_200_responses_over_five_publications_are_each_exact_and_none_is_lost(live, second):
    prompts, lengths = prompts_and_lengths()
    partials = [PartialGeneration() for _ in prompts]

    async def run() -> tuple[list[Generation], int, dict]:
        ready = await two_replicas(live, second, "second")
        first = ready.fleet.version
        calls = [
            asyncio.create_task(ready.fleet.generate(prompt, sampling(length, seed), f"r{seed}", partial))
            for seed, (prompt, length, partial) in enumerate(zip(prompts, lengths, partials, strict=True))
        ]
        with slow_from(live.pace_file, 0):
            for number in range(1, NUM_PUBLICATIONS + 1):
                while sum(len(partial.token_ids) for partial in partials) < sum(lengths) * number / 8:
                    await asyncio.sleep(0.01)
                await ready.publish(make_model(live.version + 601))
        results = await asyncio.gather(*calls)
        status = ready.fleet.status()
        await ready.fleet.aclose()
        return results, first, status

    results, first, status = asyncio.run(run())
    assert [len(result.token_ids) for result in results] == lengths
    drawn = np.concatenate([result.versions for result in results])
    assert sorted(set(drawn.tolist())) == list(range(first, first + NUM_PUBLICATIONS + 1))
    assert max(len(set(result.versions.tolist())) for result in results) == NUM_PUBLICATIONS + 1
    assert status["fenced"] == {}
    assert (status["moved"], status["interrupted"], status["waiting"]) == (0, 0, 0)
    assert {replica["running"] for replica in status["replicas"].values()} == {0}
    for partial, result in zip(partials, results, strict=True):
        assert list(partial.token_ids) == result.token_ids.tolist()
    check_exact(live, prompts, results)


def test_what_a_second_replica_adds_is_reported(live, second, capsys):
    """Only a report: on two cores the two servers and the test share what one had nearly for itself."""

    async def tokens_per_s(fleet) -> float:
        start = time.perf_counter()
        calls = [fleet.generate([3 + i % 90, 5, i % 90], sampling(100, i), f"t{i}") for i in range(96)]
        return sum(len(result.token_ids) for result in await asyncio.gather(*calls)) / (time.perf_counter() - start)

    async def run() -> tuple[float, float]:
        ready = await two_replicas(live, second, "second")
        two = await tokens_per_s(ready.fleet)
        await ready.fleet.deregister("second", "measured")
        one = await tokens_per_s(ready.fleet)
        await ready.fleet.aclose()
        return one, two

    one, two = asyncio.run(run())
    with capsys.disabled():
        print(f"\none replica {one:.0f} tokens/s, two {two:.0f}: {two / one:.2f} times")
    assert one > 0
    assert two > 0


def stop_engine(second: SecondServer) -> None:
    """Stop the process that generates; the HTTP server goes on answering."""
    (engine,) = [p for p in psutil.Process(second.server.pid).children(recursive=True) if "EngineCore" in p.name()]
    second.stopped.append(engine)
    engine.suspend()


def kill_server(second: SecondServer) -> None:
    """Kill the HTTP server; its engine ends by itself."""
    psutil.Process(second.server.pid).send_signal(signal.SIGKILL)


@pytest.mark.parametrize(
    ("name", "fault", "reason"),
    [
        ("hung", stop_engine, "has read and written no token for"),
        ("killed", kill_server, "connection lost|'load' failed|no answer to 'load'"),
    ],
    ids=["hung", "killed"],
)
def test_responses_of_a_replica_that_fails_while_it_generates_go_on_elsewhere(live, second, name, fault, reason):
    """Last in the file: the second server does not survive it. Its supervisor would restart it (test_supervisor.py)."""
    prompts = [[5 + i, 9, 70 - i] for i in range(24)]
    partials = [PartialGeneration() for _ in prompts]

    async def run() -> tuple[list[Generation], dict]:
        ready = await two_replicas(live, second, name, stall_timeout_s=8.0, heartbeat_s=0.5)
        calls = [
            asyncio.create_task(ready.fleet.generate(prompt, sampling(300, seed), f"{name}{seed}", partial))
            for seed, (prompt, partial) in enumerate(zip(prompts, partials, strict=True))
        ]
        with slow_from(live.pace_file, 0):
            while any(len(partial.token_ids) < 20 for partial in partials):
                await asyncio.sleep(0.01)
            fault(second)
            async with asyncio.timeout(60):
                while name not in ready.fleet.status()["fenced"]:
                    await asyncio.sleep(0.05)
        async with asyncio.timeout(60):
            results = await asyncio.gather(*calls)
        status = ready.fleet.status()
        await ready.fleet.aclose()
        return results, status

    results, status = asyncio.run(run())
    second.go_on()
    assert [len(result.token_ids) for result in results] == [300] * len(prompts)
    assert status["moved"] == 12
    assert status["replicas"]["live"]["running"] == 0
    assert re.search(reason, status["fenced"][name])
    check_exact(live, prompts, results)
