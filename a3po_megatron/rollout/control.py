"""The control calls of ONE vLLM server: is it alive, what has it to do, stop, take new weights, go on.

Imports neither torch nor vllm. Every call has a deadline; an error says which server, what was asked and why it failed.
"""

import asyncio
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, NoReturn

import httpx
import msgspec

from a3po_megatron.config.rollout import RolloutConfig
from a3po_megatron.rollout.messages import Load, read_load
from a3po_megatron.rollout.transport import AiohttpTransport


class ReplicaError(RuntimeError):
    """A server failed, was too slow, or answered what it must not. Its requests can be sent to another replica."""


class RequestRefused(ReplicaError):
    """The server refused the request itself (HTTP 4xx); another replica would refuse it too."""


class ServerControl:
    """Talks to the server at `url` with the run's `token`. Close with `aclose`."""

    def __init__(
        self,
        name: str,
        url: str,
        token: str,
        config: RolloutConfig,
        transport: httpx.AsyncBaseTransport | None = None,
    ) -> None:
        self.name = name
        self.url = url
        self._config = config
        self._http = httpx.AsyncClient(
            base_url=url,
            headers={"Authorization": f"Bearer {token}"},
            timeout=httpx.Timeout(config.control_timeout_s),
            transport=AiohttpTransport() if transport is None else transport,
            trust_env=False,  # no proxy between roles
        )

    async def health(self, timeout_s: float | None = None) -> None:
        """Return if the server and its engine are alive; raise ReplicaError otherwise."""
        await self._call("GET", "/health", "health", timeout_s)

    async def load(self, timeout_s: float) -> Load:
        """Return what the server has to do and what it has done."""
        answer = await self._call("GET", "/metrics", "load", timeout_s)
        try:
            return read_load(answer.text)
        except ValueError as error:
            raise ReplicaError(f"{self._who()}: cannot read its load: {error}") from error

    async def world_size(self) -> int:
        """Return the number of workers that join the weight group."""
        return self._decode(await self._call("GET", "/get_world_size", "world size"), _WorldSize).world_size

    async def version(self) -> str:
        """Return the server's weight version; a fresh server says `default`."""
        return self._decode(await self._call("GET", "/weight_info", "weight version"), _WeightInfo).weight_version

    async def set_version(self, version: int) -> None:
        """Name the weights that the server has: 0 for those of its model folder."""
        await self._call("POST", "/update_weight_version", "set version", json={"new_version": str(version)})

    async def pause(self, mode: Literal["keep", "abort"], clear_cache: bool) -> None:
        """Stop generating after the step at hand and `keep` or `abort` the requests.

        `clear_cache`: drop all cached keys and values; kept requests read their tokens again when they go on.
        """
        await self._call("POST", "/pause", "pause", params={"mode": mode, "clear_cache": str(clear_cache).lower()})

    async def resume(self) -> None:
        """Go on generating."""
        await self._call("POST", "/resume", "resume")

    async def join_weight_group(self, info: Mapping[str, Any], timeout_s: float) -> None:
        """Let the server's workers join the weight group of `info` (`weight_engine.JoinInfo`); returns once all met."""
        await self._call("POST", "/init_weight_transfer_engine", "join", timeout_s, json={"init_info": info})

    async def start_weight_update(self) -> None:
        """Prepare the paused server's model for loading."""
        await self._call("POST", "/start_weight_update", "start of the weight update")

    async def update_weights(self, update: bytes, timeout_s: float) -> None:
        """Receive one version (`encode_update`); returns once every tensor is loaded and verified."""
        headers = {"Content-Type": "application/json"}
        await self._call("POST", "/update_weights", "weights", timeout_s, content=update, headers=headers)

    async def finish_weight_update(self, version: int) -> None:
        """Complete the update; tokens drawn from now on carry `version`."""
        await self._call(
            "POST", "/finish_weight_update", "end of the weight update", json={"weight_version": str(version)}
        )

    async def probe_logprobs(self) -> list[float]:
        """Return the paused server's log-probabilities of the probe's prompt (`probe_engine.py`); NaN where not finite."""
        answer = await self._call("POST", "/collective_rpc", "probe", json={"method": "probe_logprobs"})
        for of_worker in self._decode(answer, _ProbeAnswer).results:
            if of_worker is not None:
                return [math.nan if value is None else value for value in of_worker]
        raise ReplicaError(f"{self._who()}: no worker answered the probe")

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
            raise ReplicaError(f"{self._who()}: '{what}' failed: {describe(error)}") from error
        if response.status_code != httpx.codes.OK:
            self._raise_for(response, response.content, what)
        return response

    def _decode[T](self, response: httpx.Response, kind: type[T]) -> T:
        try:
            return msgspec.json.decode(response.content, type=kind)
        except ValueError as error:
            raise ReplicaError(f"{self._who()}: answered {response.text[:80]!r}: {error}") from error

    def _raise_for(self, response: httpx.Response, content: bytes, what: str) -> NoReturn:
        kind = RequestRefused if response.is_client_error else ReplicaError
        reason = content.decode(errors="replace").strip()[:500]
        raise kind(f"{self._who()}: '{what}' answered {response.status_code}: {reason}")

    def _who(self) -> str:
        return f"replica {self.name} at {self.url}"


class _WorldSize(msgspec.Struct):
    world_size: int


class _ProbeAnswer(msgspec.Struct):
    results: list[list[float | None] | None]  # of each worker; only one of them sees the logits


class _WeightInfo(msgspec.Struct):
    weight_version: str


def encode_update(
    version: int, manifest: Mapping[str, Sequence[Any]], bucket_bytes: int, folder: Path | None = None
) -> bytes:
    """Return the body that announces `version` to any number of servers: megabytes for a model of many experts.

    `folder`: where it lies as files; None: it comes through the weight group.
    """
    info = {"version": version, "bucket_bytes": bucket_bytes, "folder": str(folder or ""), **manifest}
    return msgspec.json.encode({"update_info": info})


def describe(error: Exception) -> str:
    """Return the kind of an error and, where it has one, its message."""
    return f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
