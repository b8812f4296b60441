"""Servers that run already and take new weights whenever their run publishes: asked, never controlled.

    controller --status--> urls of its current replicas --+
    urls that the user named -----------------------------+--> one client each <--generate-- evaluation

The run that owns them notices nothing but more requests. Who answered is read from the tokens, each of which names its version.
"""

import asyncio
import functools
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import httpx

from a3po_megatron.config.rollout import RolloutConfig
from a3po_megatron.errors import UserError
from a3po_megatron.records import Int32
from a3po_megatron.rollout.client import Generation, Interrupted, PartialGeneration, ReplicaClient
from a3po_megatron.rollout.control import ReplicaError, RequestRefused
from a3po_megatron.rollout.sampling import SamplingSettings

MakeTransport = Callable[[str], httpx.AsyncBaseTransport]
RETRIES = 3  # of a request, each on another server where there is one
RETRY_S = 0.5  # before the first retry; longer before each further one


@dataclass
class _Server:
    client: ReplicaClient
    running: int = 0  # requests of ours that it is answering
    failures: int = 0


class RunningFleet:
    """The servers of a running fleet behind the one call of `rollout/generator.py`. Call `connect` first."""

    def __init__(
        self,
        config: RolloutConfig,
        token: str,
        vocab_size: int,
        make_transport: MakeTransport | None = None,
    ) -> None:
        """`vocab_size`: to refuse prompts outside it. `make_transport`: url -> transport, for tests."""
        self._config, self._token, self._vocab_size = config, token, vocab_size
        self._make_transport = make_transport
        self._controller: str | None = None
        self._servers: dict[str, _Server] = {}  # by url
        self._gone: list[_Server] = []  # replaced by the controller; requests that they still answer may end well

    async def connect(self, urls: Sequence[str]) -> None:
        """Find the servers: those of the controller at the one url, or those at `urls`.

        Raises UserError when nobody answers there, the token is not theirs, or the controller has no current replica.
        """
        found = await self._replicas_of(urls[0]) if len(urls) == 1 else None
        self._controller = None if found is None else urls[0]
        for url in urls if found is None else found:
            self._add(url)
        try:
            versions = {url: await server.client.version() for url, server in self._servers.items()}
        except ReplicaError as error:
            raise UserError(f"target: {error}") from None
        for url, version in versions.items():
            if not version.isdigit():
                raise UserError(
                    f"target={url}: its weights are of version {version!r}, not a number: no server of a run"
                )

    @property
    def urls(self) -> list[str]:
        """Where the servers are."""
        return list(self._servers)

    async def generate(
        self,
        prompt_ids: Sequence[int] | Int32,
        sampling: SamplingSettings,
        request_id: str,
        partial: PartialGeneration | None = None,
    ) -> Generation:
        """Sample one response on the server that failed least and has fewest of ours; after a failure it goes on where it was.

        Raises ReplicaError when the request is refused or `RETRIES` have failed too, UserError when its run has ended.
        """
        response = PartialGeneration() if partial is None else partial
        deadline, part, failures = time.monotonic() + self._config.request_timeout_s, 0, 0
        interrupted: set[tuple[str, str]] = set()  # (server's url, version of the weights that it aborted)
        while True:
            server = min(self._servers.values(), key=lambda server: (server.failures, server.running))
            part += 1
            server.running += 1
            try:
                # Prompts that were read under other weights are not reused: the version is part of the cache's key.
                text = await server.client.version()
                if not text.isdigit():
                    raise ReplicaError(f"{server.client.url}: its weights have version {text!r}: it was started anew")
                version = functools.partial(int, text)
                return await server.client.generate(prompt_ids, sampling, f"{request_id}.{part}", version, response)
            except RequestRefused:
                raise
            except (Interrupted, ReplicaError) as error:
                if isinstance(error, Interrupted) and (server.client.url, text) not in interrupted:
                    interrupted.add((server.client.url, text))  # for new weights: no failure, but once for each version
                    continue
                failures += 1
                server.failures += 1
                if failures > RETRIES or time.monotonic() >= deadline:
                    raise ReplicaError(f"request {request_id} failed {failures} times: {error}") from error
                await asyncio.sleep(RETRY_S * failures)
                await self._look_again()
            finally:
                server.running -= 1

    async def aclose(self) -> None:
        """Close every connection; the servers go on."""
        for server in [*self._servers.values(), *self._gone]:
            await server.client.aclose()

    async def _look_again(self) -> None:
        """Ask the controller, where there is one, which servers are there now."""
        current = None if self._controller is None else await self._replicas_of(self._controller)
        if current is None:
            return
        for url in [url for url in self._servers if url not in current]:
            self._gone.append(self._servers.pop(url))
        for url in current:
            if url not in self._servers:
                self._add(url)

    def _add(self, url: str) -> None:
        client = ReplicaClient("asked", url, self._token, self._config, self._vocab_size, self._transport(url))
        self._servers[url] = _Server(client)

    def _transport(self, url: str) -> httpx.AsyncBaseTransport | None:
        return self._make_transport(url) if self._make_transport else None

    async def _replicas_of(self, url: str) -> list[str] | None:
        """Return the urls of the current replicas of the controller at `url`; None if a vLLM server answers there.

        Raises UserError when nobody answers, the token is wrong, or there is no current replica.
        """
        headers, timeout_s = {"Authorization": f"Bearer {self._token}"}, self._config.control_timeout_s
        options: dict[str, Any] = {"timeout": timeout_s, "trust_env": False, "transport": self._transport(url)}
        try:
            async with httpx.AsyncClient(headers=headers, **options) as client:
                return current_replicas(url, await client.get(f"{url}/status"))
        except httpx.TransportError as error:
            raise UserError(
                f"target={url}: nobody answers there ({type(error).__name__}); is the run still going on?"
            ) from None


def current_replicas(url: str, answer: httpx.Response) -> list[str] | None:
    """Return the urls of the current replicas in a controller's `/status`; None for a server that has no such route.

    Raises UserError for a wrong token, another program's answer, or when there is no current replica.
    """
    if answer.status_code == httpx.codes.UNAUTHORIZED:
        raise UserError(f"target={url}: another run's token, or none: it is in the file `token` of the run's folder")
    if answer.status_code == httpx.codes.NOT_FOUND:
        return None
    if answer.is_error:
        raise UserError(f"target={url}: /status answered {answer.status_code}: {answer.text.strip()[:300]}")
    try:
        replicas = answer.json()["fleet"]["replicas"]
        current = [str(replica["url"]) for replica in replicas.values() if replica["state"] == "current"]
    except (ValueError, KeyError, TypeError, AttributeError):
        raise UserError(
            f"target={url}: /status answered what no controller does: {' '.join(answer.text.split())[:100]!r}"
        ) from None
    if not current:
        raise UserError(f"target={url}: the controller has no server with the current weights (it has {len(replicas)})")
    return current
