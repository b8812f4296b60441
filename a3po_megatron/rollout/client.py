"""Async client of ONE vLLM server: token ids in; token ids, log-probabilities and weight versions out; control calls.

Imports neither torch nor vllm. Every call has a deadline; an error says which server, what was asked and why it failed.
"""

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import httpx
import numpy as np

from a3po_megatron.config.schema import RolloutConfig
from a3po_megatron.errors import UserError
from a3po_megatron.records import Float32, Int32
from a3po_megatron.rollout.sampling import SamplingSettings
from a3po_megatron.rollout.server_args import MODEL_NAME

NO_LOGPROB = -9999.0  # what vLLM reports in place of NaN, -inf, or a log-probability it does not have


class ReplicaError(RuntimeError):
    """A server failed, was too slow, or answered what it must not. Its requests can be sent to another replica."""


class RequestRefused(ReplicaError):
    """The server refused the request itself (HTTP 4xx); another replica would refuse it too."""


@dataclass(frozen=True)
class Generation:
    """One finished response. Letters: R response tokens."""

    token_ids: Int32  # [R]
    logprobs: Float32  # [R] of the distribution that each token was drawn from (after temperature)
    versions: Int32  # [R] weight version that drew each token, from the server's own spans
    finish_reason: str  # "stop" or "length"


@dataclass
class PartialGeneration:
    """A response on its way, filled by `generate` as tokens arrive. A snapshot may copy it; `generate` can go on.

    A token's version is known exactly only when the response ends. Until then it is the version that was current before
    the token's piece was sent: never newer than the truth, at most `stream_interval` tokens a publication older.
    """

    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)


class ReplicaClient:
    """Talks to the server at `url` with the run's `token`. Close with `aclose`."""

    def __init__(
        self,
        name: str,
        url: str,
        token: str,
        config: RolloutConfig,
        vocab_size: int | None = None,
        transport: httpx.AsyncBaseTransport | None = None,
    ) -> None:
        """`vocab_size`: of the model, to refuse prompts outside it, which would end the server. None: unknown."""
        self.name = name
        self.url = url
        self._config = config
        self._vocab_size = vocab_size
        self._http = httpx.AsyncClient(
            base_url=url,
            headers={"Authorization": f"Bearer {token}"},
            timeout=httpx.Timeout(config.control_timeout_s),
            limits=httpx.Limits(max_connections=None, max_keepalive_connections=None),
            transport=transport,
            trust_env=False,  # no proxy between roles
        )

    async def generate(
        self,
        prompt_ids: Sequence[int] | Int32,
        sampling: SamplingSettings,
        request_id: str,
        current_version: Callable[[], int] = lambda: 0,
        partial: PartialGeneration | None = None,
    ) -> Generation:
        """Sample one response to `prompt_ids` and return it once it ends.

        `partial` receives tokens as they arrive; when it holds tokens already, the response goes on after them, and
        they are part of the result. `current_version` tells the fleet's version now (for labels of partial tokens, and
        so that prompts cached under older weights are not reused). Raises UserError for settings that cannot give a
        true sample, ReplicaError when this server cannot finish the response.
        """
        sampling.check()
        partial = PartialGeneration() if partial is None else partial
        done = len(partial.token_ids)
        prompt = [int(token) for token in prompt_ids]
        if len(prompt) + sampling.max_tokens > self._config.max_model_len:
            raise UserError(
                f"a prompt of {len(prompt)} tokens and a response of up to {sampling.max_tokens} exceed "
                f"rollout.max_model_len={self._config.max_model_len}; raise it, drop the prompt or shorten the response"
            )
        # Without a tokenizer vLLM does not look at token ids: a bad one would end its engine.
        stranger = next((t for t in prompt if t < 0 or (self._vocab_size is not None and t >= self._vocab_size)), None)
        if stranger is not None:
            raise UserError(
                f"request {request_id}: token id {stranger} of the prompt is not in the model's vocabulary of "
                f"{self._vocab_size}; use the tokenizer of the model's folder"
            )
        body = self._request_body(prompt + partial.token_ids, sampling, done, request_id, current_version())
        what = f"a response of up to {sampling.max_tokens} tokens (request {request_id})"
        timeout_s = self._config.request_timeout_s
        try:
            async with asyncio.timeout(timeout_s):
                ending = await self._read_stream(body, partial, current_version)
        except TimeoutError:
            got = len(partial.token_ids) - done
            raise ReplicaError(f"{self._who()}: waited {timeout_s:g} s for {what}; {got} tokens had come") from None
        except httpx.HTTPError as error:
            raise ReplicaError(f"{self._who()}: connection lost during {what}: {_describe(error)}") from error
        return self._finished(partial, done, ending, sampling)

    def _request_body(
        self, token_ids: list[int], sampling: SamplingSettings, done: int, request_id: str, version: int
    ) -> dict[str, Any]:
        # A continuation has a stream of its own; the same seed would repeat the random numbers of the first part.
        seed = sampling.seed if sampling.seed is None or not done else (sampling.seed + 1_000_003 * done) % 2**31
        return {
            "model": MODEL_NAME,
            "request_id": request_id,
            "token_ids": token_ids,
            "stream": True,
            "cache_salt": f"version-{version}",
            "sampling_params": {
                "temperature": sampling.temperature,
                "max_tokens": sampling.max_tokens - done,
                "seed": seed,
                "stop_token_ids": list(sampling.stop_token_ids),
                "ignore_eos": sampling.ignore_eos,
                "logprobs": 0,  # of the sampled token only
                "detokenize": False,
                "stream_interval": self._config.stream_interval,
            },
        }

    async def _read_stream(
        self, body: Mapping[str, Any], partial: PartialGeneration, current_version: Callable[[], int]
    ) -> dict[str, Any]:
        """Append tokens to `partial` as they come and return the last choice, which has the ending and the spans."""
        version = current_version()
        timeout = httpx.Timeout(self._config.control_timeout_s, read=None)  # the caller's deadline covers reading
        async with self._http.stream("POST", "/inference/v1/generate", json=body, timeout=timeout) as response:
            if response.status_code != httpx.codes.OK:
                self._raise_for(response, await response.aread(), "generate")
            async for event in _server_sent_events(response):
                if "error" in event:
                    raise ReplicaError(f"{self._who()}: generate failed: {event['error']}")
                for choice in event.get("choices", []):
                    tokens = choice.get("token_ids") or []
                    entries = (choice.get("logprobs") or {}).get("content") or []
                    if [entry["token_id"] for entry in entries] != tokens:
                        raise ReplicaError(
                            f"{self._who()}: {len(tokens)} tokens came with {len(entries)} log-probabilities"
                        )
                    partial.token_ids += tokens
                    partial.logprobs += [entry["logprob"] for entry in entries]
                    partial.versions += [version] * len(tokens)
                    version = current_version()
                    if choice.get("finish_reason") is not None:
                        return choice
        raise ReplicaError(f"{self._who()}: the stream ended before the response did")

    def _finished(
        self, partial: PartialGeneration, done: int, ending: Mapping[str, Any], sampling: SamplingSettings
    ) -> Generation:
        reason = ending["finish_reason"]
        if reason not in ("stop", "length"):
            raise ReplicaError(f"{self._who()}: the response ended with '{reason}' instead of 'stop' or 'length'")
        if len(partial.token_ids) > sampling.max_tokens or (
            reason == "length" and len(partial.token_ids) < sampling.max_tokens
        ):
            raise ReplicaError(
                f"{self._who()}: the response ended by '{reason}' with {len(partial.token_ids)} tokens, "
                f"{sampling.max_tokens} were asked for"
            )
        if NO_LOGPROB in partial.logprobs:
            position = partial.logprobs.index(NO_LOGPROB)
            raise ReplicaError(
                f"{self._who()}: no log-probability for token {position} of the response (NaN in the model?)"
            )
        partial.versions[done:] = spread_versions(
            ending.get("weight_versions"), len(partial.token_ids) - done, self._who()
        )
        return Generation(
            token_ids=np.array(partial.token_ids, dtype=np.int32),
            logprobs=np.array(partial.logprobs, dtype=np.float32),
            versions=np.array(partial.versions, dtype=np.int32),
            finish_reason=reason,
        )

    async def health(self) -> None:
        """Return if the server and its engine are alive; raise ReplicaError otherwise."""
        await self._call("GET", "/health", "health")

    async def world_size(self) -> int:
        """Return the number of workers that join the weight group."""
        return int((await self._call("GET", "/get_world_size", "world size")).json()["world_size"])

    async def version(self) -> str:
        """Return the server's weight version; a fresh server says `default`."""
        return str((await self._call("GET", "/weight_info", "weight version")).json()["weight_version"])

    async def set_version(self, version: int) -> None:
        """Name the weights that the server has: 0 for those of its model folder."""
        await self._call("POST", "/update_weight_version", "set version", json={"new_version": str(version)})

    async def pause(self, rebuild_kv: bool) -> None:
        """Stop generating after the step at hand; requests stay. `rebuild_kv`: drop all cached keys and values."""
        await self._call("POST", "/pause", "pause", params={"mode": "keep", "clear_cache": str(rebuild_kv).lower()})

    async def resume(self) -> None:
        """Go on generating."""
        await self._call("POST", "/resume", "resume")

    async def join_weight_group(self, info: Mapping[str, Any], timeout_s: float) -> None:
        """Let the server's workers join the weight group of `info` (`weight_engine.JoinInfo`); returns once all met."""
        await self._call("POST", "/init_weight_transfer_engine", "join", json={"init_info": info}, timeout_s=timeout_s)

    async def start_weight_update(self) -> None:
        """Prepare the paused server's model for loading."""
        await self._call("POST", "/start_weight_update", "start of the weight update")

    async def update_weights(self, info: Mapping[str, Any], timeout_s: float) -> None:
        """Receive one version (`weight_engine.VersionInfo`); returns once every tensor is loaded and verified."""
        await self._call("POST", "/update_weights", "weights", json={"update_info": info}, timeout_s=timeout_s)

    async def finish_weight_update(self, version: int) -> None:
        """Complete the update; tokens drawn from now on carry `version`."""
        await self._call(
            "POST", "/finish_weight_update", "end of the weight update", json={"weight_version": str(version)}
        )

    async def aclose(self) -> None:
        """Close all connections; the server aborts what they were waiting for."""
        await self._http.aclose()

    async def _call(
        self, method: str, path: str, what: str, timeout_s: float | None = None, **request: Any
    ) -> httpx.Response:
        timeout_s = self._config.control_timeout_s if timeout_s is None else timeout_s
        try:
            async with asyncio.timeout(timeout_s):
                response = await self._http.request(method, path, timeout=timeout_s, **request)
        except (TimeoutError, httpx.TimeoutException):
            raise ReplicaError(f"{self._who()}: no answer to '{what}' within {timeout_s:g} s") from None
        except httpx.HTTPError as error:
            raise ReplicaError(f"{self._who()}: '{what}' failed: {_describe(error)}") from error
        if response.status_code != httpx.codes.OK:
            self._raise_for(response, response.content, what)
        return response

    def _raise_for(self, response: httpx.Response, content: bytes, what: str) -> None:
        kind = RequestRefused if response.is_client_error else ReplicaError
        reason = content.decode(errors="replace").strip()[:500]
        raise kind(f"{self._who()}: '{what}' answered {response.status_code}: {reason}")

    def _who(self) -> str:
        return f"replica {self.name} at {self.url}"


def spread_versions(spans: Sequence[Mapping[str, Any]] | None, num_tokens: int, who: str) -> list[int]:
    """Return one version a token from vLLM's spans. Raises ReplicaError unless they cover the response end to end.

    Example: [{version: "7", start: 0, end: 2}, {version: "8", start: 2, end: 3}] -> [7, 7, 8]
    """
    versions: list[int] = []
    for span in spans or []:
        if span["start"] != len(versions) or not str(span["version"]).isdigit():
            raise ReplicaError(f"{who}: weight version spans are not usable: {list(spans or [])}")
        versions += [int(span["version"])] * (span["end"] - span["start"])
    if len(versions) != num_tokens:
        raise ReplicaError(f"{who}: weight version spans cover {len(versions)} of {num_tokens} tokens")
    return versions


async def _server_sent_events(response: httpx.Response) -> AsyncIterator[dict[str, Any]]:
    async for line in response.aiter_lines():
        if line.startswith("data: ") and line != "data: [DONE]":
            yield json.loads(line.removeprefix("data: "))


def _describe(error: Exception) -> str:
    return f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
