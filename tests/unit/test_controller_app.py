"""The controller's HTTP routes: token, refusals, long poll."""

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path

import httpx
import pytest
from fastapi.routing import APIRoute

from a3po_megatron import wire
from a3po_megatron.controller.app import create_app
from a3po_megatron.controller.loop import Controller
from tests.fakes.fleet import FakeFleet
from tests.fakes.run import TOKEN, make_controller, next_batch, post, publish, register, running

pytestmark = pytest.mark.timeout(60)

ROUTES = {
    ("POST", "/replicas/register"),
    ("POST", "/replicas/deregister"),
    ("POST", "/batch"),
    ("POST", "/publish/begin"),
    ("POST", "/publish/finish"),
    ("POST", "/step"),
    ("POST", "/done"),
    ("GET", "/status"),
}


def in_a_run(tmp_path: Path, talk: Callable[[Controller, httpx.AsyncClient], Awaitable[None]]) -> None:
    async def main() -> None:
        controller = make_controller(tmp_path, FakeFleet(), 6, poll_s=0.05)
        async with asyncio.timeout(30), running(controller) as (client, run):
            await talk(controller, client)
            assert not run.done()

    asyncio.run(main())


def test_every_route_known_or_not_answers_401_without_the_token(tmp_path: Path) -> None:
    async def main() -> None:
        controller = make_controller(tmp_path, FakeFleet())
        app = create_app(controller, TOKEN)
        routes = {(m, r.path) for r in app.routes if isinstance(r, APIRoute) for m in r.methods}
        assert routes == ROUTES  # a new route shows up here, and nothing but these (no docs pages)
        wrong = [
            {},
            {"Authorization": "Bearer "},
            {"Authorization": "Bearer x"},
            {"Authorization": f"bearer {TOKEN}"},
            {"Authorization": TOKEN},
            {"Authorization": f"Bearer {TOKEN[:-1]}"},
            {"Authorization": f"Bearer {TOKEN}x"},
            {"X-Token": TOKEN},
        ]
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://controller") as client:
            for method, path in [*routes, ("GET", "/"), ("GET", "/docs"), ("PUT", "/batch"), ("POST", "/nothing")]:
                for headers in wrong:
                    answer = await client.request(method, path, headers=headers)
                    assert answer.status_code == 401, (method, path, headers)
                    assert TOKEN not in answer.text
        assert controller.version == 0
        assert controller.done_reason is None

    asyncio.run(main())


def test_an_empty_token_is_refused(tmp_path: Path) -> None:
    async def main() -> None:
        with pytest.raises(ValueError, match="token is empty"):
            create_app(make_controller(tmp_path, FakeFleet()), "")

    asyncio.run(main())


def test_a_batch_that_is_not_ready_is_204_and_a_second_ask_gets_the_same_batch(tmp_path: Path) -> None:
    async def talk(controller: Controller, client: httpx.AsyncClient) -> None:
        assert (await post(client, "/batch", version=0)).status_code == 204
        await register(client)
        assert await next_batch(client, 0) is not None
        first, second = [(await post(client, "/batch", version=0)).content for _ in range(2)]
        assert first == second
        assert controller.buffer.num_taken == 3

    in_a_run(tmp_path, talk)


def test_calls_that_do_not_fit_the_state_of_the_run_are_refused_with_one_line(tmp_path: Path) -> None:
    async def talk(controller: Controller, client: httpx.AsyncClient) -> None:
        await register(client)
        await next_batch(client, 0)
        manifest = {"names": ["w"], "dtypes": ["float32"], "shapes": [[1]]}
        refused = [
            (await post(client, "/batch", version=1), "a batch for version 1: the fleet serves version 0"),
            (await post(client, "/step", step=1, version=1, metrics={}), "the batch of version 1 was not the last one"),
            (await post(client, "/publish/finish", version=1), "which was not begun"),
            (
                await post(client, "/publish/begin", version=2, **manifest),
                "publication of version 2: version 0 is live",
            ),
        ]
        assert (await post(client, "/publish/begin", version=1, **manifest)).status_code == 200
        again = await post(client, "/publish/begin", version=1, **manifest)
        refused.append((again, "version 0 is being replaced by version 1"))
        for answer, reason in refused:
            assert answer.status_code == 409
            assert reason in answer.json()["error"]
            assert "\n" not in answer.json()["error"]

    in_a_run(tmp_path, talk)


def test_a_body_that_is_not_the_message_is_422_and_names_the_field(tmp_path: Path) -> None:
    async def talk(controller: Controller, client: httpx.AsyncClient) -> None:
        for fields, named in [({}, "version"), ({"version": "1"}, "version"), ({"version": 0, "more": 1}, "more")]:
            answer = await post(client, "/batch", **fields)
            assert answer.status_code == 422
            assert named in answer.json()["error"]
        assert (await client.post("/batch", content=b"\xc1 no msgpack")).status_code == 422

    in_a_run(tmp_path, talk)


def test_when_every_replica_lost_its_weights_the_actor_is_asked_to_publish_them_again(tmp_path: Path) -> None:
    async def talk(controller: Controller, client: httpx.AsyncClient) -> None:
        controller.parts.fleet.needs_publication = True  # type: ignore[misc]
        answer = await post(client, "/batch", version=0)
        assert answer.status_code == 205
        await publish(client, 0)
        assert controller.version == 0
        answer = await post(client, "/publish/begin", version=0, names=["w"], dtypes=["float32"], shapes=[[2, 3]])
        assert answer.status_code == 409, "only when it is needed"

    in_a_run(tmp_path, talk)


def test_a_publication_that_was_asked_for_is_begun_even_when_the_last_replica_has_died_meanwhile(
    tmp_path: Path,
) -> None:
    async def talk(controller: Controller, client: httpx.AsyncClient) -> None:
        controller.parts.fleet.needs_publication = True  # type: ignore[misc]
        assert (await post(client, "/batch", version=0)).status_code == 205
        controller.parts.fleet.needs_publication = False  # type: ignore[misc]
        await publish(client, 0)
        assert (await post(client, "/batch", version=0)).status_code == 204, "asked for once"

    in_a_run(tmp_path, talk)


def test_a_publication_that_broke_off_is_begun_again_and_only_that_one(tmp_path: Path) -> None:
    async def talk(controller: Controller, client: httpx.AsyncClient) -> None:
        manifest = {"names": ["w"], "dtypes": ["float32"], "shapes": [[2, 3]]}
        await register(client)
        await next_batch(client, 0)
        controller.parts.fleet.attempts_that_fail = 2  # type: ignore[attr-defined]
        for attempt in range(3):
            answer = await post(client, "/publish/begin", version=1, **manifest)
            assert answer.status_code == 200, answer.text
            answer = await post(client, "/publish/finish", version=1, error="a member died")
            assert wire.decode(answer.content, dict)["again"] == (attempt < 2)
            assert controller.version == (0 if attempt < 2 else 1)
        answer = await post(client, "/publish/begin", version=1, **manifest)
        assert answer.status_code == 409

    in_a_run(tmp_path, talk)


def test_the_status_page_says_where_the_run_is(tmp_path: Path) -> None:
    async def talk(controller: Controller, client: httpx.AsyncClient) -> None:
        await register(client)
        await next_batch(client, 0)
        await publish(client, 1)
        status = (await client.get("/status")).json()
        assert (status["version"], status["steps"], status["publishing"], status["done"]) == (1, 6, False, None)
        assert status["fleet"] == {"replicas": {"r0": "http://127.0.0.1:1"}}
        assert status["evaluations"][0]["version"] == 0

    in_a_run(tmp_path, talk)
