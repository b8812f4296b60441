"""A user's HTTP endpoint: what is asked, what is believed, what is tried again."""

import asyncio
import json
from collections.abc import Callable

import httpx
import pytest

from a3po_megatron.config.reward import HttpRewardConfig
from a3po_megatron.records import Verdict
from a3po_megatron.reward import endpoint
from a3po_megatron.reward.base import RewardError

CONFIG = HttpRewardConfig(weight=1.0, url="http://127.0.0.1:9/judge", timeout_s=5, max_tries=3)


@pytest.fixture(autouse=True)
def no_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(endpoint, "FIRST_PAUSE_S", 0.001)


def ask(handler: Callable[[httpx.Request], httpx.Response], config: HttpRewardConfig = CONFIG) -> list[Verdict]:
    async def main() -> list[Verdict]:
        asked = endpoint.Endpoint(config, httpx.MockTransport(handler))
        try:
            return await asked.judge("p1", "42", ["one", "two \ud800"])
        finally:
            await asked.aclose()

    return asyncio.run(main())


def test_a_group_is_one_request_and_the_answers_are_its_verdicts() -> None:
    bodies = []

    def handler(request: httpx.Request) -> httpx.Response:
        bodies.append(json.loads(request.content))
        return httpx.Response(200, json={"rewards": [1, 0.25], "reasons": ["good", ""]})

    assert ask(handler) == [Verdict(1.0, "good"), Verdict(0.25, "judged by the endpoint")]
    assert bodies == [{"problem_id": "p1", "answer": "42", "responses": ["one", "two ?"]}]


def test_passing_trouble_is_tried_again_and_persistent_trouble_ends_the_run() -> None:
    answers = [httpx.Response(503, text="busy"), httpx.Response(429), httpx.Response(200, json={"rewards": [0, 1]})]
    assert [v.reward for v in ask(lambda request: answers.pop(0))] == [0.0, 1.0]

    def down(request: httpx.Request) -> httpx.Response:
        raise httpx.ConnectError("no one there")

    with pytest.raises(RewardError, match=r"reward\.http\.url=.*: failed 3 times, last: no one there"):
        ask(down)


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        (httpx.Response(404, text="what?"), "status 404: what?"),
        (httpx.Response(200, text="fine"), "the answer is not JSON"),
        (httpx.Response(200, json=[1, 2]), r'expected {"rewards": \[2 numbers\]}'),
        (httpx.Response(200, json={"rewards": [1]}), r'expected {"rewards": \[2 numbers\]}'),
        (httpx.Response(200, json={"rewards": [1, "2"]}), "a reward of '2' is not a finite number"),
        (httpx.Response(200, json={"rewards": [1, True]}), "a reward of True is not a finite number"),
        (httpx.Response(200, text='{"rewards": [1, NaN]}'), "a reward of nan is not a finite number"),
        (httpx.Response(200, json={"rewards": [1, 2], "reasons": [1, 2]}), '"reasons" must be 2 texts'),
        (httpx.Response(200, text="[" * 2_000_000), "an answer of 2000000 bytes"),
    ],
)
def test_an_answer_that_is_no_reward_ends_the_run_at_once(answer: httpx.Response, message: str) -> None:
    calls = []

    def handler(request: httpx.Request) -> httpx.Response:
        calls.append(request)
        return answer

    with pytest.raises(RewardError, match=message):
        ask(handler)
    assert len(calls) == 1


def test_an_endpoint_that_does_not_answer_is_given_up_after_its_deadline() -> None:
    async def main() -> None:
        async def silent(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            await reader.read()

        server = await asyncio.start_server(silent, "127.0.0.1", 0)
        port = server.sockets[0].getsockname()[1]
        config = HttpRewardConfig(1.0, f"http://127.0.0.1:{port}/", timeout_s=0.2, max_tries=2)
        asked = endpoint.Endpoint(config)
        with pytest.raises(RewardError, match="failed 2 times"):
            await asked.judge("p", "42", ["x"])
        await asked.aclose()
        server.close()

    asyncio.run(main())
