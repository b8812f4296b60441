"""A replica that hangs, talks nonsense or fails: its requests end elsewhere, each once, and the fleet goes on."""

import asyncio

import httpx
import pytest

from a3po_megatron.rollout.control import ReplicaError
from a3po_megatron.rollout.messages import read_load
from tests.unit.rollout.fake_replica import FakeReplica
from tests.unit.rollout.fleet_of_fakes import MANIFEST, SAMPLING, Setup

pytestmark = pytest.mark.timeout(60)
NUM_REQUESTS = 20


def hangs(replica: FakeReplica) -> None:
    replica.hangs = True


def is_silent(replica: FakeReplica) -> None:
    """Stop the whole server, metrics too."""

    async def never(request):
        await asyncio.sleep(600)

    replica.handle_async_request = never


def answers_500(replica: FakeReplica) -> None:
    replica.broken.add("/inference/v1/generate")


def dies(replica: FakeReplica) -> None:
    replica.dies_after = 3


def talks(garbage: bytes):
    def talk(replica: FakeReplica) -> None:
        replica.garbage = garbage

    return talk


FAULTS = {
    "hangs while generating": (hangs, "has read and written no token for"),
    "answers nothing at all": (is_silent, "no answer to 'load' within 0.3 s"),
    "answers 500": (answers_500, "answered 500: /inference/v1/generate is broken"),
    "dies while generating": (dies, "connection lost"),
    "sends no events": (talks(b"<html>hello</html>"), "cannot read the answer"),
    "sends broken JSON": (talks(b'data: {"choices": [\n\n'), "cannot read the answer"),
    "sends another form": (talks(b'data: {"choices": [{"token_ids": "abc"}]}\n\n'), "cannot read the answer"),
    "ends early": (talks(b"data: [DONE]\n\n"), "ended before the response did"),
    "fails inside": (talks(b'data: {"error": {"message": "EngineDeadError"}}\n\n'), "EngineDeadError"),
}


@pytest.mark.parametrize(("fault", "reason"), FAULTS.values(), ids=FAULTS.keys())
def test_requests_of_a_bad_replica_end_on_the_others_and_each_ends_once(tmp_path, fault, reason):
    async def run():
        setup = Setup(tmp_path, "good", "bad", stall_timeout_s=0.3, heartbeat_s=0.05, request_timeout_s=30.0)
        await setup.register("good", "bad")
        fault(setup.replicas["bad"])
        calls = [setup.fleet.generate([i], SAMPLING, f"r{i}") for i in range(NUM_REQUESTS)]
        async with asyncio.timeout(20):
            results = await asyncio.gather(*calls)
        assert await setup.register("bad") == ["fenced"], "its supervisor restarts it"
        return setup, results

    setup, results = asyncio.run(run())
    assert [len(result.token_ids) for result in results] == [SAMPLING.max_tokens] * NUM_REQUESTS
    assert reason in setup.fleet.status()["fenced"]["bad"]
    asked = [request["request_id"].rpartition(".")[0] for request in setup.replicas["good"].requests]
    assert sorted(asked) == sorted(f"r{i}" for i in range(NUM_REQUESTS)), "the good one answered each, and each once"
    assert setup.fleet.status()["moved"] == NUM_REQUESTS // 2
    assert setup.fleet.status()["replicas"]["good"]["running"] == 0


def test_a_slow_replica_and_a_paused_one_are_not_taken_for_hung(tmp_path):
    async def run():
        setup = Setup(tmp_path, "a", stall_timeout_s=0.3, heartbeat_s=0.05)
        await setup.register("a")
        call = asyncio.create_task(setup.fleet.generate([1], SAMPLING, "r"))
        await asyncio.sleep(0)
        await setup.fleet.begin_publication(1, MANIFEST)
        await asyncio.sleep(0.7)
        await setup.fleet.finish_publication(1)
        await call
        await asyncio.sleep(0.7)  # idle
        return setup.fleet.status()

    assert asyncio.run(run())["fenced"] == {}


def test_metrics_are_summed_over_engines_and_garbage_is_refused():
    replica = FakeReplica("a")
    replica.num_running, replica.num_waiting, replica.num_tokens = 3, 2, 50
    text = replica._metrics()
    load = read_load(text + text.replace('engine="0"', 'engine="1"'))
    assert (load.running, load.waiting, load.tokens) == (6, 4, 100)
    with pytest.raises(ValueError, match="lack vllm:num_requests_running"):
        read_load("# nothing\n")
    with pytest.raises(ValueError, match="could not convert"):
        read_load("vllm:num_requests_running{} many\n")


@pytest.mark.parametrize("path", ["/get_world_size", "/weight_info"])
def test_a_control_call_answered_with_nonsense_is_an_error_of_the_server(tmp_path, path):
    async def run():
        setup = Setup(tmp_path, "a")
        await setup.register("a")
        (replica,) = setup.fleet._replicas

        async def nonsense(*arguments, **more):
            return httpx.Response(200, text="<html>")

        replica.client._call = nonsense
        with pytest.raises(ReplicaError, match="answered '<html>'"):
            await (replica.client.world_size() if "size" in path else replica.client.version())

    asyncio.run(run())
