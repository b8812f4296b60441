"""The client of one server against answers that a server may give, and must not."""

import asyncio
import json
from array import array
from dataclasses import replace

import httpx
import pytest

from a3po_megatron.config.rollout import RolloutConfig
from a3po_megatron.errors import UserError
from a3po_megatron.rollout.client import (
    NO_LOGPROB,
    PartialGeneration,
    ReplicaClient,
)
from a3po_megatron.rollout.control import ReplicaError, RequestRefused
from a3po_megatron.rollout.messages import VersionSpan, spread_versions
from a3po_megatron.rollout.sampling import SamplingSettings
from tests.unit.rollout.fake_replica import FakeReplica

CONFIG = RolloutConfig(max_model_len=64, request_timeout_s=0.5, control_timeout_s=0.3)
SAMPLING = SamplingSettings(temperature=1.0, max_tokens=4, seed=11)


def client_of(transport: httpx.AsyncBaseTransport) -> ReplicaClient:
    return ReplicaClient("r0", "http://r0", "secret", CONFIG, vocab_size=32, transport=transport)


def answering(*choices: dict, status: int = 200) -> ReplicaClient:
    """Return the client of a server that streams these choices, whatever it is asked."""
    events = "".join(f"data: {json.dumps({'choices': [choice]})}\n\n" for choice in choices)
    return client_of(httpx.MockTransport(lambda request: httpx.Response(status, text=events + "data: [DONE]\n\n")))


def piece(*tokens: int, logprob: float = -1.0, **more) -> dict:
    content = [{"token_id": token, "logprob": logprob} for token in tokens]
    return {"token_ids": list(tokens), "logprobs": {"content": content}, **more}


def spans(*edges: tuple[str, int, int]) -> list[dict]:
    return [{"version": version, "start": start, "end": end} for version, start, end in edges]


def test_pieces_are_joined_and_versions_are_per_token():
    client = answering(
        piece(5, 6), piece(7), piece(1, finish_reason="stop", weight_versions=spans(("3", 0, 2), ("4", 2, 4)))
    )
    result = asyncio.run(client.generate([2, 3], SAMPLING, "r"))
    assert result.token_ids.tolist() == [5, 6, 7, 1]
    assert result.versions.tolist() == [3, 3, 4, 4]
    assert result.logprobs.tolist() == [-1.0] * 4
    assert result.finish_reason == "stop"


def test_the_request_asks_for_the_plain_distribution_and_salts_the_prompt_cache_by_version():
    replica = FakeReplica("r0")
    asyncio.run(client_of(replica).generate([2, 3], SAMPLING, "r", lambda: 5))
    (request,) = replica.requests
    assert request["token_ids"] == [2, 3]
    assert request["cache_salt"] == "version-5"
    settings = request["sampling_params"]
    assert (settings["temperature"], settings["seed"], settings["max_tokens"], settings["logprobs"]) == (1.0, 11, 4, 0)
    assert not {"top_p", "top_k", "min_p", "min_tokens"} & set(settings)


def test_a_response_goes_on_after_the_tokens_it_has():
    replica, partial = (
        FakeReplica("r0"),
        PartialGeneration(array("i", [9, 8]), array("f", [-0.1, -0.2]), array("i", [0, 0])),
    )
    result = asyncio.run(client_of(replica).generate([2, 3], SAMPLING, "r", lambda: 0, partial))
    assert replica.requests[0]["token_ids"] == [2, 3, 9, 8]
    assert replica.requests[0]["sampling_params"]["max_tokens"] == 2
    assert replica.requests[0]["sampling_params"]["seed"] != SAMPLING.seed
    assert result.token_ids.tolist() == [9, 8, 7, 7]
    assert len(result.logprobs) == len(result.versions) == 4


@pytest.mark.parametrize(
    ("choices", "reason"),
    [
        ([piece(5)], "ended before the response did"),
        ([piece(5, finish_reason="error", weight_versions=spans(("0", 0, 1)))], "ended with 'error'"),
        ([piece(5, finish_reason="length", weight_versions=spans(("0", 0, 1)))], "4 were asked for"),
        ([piece(5, finish_reason="stop", weight_versions=None)], "cover 0 of 1 tokens"),
        ([piece(5, finish_reason="stop", weight_versions=spans(("default", 0, 1)))], "spans are not usable"),
        ([piece(5, 6, finish_reason="stop", weight_versions=spans(("0", 0, 1)))], "cover 1 of 2 tokens"),
        ([piece(5, logprob=NO_LOGPROB, finish_reason="stop", weight_versions=spans(("0", 0, 1)))], "NaN"),
        ([{"token_ids": [5], "logprobs": None, "finish_reason": "stop"}], "1 tokens came with 0 log-probabilities"),
        ([piece(5), piece(32)], "token id 32 is not in the vocabulary of 32"),
        (
            [piece(5), piece(6, logprob=NO_LOGPROB)],
            "no log-probability for token 1 of the response (NaN in the model?): -9999",
        ),
    ],
)
def test_an_answer_that_cannot_be_trusted_is_an_error_that_names_the_server(choices, reason):
    with pytest.raises(ReplicaError, match="replica r0 at http://r0: ") as error:
        asyncio.run(answering(*choices).generate([2, 3], SAMPLING, "r"))
    assert reason in str(error.value)


@pytest.mark.parametrize(
    ("choices", "kept"),
    [
        ([piece(5), piece(6)], [9, 8, 5, 6]),  # broke off: its tokens are good
        ([piece(5), piece(6), piece(7)], [9, 8, 5, 6, 7]),
        ([piece(5), piece(32)], [9, 8]),
        ([piece(5), piece(6, finish_reason="stop", weight_versions=None)], [9, 8]),
        ([piece(5), piece(6, finish_reason="error", weight_versions=spans(("0", 0, 2)))], [9, 8]),
    ],
)
def test_of_an_answer_that_cannot_be_used_the_partial_response_keeps_nothing(choices, kept):
    partial = PartialGeneration(array("i", [9, 8]), array("f", [-0.1, -0.2]), array("i", [3, 3]))
    with pytest.raises(ReplicaError):
        asyncio.run(answering(*choices).generate([2, 3], replace(SAMPLING, max_tokens=6), "r", lambda: 0, partial))
    assert partial.token_ids.tolist() == kept
    assert len(partial.logprobs) == len(partial.versions) == len(kept)


def test_a_full_response_without_an_ending_gets_its_last_token_anew():
    replica, partial = (
        FakeReplica("r0"),
        PartialGeneration(array("i", [9, 8, 9, 8]), array("f", [-0.1] * 4), array("i", [0] * 4)),
    )
    result = asyncio.run(client_of(replica).generate([2, 3], SAMPLING, "r", lambda: 0, partial))
    assert replica.requests[0]["sampling_params"]["max_tokens"] == 1
    assert result.token_ids.tolist() == [9, 8, 9, 7]


def test_a_connection_that_breaks_after_the_ending_leaves_no_ended_response_to_go_on_from():
    class Breaks(httpx.AsyncByteStream):
        async def __aiter__(self):
            last = piece(1, finish_reason="stop", weight_versions=spans(("0", 0, 2)))
            for choice in (piece(5), last):
                yield f"data: {json.dumps({'choices': [choice]})}\n\n".encode()

        async def aclose(self):
            raise httpx.ReadError("reset")

    partial = PartialGeneration()
    client = client_of(httpx.MockTransport(lambda request: httpx.Response(200, stream=Breaks())))
    with pytest.raises(ReplicaError, match="connection lost"):
        asyncio.run(client.generate([2, 3], SAMPLING, "r", lambda: 0, partial))
    assert partial.token_ids.tolist() == [5]


def test_gaps_between_spans_are_refused():
    with pytest.raises(ValueError, match="not usable"):
        spread_versions([VersionSpan("0", 0, 1), VersionSpan("1", 2, 3)], 3)


def test_http_errors_tell_a_bad_request_from_a_bad_server():
    with pytest.raises(RequestRefused, match="answered 400"):
        asyncio.run(answering(status=400).generate([2], SAMPLING, "r"))
    with pytest.raises(ReplicaError, match="answered 503") as error:
        asyncio.run(answering(status=503).pause("keep", clear_cache=True))
    assert not isinstance(error.value, RequestRefused)


@pytest.mark.parametrize("prompt", [[32], [-1]])
def test_a_token_outside_the_vocabulary_never_reaches_a_server(prompt):
    with pytest.raises(UserError, match="vocabulary of 32"):
        asyncio.run(answering().generate(prompt, SAMPLING, "r"))


def test_every_wait_has_a_deadline_and_says_what_it_waited_for():
    class Silent(httpx.AsyncBaseTransport):
        async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
            await asyncio.sleep(60)
            raise AssertionError

    with pytest.raises(ReplicaError, match=r"waited 0.5 s for a response of up to 4 tokens \(request r\); 0 tokens"):
        asyncio.run(client_of(Silent()).generate([2], SAMPLING, "r"))
    with pytest.raises(ReplicaError, match=r"no answer to 'resume' within 0.3 s"):
        asyncio.run(client_of(Silent()).resume())
