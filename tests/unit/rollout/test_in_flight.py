"""The three policies for requests in flight when new weights come, seen in HTTP calls and in versions."""

import asyncio
from dataclasses import replace

import pytest

from a3po_megatron.config.rollout import RolloutConfig
from a3po_megatron.errors import UserError
from a3po_megatron.rollout.client import PartialGeneration
from a3po_megatron.rollout.sampling import check_rollout
from tests.unit.rollout.fleet_of_fakes import MANIFEST, SAMPLING, Setup

pytestmark = pytest.mark.timeout(60)
LONG = replace(SAMPLING, max_tokens=60, seed=3)


async def publish_in_the_middle(tmp_path, publish: bool = True, **config):
    setup, partial = Setup(tmp_path, "a", **config), PartialGeneration()
    await setup.register("a")
    call = asyncio.create_task(setup.fleet.generate([1, 2], LONG, "r", partial))
    while len(partial.token_ids) < 5:
        await asyncio.sleep(0)
    await setup.publish(1)
    result = await call
    pauses = [call.partition("?")[2] for call in setup.calls if "/pause" in call]
    return setup, result, pauses


def test_abort_asks_for_the_rest_as_a_new_request_of_the_new_version(tmp_path):
    setup, result, pauses = asyncio.run(publish_in_the_middle(tmp_path, in_flight="abort"))
    assert pauses == ["mode=abort&clear_cache=true"]
    first, second = setup.replicas["a"].requests
    done = len(second["token_ids"]) - 2
    assert 5 <= done < 60
    assert second["sampling_params"]["max_tokens"] == 60 - done
    assert second["sampling_params"]["seed"] != first["sampling_params"]["seed"]
    assert (first["cache_salt"], second["cache_salt"]) == ("version-0", "version-1")
    assert result.versions.tolist() == [0] * done + [1] * (60 - done)
    status = setup.fleet.status()
    assert (status["interrupted"], status["moved"], status["fenced"]) == (1, 0, {})


def test_drain_lets_what_runs_end_before_the_weights_come(tmp_path):
    setup, result, pauses = asyncio.run(publish_in_the_middle(tmp_path, in_flight="drain"))
    assert set(result.versions) == {0}
    assert len(setup.replicas["a"].requests) == 1
    assert setup.fleet.status()["interrupted"] == 0
    assert pauses == ["mode=abort&clear_cache=true"], "nothing is left to abort; the cache of old prompts is dropped"


def test_drain_waits_no_longer_than_its_deadline_and_aborts_the_rest(tmp_path):
    async def run():
        setup, partial = Setup(tmp_path, "a", in_flight="drain", drain_timeout_s=0.2), PartialGeneration()
        await setup.register("a")
        endless = replace(SAMPLING, max_tokens=200)
        slow = asyncio.create_task(setup.fleet.generate([1], endless, "slow", partial))
        while len(partial.token_ids) < 5:
            await asyncio.sleep(0)
        setup.replicas["a"].running.clear()  # it makes no token until the pause aborts it
        async with asyncio.timeout(60):
            await setup.publish(1)
            return setup, await slow

    setup, result = asyncio.run(run())
    assert set(result.versions) == {0, 1}
    assert setup.fleet.status()["interrupted"] == 1


def test_requests_that_were_interrupted_go_before_those_that_wait(tmp_path):
    async def run():
        setup = Setup(tmp_path, "a", in_flight="abort", max_num_seqs=2)
        await setup.register("a")
        partials = [PartialGeneration() for _ in range(6)]
        calls = [asyncio.create_task(setup.fleet.generate([i], LONG, f"r{i}", p)) for i, p in enumerate(partials)]
        while not all(len(partial.token_ids) > 2 for partial in partials[:2]):
            await asyncio.sleep(0)
        await setup.fleet.begin_publication(1, MANIFEST)
        await asyncio.sleep(0.02)
        await setup.fleet.finish_publication(1)
        await asyncio.gather(*calls)
        return [request["request_id"] for request in setup.replicas["a"].requests]

    assert set(asyncio.run(run())[2:4]) == {"r0.2", "r1.2"}


def test_settings_of_the_policies_are_checked():
    with pytest.raises(UserError, match=r"rollout.kv_on_update=keep has no meaning with rollout.in_flight=abort"):
        check_rollout(RolloutConfig(in_flight="abort", kv_on_update="keep"))
    with pytest.raises(UserError, match=r"rollout.drain_timeout_s=-1"):
        check_rollout(RolloutConfig(drain_timeout_s=-1))
    with pytest.raises(UserError, match=r"rollout.stall_timeout_s=0"):
        check_rollout(RolloutConfig(stall_timeout_s=0))
