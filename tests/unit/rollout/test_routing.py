"""Who answers a request, who waits, and how many a replica is given."""

import asyncio
from dataclasses import replace

import pytest

from a3po_megatron.rollout.messages import Load
from a3po_megatron.rollout.watch import adapted_limit, highest_limit
from tests.unit.rollout.fleet_of_fakes import MANIFEST, SAMPLING, Setup

pytestmark = pytest.mark.timeout(60)
IDLE = Load(running=8, waiting=0, preemptions=0, tokens=0)


def test_samples_of_one_group_go_where_their_prompt_was_read(tmp_path):
    async def run():
        setup = Setup(tmp_path, "a", "b", "c")
        await setup.register("a", "b", "c")
        groups = [([g] * 10, f"g{g}s{i}") for g in range(6) for i in range(8)]
        await asyncio.gather(*[setup.fleet.generate(prompt, SAMPLING, name) for prompt, name in groups])
        return setup.replicas.values()

    replicas = asyncio.run(run())
    homes = [{tuple(request["token_ids"]) for request in replica.requests} for replica in replicas]
    assert sum(len(home) for home in homes) == 6, "each prompt was read on one replica"
    assert [len(replica.requests) for replica in replicas] == [16, 16, 16]


def test_an_overloaded_home_is_left(tmp_path):
    async def run():
        setup = Setup(tmp_path, "a", "b", max_num_seqs=8)
        await setup.register("a", "b")
        await asyncio.gather(*[setup.fleet.generate([1], SAMPLING, f"r{i}") for i in range(16)])
        return sorted(len(replica.requests) for replica in setup.replicas.values())

    assert asyncio.run(run()) == [8, 8]


def test_a_replica_is_never_given_more_than_its_limit_and_the_line_keeps_its_order(tmp_path):
    async def run():
        setup, most, ended = Setup(tmp_path, "a", max_num_seqs=3), 0, []
        await setup.register("a")

        async def one(i: int) -> None:
            await setup.fleet.generate([i], replace(SAMPLING, max_tokens=3), f"r{i}")
            ended.append(i)

        calls = asyncio.gather(*[one(i) for i in range(30)])
        while not calls.done():
            most = max(most, setup.replicas["a"].num_running)
            await asyncio.sleep(0)
        return most, ended, setup.fleet.status()

    most, ended, status = asyncio.run(run())
    assert most == 3
    assert [i // 3 for i in ended] == [i // 3 for i in range(30)]
    assert (status["waiting"], status["replicas"]["a"]["running"]) == (0, 0)


def test_a_caller_that_gives_up_leaves_no_place_taken(tmp_path):
    async def run():
        setup = Setup(tmp_path, "a", max_num_seqs=1)
        await setup.register("a")
        long = asyncio.create_task(setup.fleet.generate([1], replace(SAMPLING, max_tokens=200), "long"))
        setup.replicas["a"].running.clear()
        waiting = [asyncio.create_task(setup.fleet.generate([2], SAMPLING, f"w{i}")) for i in range(5)]
        await asyncio.sleep(0.01)
        for call in waiting[:4]:
            call.cancel()
        await asyncio.wait(waiting[:4])
        assert setup.fleet.status()["waiting"] == 1
        long.cancel()
        setup.replicas["a"].running.set()
        result = await waiting[4]
        return result, setup.fleet.status()["replicas"]["a"]["running"]

    result, running = asyncio.run(run())
    assert len(result.token_ids) == SAMPLING.max_tokens
    assert running == 0


def test_while_new_weights_come_requests_wait_and_then_carry_the_new_version(tmp_path):
    async def run():
        setup = Setup(tmp_path, "a")
        await setup.register("a")
        await setup.fleet.begin_publication(1, MANIFEST)
        call = asyncio.create_task(setup.fleet.generate([1], SAMPLING, "r"))
        await asyncio.sleep(0.02)
        assert not setup.replicas["a"].requests
        await setup.fleet.finish_publication(1)
        return await call, setup.replicas["a"].requests

    result, (request,) = asyncio.run(run())
    assert set(result.versions) == {1}
    assert request["cache_salt"] == "version-1"


def test_settings_of_concurrent_requests_stay_apart(tmp_path):
    async def run():
        setup = Setup(tmp_path, "a")
        await setup.register("a")
        settings = [replace(SAMPLING, seed=i, temperature=0.5 + i, max_tokens=1 + i) for i in range(8)]
        await asyncio.gather(*[setup.fleet.generate([1], s, f"r{i}") for i, s in enumerate(settings)])
        return [request["sampling_params"] for request in setup.replicas["a"].requests]

    asked = asyncio.run(run())
    assert [(s["seed"], s["temperature"], s["max_tokens"]) for s in asked] == [(i, 0.5 + i, 1 + i) for i in range(8)]


def test_the_limit_grows_while_all_places_are_taken_and_stops_at_a_quarter_above_the_batch():
    limit = 16
    for _ in range(100):
        limit = adapted_limit(limit, limit, IDLE, replace(IDLE, running=64), max_num_seqs=64)
    assert limit == highest_limit(64) == 80
    assert adapted_limit(40, 39, IDLE, IDLE, max_num_seqs=64) == 40, "not all places were needed"


@pytest.mark.parametrize("load", [replace(IDLE, waiting=30), replace(IDLE, preemptions=2)])
def test_the_limit_falls_when_requests_pile_up_or_are_thrown_out_but_never_below_one(load):
    assert adapted_limit(40, 40, IDLE, load, max_num_seqs=64) == 32
    limit = 40
    for _ in range(50):
        limit = adapted_limit(limit, limit, IDLE, replace(load, running=0), max_num_seqs=64)
    assert limit == 1


def test_a_replica_that_sustains_ten_of_64_settles_a_little_above_ten():
    limit, before = 64, replace(IDLE, running=10, waiting=54)
    limits = []
    for _ in range(40):
        load = replace(IDLE, running=min(10, limit), waiting=max(0, limit - 10))
        limit = adapted_limit(limit, limit, before, load, max_num_seqs=64)
        before = load
        limits.append(limit)
    assert 10 <= min(limits[20:]) <= max(limits[20:]) <= 18


def test_reading_everything_again_after_an_update_is_no_overload():
    limit, before = 64, replace(IDLE, running=0, waiting=64)
    for waiting in (48, 32, 20, 4):
        load = replace(IDLE, running=64 - waiting, waiting=waiting)
        limit = adapted_limit(limit, 64, before, load, max_num_seqs=64)
        before = load
    assert limit >= 64
