"""A real vLLM server behind our arguments, middleware and client: only with the token, and exact log-probabilities."""

import asyncio
from pathlib import Path

import httpx
import numpy as np
import pytest
import torch

from a3po_megatron.errors import UserError
from a3po_megatron.rollout.control import RequestRefused
from a3po_megatron.rollout.sampling import SamplingSettings
from tests.engine.conftest import TOKEN
from tests.engine.tiny_model import END_TOKEN, reference_logprobs

pytestmark = pytest.mark.timeout(300)  # the first test waits for the server

PROMPT = [5, 17, 42, 8]
TOLERANCE = 1e-4  # float32 on both sides; 5e-6 is typical


def sampling(**changes) -> SamplingSettings:
    return SamplingSettings(**({"temperature": 1.0, "max_tokens": 40, "seed": 7, "ignore_eos": True} | changes))


def test_every_route_refuses_a_request_without_the_token(live):
    url = live.server.url
    with httpx.Client(base_url=url, trust_env=False) as anybody:
        schema = httpx.get(f"{url}/openapi.json", headers={"Authorization": f"Bearer {TOKEN}"}).json()
        routes = {(method, path) for path, methods in schema["paths"].items() for method in methods}
        # Mounted applications and undocumented routes are not in the schema.
        routes |= {("get", path) for path in ("/openapi.json", "/docs", "/metrics", "/no/such/route")}
        assert len(routes) > 30
        assert {("post", "/pause"), ("post", "/update_weights"), ("post", "/collective_rpc")} <= routes
        assert {("get", "/health"), ("post", "/inference/v1/generate")} <= routes
        for method, path in sorted(routes):
            assert anybody.request(method, path).status_code == 401, f"{method} {path}"
        assert anybody.options("/pause").status_code == 401
        for header in ("Bearer wrong", f"bearer {TOKEN}", f"Bearer {TOKEN}0", TOKEN, "Bearer"):
            assert anybody.get("/health", headers={"Authorization": header}).status_code == 401, header
        upgrade = {"Connection": "Upgrade", "Upgrade": "websocket", "Sec-WebSocket-Version": "13"}
        upgrade["Sec-WebSocket-Key"] = "dGhlIHNhbXBsZSBub25jZQ=="
        assert anybody.get("/v1/realtime", headers=upgrade).status_code in (401, 403)
        assert anybody.get("/health", headers={"Authorization": f"Bearer {TOKEN}"}).status_code == 200


def test_the_token_is_not_on_any_command_line(live):
    command_line = Path(f"/proc/{live.server.pid}/cmdline").read_text()
    assert "vllm" in command_line
    assert TOKEN not in command_line


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_logprobs_are_those_of_transformers_at_the_sampling_temperature(live, temperature):
    async def run():
        return await live.client().generate(
            PROMPT, sampling(temperature=temperature), f"t{temperature}", lambda: live.version
        )

    result = asyncio.run(run())
    assert len(result.token_ids) == 40
    assert result.finish_reason == "length"
    assert set(result.versions) == {live.version}
    expected = reference_logprobs(live.model, PROMPT, result.token_ids.tolist(), temperature)
    np.testing.assert_allclose(result.logprobs, expected, atol=TOLERANCE, rtol=0)


def test_many_requests_at_once_are_each_exact_and_reproducible(live):
    prompts = [[3 + i, 20 + i, 50 + i % 3] for i in range(12)]

    async def run():
        client = live.client()
        calls = [
            client.generate(prompt, sampling(seed=i), f"m{i}", lambda: live.version) for i, prompt in enumerate(prompts)
        ]
        return await asyncio.gather(*calls)

    first, second = asyncio.run(run()), asyncio.run(run())
    assert len({tuple(result.token_ids) for result in first}) == len(prompts)
    for prompt, result, again in zip(prompts, first, second, strict=True):
        expected = reference_logprobs(live.model, prompt, result.token_ids.tolist(), 1.0)
        np.testing.assert_allclose(result.logprobs, expected, atol=TOLERANCE, rtol=0)
        assert result.token_ids.tolist() == again.token_ids.tolist()


def test_a_response_ends_with_the_models_end_token_and_contains_it(live):
    async def run():
        client = live.client()
        settings = [sampling(max_tokens=400, ignore_eos=False, seed=seed) for seed in range(6)]
        calls = [client.generate(PROMPT, s, f"e{i}", lambda: live.version) for i, s in enumerate(settings)]
        return await asyncio.gather(*calls)

    stopped = [result for result in asyncio.run(run()) if result.finish_reason == "stop"]
    assert stopped, "400 tokens of a random model hold no end token in six tries"
    for result in stopped:
        assert result.token_ids[-1] == END_TOKEN
        assert END_TOKEN not in result.token_ids[:-1]


def test_greedy_evaluation_follows_the_most_probable_token(live):
    async def run():
        return await live.client().generate(PROMPT, sampling(temperature=0.0, evaluation=True, seed=None), "greedy")

    response = asyncio.run(run()).token_ids.tolist()
    reference = live.model.generate(
        torch.tensor([PROMPT]), max_new_tokens=40, min_new_tokens=40, do_sample=False, eos_token_id=None
    )[0, len(PROMPT) :].tolist()
    assert response == reference


def test_a_wrong_token_and_an_impossible_request_are_named(live):
    async def run():
        with pytest.raises(RequestRefused, match=r"'health' answered 401: .*token"):
            await live.client(token="wrong").health()
        with pytest.raises(UserError, match=r"prompt of 5000 tokens .* rollout.max_model_len=4096"):
            await live.client().generate([5] * 5000, sampling(), "long")
        # vLLM itself would die of it.
        with pytest.raises(UserError, match=r"request odd: token id 96 .* vocabulary of 96"):
            await live.client().generate([5, 96], sampling(), "odd")

    asyncio.run(run())
