"""A replica that hangs, talks nonsense or fails: its requests end elsewhere, each once, and the fleet goes on."""

import asyncio
import json

import httpx
import pytest

from a3po_megatron.rollout.control import ReplicaError
from a3po_megatron.rollout.messages import read_load
from tests.unit.rollout.fake_replica import FakeReplica
from tests.unit.rollout.fleet_of_fakes import MANIFEST, SAMPLING, Setup

pytestmark = pytest.mark.timeout(60)
NUM_REQUESTS = 20
VOCAB_SIZE = 512


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


def event(*tokens: int, logprob: float = -0.5, **ending) -> bytes:
    content = [{"token_id": token, "logprob": logprob} for token in tokens]
    choice = {"token_ids": list(tokens), "logprobs": {"content": content}, **ending}
    return f"data: {json.dumps({'choices': [choice]})}\n\n".encode()


def ended(reason: str, *spans: tuple[str, int, int]) -> dict:
    keys = ("version", "start", "end")
    return {"finish_reason": reason, "weight_versions": [dict(zip(keys, span, strict=True)) for span in spans]}


FULL = [1] * SAMPLING.max_tokens
FAULTS = {
    "hangs while generating": (hangs, "has read and written no token for"),
    "answers nothing at all": (is_silent, "no answer to 'load' within 0.3 s"),
    "answers 500": (answers_500, "answered 500: /inference/v1/generate is broken"),
    "dies while generating": (dies, "connection lost"),
    "sends no events": (talks(b"<html>hello</html>"), "cannot use the answer"),
    "sends broken JSON": (talks(b'data: {"choices": [\n\n'), "cannot use the answer"),
    "sends another form": (talks(b'data: {"choices": [{"token_ids": "abc"}]}\n\n'), "cannot use the answer"),
    "ends early": (talks(event(1) + b"data: [DONE]\n\n"), "ended before the response did"),
    "stops, of no version": (talks(event(1, 1) + event(2, **ended("stop", ("x", 0, 3)))), "spans are not usable"),
    "is full, of no version": (talks(event(*FULL, **ended("length"))), "cover 0 of 20 tokens"),
    "is full, and does not end": (talks(event(*FULL)), "ended before the response did"),
    "draws from NaN": (talks(event(1) + event(1, logprob=-9999.0) + event(1)), "no log-probability for token 1"),
    "is likelier than sure": (
        talks(event(1, logprob=0.5)),
        "no log-probability for token 0 of the response (NaN in the model?): 0.5",
    ),
    "draws a token below the vocabulary": (talks(event(1, -1)), "token id -1 is not in the vocabulary"),
    "draws a token above the vocabulary": (talks(event(1, VOCAB_SIZE)), f"token id {VOCAB_SIZE} is not in"),
    "draws a token beyond all numbers": (talks(event(10**12)), "token id 1000000000000 is not in the vocabulary"),
    "covers more than it drew": (talks(event(1, **ended("stop", ("0", 0, 10**12)))), "spans are not usable"),
    "has a version beyond all numbers": (talks(event(1, **ended("stop", ("9" * 12, 0, 1)))), "spans are not usable"),
    "aborts what nobody told it to": (talks(event(1, **ended("abort", ("0", 0, 1)))), "it was not asked to abort"),
    "fails inside": (talks(b'data: {"error": {"message": "EngineDeadError"}}\n\n'), "EngineDeadError"),
}

TOKENS_STAY = ("ended before the response did", "it was not asked to abort")  # good ones, of an answer that broke off


@pytest.mark.parametrize(("fault", "reason"), FAULTS.values(), ids=FAULTS.keys())
def test_requests_of_a_bad_replica_end_on_the_others_and_each_ends_once(tmp_path, fault, reason):
    async def run():
        setup = Setup(tmp_path, "good", "bad", stall_timeout_s=0.3, heartbeat_s=0.05, request_timeout_s=30.0)
        await setup.register("good", "bad")
        fault(setup.replicas["bad"])
        calls = [setup.fleet.generate([i], SAMPLING, f"r{i}") for i in range(NUM_REQUESTS)]
        async with asyncio.timeout(60):
            results = await asyncio.gather(*calls)
        assert await setup.register("bad") == ["fenced"], "its supervisor restarts it"
        return setup, results

    setup, results = asyncio.run(run())
    assert [len(result.token_ids) for result in results] == [SAMPLING.max_tokens] * NUM_REQUESTS
    drawn = {token for result in results for token in result.token_ids.tolist()}
    assert drawn == ({1, 7} if reason in TOKENS_STAY else {7}), "of an answer that cannot be used nothing is left"
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


@pytest.mark.parametrize("held", [False, True])
def test_the_watch_of_a_replica_ends_with_it(tmp_path, held):
    async def run():
        setup = Setup(tmp_path, "a", "b", heartbeat_s=0.01)
        await setup.register("a", "b")
        if held:
            await setup.fleet.begin_publication(1, MANIFEST)
        await setup.fleet.deregister("a", "gone")
        async with asyncio.timeout(60):
            while len(setup.fleet._watches) > 1:
                await asyncio.sleep(0.01)
        return [watching.get_name() for watching in setup.fleet._watches], setup.fleet.status()["fenced"]

    assert asyncio.run(run()) == (["watch b"], {"a": "gone"})
