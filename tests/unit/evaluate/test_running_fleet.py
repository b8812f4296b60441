"""Servers that run already: found through a controller or by url, asked with the version they have, left alone."""

import asyncio
import json
from dataclasses import replace
from typing import Any

import httpx
import pytest

from a3po_megatron.config.rollout import RolloutConfig
from a3po_megatron.errors import UserError
from a3po_megatron.evaluate import running_fleet
from a3po_megatron.evaluate.running_fleet import RunningFleet
from a3po_megatron.rollout.control import ReplicaError
from a3po_megatron.rollout.sampling import SamplingSettings
from tests.unit.rollout.fake_replica import FakeReplica

pytestmark = pytest.mark.timeout(60)
SAMPLING = SamplingSettings(temperature=0.0, max_tokens=6, evaluation=True)
CONFIG = RolloutConfig(request_timeout_s=5, control_timeout_s=2)


class Server(FakeReplica):
    """A vLLM server that says its version."""

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        if request.url.path == "/weight_info" and "/weight_info" not in self.broken:
            return httpx.Response(200, json={"weight_version": self.version})
        if request.url.path == "/status":
            return httpx.Response(404, json={"detail": "Not Found"})
        return await super().handle_async_request(request)


class Controller(httpx.AsyncBaseTransport):
    """Answers /status like the real one."""

    def __init__(self, **states: str) -> None:
        self.states = states

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        if request.headers["Authorization"] != "Bearer secret":
            return httpx.Response(401, json={"error": "the run's token is missing or wrong"})
        replicas = {
            name: {"url": f"http://{name}", "state": state, "running": 0} for name, state in self.states.items()
        }
        return httpx.Response(200, json={"fleet": {"replicas": replicas}})


def fleet_of(places: dict[str, httpx.AsyncBaseTransport], token: str = "secret") -> RunningFleet:
    return RunningFleet(CONFIG, token, 16, lambda url: places[url.removeprefix("http://")])


def test_the_current_replicas_of_a_controller_share_the_requests() -> None:
    a, b, behind = Server("a"), Server("b"), Server("behind")
    places: dict[str, Any] = {
        "a": a,
        "b": b,
        "behind": behind,
        "c": Controller(a="current", behind="behind", b="current"),
    }

    async def run() -> None:
        fleet = fleet_of(places)
        await fleet.connect(["http://c"])
        assert fleet.urls == ["http://a", "http://b"]
        await asyncio.gather(*(fleet.generate([1, 2], SAMPLING, f"r{i}") for i in range(6)))
        await fleet.aclose()

    asyncio.run(run())
    assert (len(a.requests), len(b.requests), len(behind.requests)) == (3, 3, 0)
    assert not [call for call in a.calls + b.calls if "pause" in call or "update" in call]  # asked, never controlled


def test_a_prompt_read_under_other_weights_is_not_reused_and_tokens_name_their_versions() -> None:
    server = Server("a")
    server.version = "7"

    async def run() -> None:
        fleet = fleet_of({"a": server})
        await fleet.connect(["http://a"])
        first = await fleet.generate([1, 2], SAMPLING, "first")
        server.version = "8"  # its run has published
        second = await fleet.generate([1, 2], SAMPLING, "second")
        assert (set(first.versions.tolist()), set(second.versions.tolist())) == ({7}, {8})
        await fleet.aclose()

    asyncio.run(run())
    assert [request["cache_salt"] for request in server.requests] == ["version-7", "version-8"]


def test_a_response_goes_on_where_the_controller_has_started_another_server() -> None:
    dying, fresh = Server("dying"), Server("fresh")
    dying.dies_after = 4
    controller = Controller(dying="current")

    async def run() -> None:
        fleet = fleet_of({"dying": dying, "fresh": fresh, "c": controller})
        await fleet.connect(["http://c"])
        controller.states = {"fresh": "current"}
        response = await fleet.generate([1, 2], SAMPLING, "r")
        assert len(response.token_ids) == 6
        assert fleet.urls == ["http://fresh"]
        await fleet.aclose()

    asyncio.run(run())
    assert fresh.requests[0]["token_ids"] == [1, 2, 7, 7, 7, 7]  # what the first server had given


def test_a_request_that_fails_again_and_again_ends_the_evaluation_and_says_why() -> None:
    broken = Server("broken")
    broken.broken.add("/inference/v1/generate")

    async def run() -> None:
        fleet = fleet_of({"broken": broken})
        await fleet.connect(["http://broken"])
        with pytest.raises(
            ReplicaError, match=r"request r failed 4 times: replica asked at http://broken: .* is broken"
        ):
            await fleet.generate([1, 2], SAMPLING, "r")
        await fleet.aclose()

    asyncio.run(run())


def test_one_failure_of_the_only_server_is_not_the_end() -> None:
    flaky = Server("flaky")
    flaky.dies_after = 2

    async def run() -> None:
        fleet = fleet_of({"flaky": flaky})
        await fleet.connect(["http://flaky"])
        response = await fleet.generate([1, 2], SAMPLING, "r")  # two tokens a try
        assert len(response.token_ids) == 6
        await fleet.aclose()

    asyncio.run(run())
    assert [len(request["token_ids"]) for request in flaky.requests] == [2, 4, 6]


def unnumbered() -> Server:
    server = Server("a")
    server.version = "default"
    return server


@pytest.mark.parametrize(
    ("place", "token", "message"),
    [
        (Controller(a="current"), "wrong", "another run's token, or none"),
        (Controller(a="behind"), "secret", r"the controller has no server with the current weights \(it has 1\)"),
        (httpx.AsyncHTTPTransport(), "secret", "target=http://127.0.0.1:1: nobody answers there .ConnectError."),
        (
            httpx.MockTransport(lambda _: httpx.Response(200, text="<p>hello")),
            "secret",
            "what no controller does: '<p>hello'",
        ),
        (httpx.MockTransport(lambda _: httpx.Response(200, json=[])), "secret", r"what no controller does: '\[\]'"),
        (unnumbered(), "secret", "its weights are of version 'default', not a number: no server of a run"),
    ],
)
def test_a_fleet_that_cannot_be_asked_is_a_users_mistake(
    place: httpx.AsyncBaseTransport, token: str, message: str
) -> None:
    async def run() -> None:
        fleet = fleet_of({"127.0.0.1:1": place}, token)
        with pytest.raises(UserError, match=message):
            await fleet.connect(["http://127.0.0.1:1"])
        await fleet.aclose()

    asyncio.run(run())


class Aborting(Server):
    """Aborts every response after one token, with new weights each time or with none."""

    publishes = False

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        if request.url.path != "/inference/v1/generate":
            return await super().handle_async_request(request)
        self.requests.append({})
        content = [{"token_id": 7, "logprob": -0.5}]
        span = {"version": self.version, "start": 0, "end": 1}
        choice = {
            "token_ids": [7],
            "logprobs": {"content": content},
            "finish_reason": "abort",
            "weight_versions": [span],
        }
        if self.publishes:
            self.version = str(int(self.version) + 1)
            if len(self.requests) == SAMPLING.max_tokens:
                choice["finish_reason"] = "length"
        return httpx.Response(200, text=f"data: {json.dumps({'choices': [choice]})}\n\n")


def test_an_interruption_is_forgiven_once_for_each_version(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(running_fleet, "RETRY_S", 0.01)
    endless, training = Aborting("endless"), Aborting("training")
    training.publishes = True

    async def run() -> None:
        fleet = fleet_of({"endless": endless, "training": training})
        await fleet.connect(["http://training"])
        response = await fleet.generate([1, 2], SAMPLING, "r")
        assert response.versions.tolist() == [0, 1, 2, 3, 4, 5]
        await fleet.aclose()
        fleet = fleet_of({"endless": endless})
        await fleet.connect(["http://endless"])
        with pytest.raises(ReplicaError, match="request r failed 4 times: replica asked at http://endless: aborted"):
            await fleet.generate([1, 2], replace(SAMPLING, max_tokens=50), "r")
        await fleet.aclose()

    asyncio.run(run())
    assert len(endless.requests) == 5
