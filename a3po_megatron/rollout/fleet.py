"""The controller's view of its fleet: which replica answers the next request, and that every request is answered.

`replicas.py` knows who is there, `publication.py` brings new weights to them. Imports neither torch nor vllm. All methods
belong to one asyncio loop.
"""

import asyncio
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import httpx

from a3po_megatron.config.schema import RolloutConfig
from a3po_megatron.records import Int32
from a3po_megatron.rollout.client import Generation, PartialGeneration, ReplicaClient, ReplicaError, RequestRefused
from a3po_megatron.rollout.publication import Publications
from a3po_megatron.rollout.replicas import Replica, Replicas, unless_dropped
from a3po_megatron.rollout.sampling import SamplingSettings

MAX_ATTEMPTS = 3  # replicas that may fail under one request before the request itself is the suspect


class Fleet:
    """Replicas behind one interface. `rendezvous_dir` must be a folder that the actor and all servers can reach."""

    def __init__(
        self,
        config: RolloutConfig,
        token: str,
        rendezvous_dir: Path,
        version: int = 0,
        vocab_size: int | None = None,
        make_transport: Callable[[str], httpx.AsyncBaseTransport] | None = None,
    ) -> None:
        """`version`: that of the weights in the servers' model folder. `vocab_size`: to refuse prompts outside it.

        `make_transport`: url -> transport, for tests.
        """
        self._vocab_size = vocab_size
        self._config = config
        self._token = token
        self._initial_version = version
        self._make_transport = make_transport
        self._replicas = Replicas(version)
        self._publications = Publications(config, self._replicas, rendezvous_dir)

    @property
    def version(self) -> int:
        """The version that new tokens get."""
        return self._replicas.version

    @property
    def needs_publication(self) -> bool:
        """True when replicas wait but none may answer: only publishing the current weights again goes on from here."""
        states = {replica.state for replica in self._replicas}
        return self._publications.under_way is None and states == {"behind"}

    async def register(self, name: str, url: str, world_size: int) -> dict[str, str]:
        """Add a server that has proved it generates; repeat it as a heartbeat. Returns {state, reason}.

        `state` is `current`, `behind` (has the initial weights, gets the current ones at the next publication) or
        `fenced` (was dropped for `reason`: restart it and register under a new name).
        """
        if name in self._replicas.fenced:
            return {"state": "fenced", "reason": self._replicas.fenced[name]}
        replica = self._replicas.get(name)
        if replica is None:
            transport = self._make_transport(url) if self._make_transport else None
            up_to_date = self.version == self._initial_version and self._publications.is_idle
            replica = Replica(
                client=ReplicaClient(name, url, self._token, self._config, self._vocab_size, transport),
                world_size=world_size,
                state="current" if up_to_date else "behind",
            )
            await self._replicas.add(replica)
        return {"state": replica.state, "reason": ""}

    async def deregister(self, name: str, reason: str) -> None:
        """Drop a server; its requests go on elsewhere. An unknown name is not an error: two sides may see one death."""
        await self._replicas.drop(name, reason)

    async def generate(
        self,
        prompt_ids: Sequence[int] | Int32,
        sampling: SamplingSettings,
        request_id: str,
        partial: PartialGeneration | None = None,
    ) -> Generation:
        """Sample one response on the least loaded replica and return it.

        A replica that fails is dropped and the response goes on, after the tokens it has, on another one. Waits while
        no replica may answer. Raises UserError for settings that cannot give true samples, ReplicaError when the
        request is refused, fails on three replicas, or takes longer than `request_timeout_s`.
        """
        partial = PartialGeneration() if partial is None else partial
        deadline = time.monotonic() + self._config.request_timeout_s
        attempt = 0
        while True:
            replica = await self._least_loaded(deadline, request_id)
            attempt += 1
            replica.running += 1
            call = replica.client.generate(
                prompt_ids, sampling, f"{request_id}.{attempt}", lambda: self.version, partial
            )
            try:
                return await unless_dropped(replica, call)
            except RequestRefused:
                raise
            except ReplicaError as error:
                await self.deregister(replica.client.name, str(error))
                if attempt == MAX_ATTEMPTS or time.monotonic() >= deadline:
                    raise ReplicaError(f"request {request_id} failed on {attempt} replicas: {error}") from error
            finally:
                replica.running -= 1

    async def begin_publication(self, version: int, manifest: Mapping[str, Sequence[Any]]) -> dict[str, Any]:
        """Pause the fleet and let it receive `version`: see `Publications.begin`."""
        return await self._publications.begin(version, manifest)

    async def finish_publication(self, version: int) -> dict[str, Any]:
        """Wait until the members have `version` and resume: see `Publications.finish`."""
        return await self._publications.finish(version)

    def status(self) -> dict[str, Any]:
        """Return what a person wants to see: version, epoch, each replica's url, state and load, the fenced and why."""
        return {
            "version": self.version,
            "epoch": self._publications.epoch,
            "publishing": self._publications.under_way,
            "replicas": {
                replica.client.name: {
                    "url": replica.client.url,
                    "state": replica.state,
                    "running": replica.running,
                }
                for replica in self._replicas
            },
            "fenced": dict(self._replicas.fenced),
        }

    async def aclose(self) -> None:
        """Close every connection; a publication under way is given up."""
        self._publications.give_up()
        for replica in self._replicas:
            await replica.client.aclose()

    async def _least_loaded(self, deadline: float, request_id: str) -> Replica:
        def candidates() -> list[Replica]:
            return [replica for replica in self._replicas if replica.state == "current"]

        try:
            async with asyncio.timeout(deadline - time.monotonic()), self._replicas.changed:
                await self._replicas.changed.wait_for(lambda: bool(candidates()))
        except TimeoutError:
            raise ReplicaError(
                f"request {request_id} waited {self._config.request_timeout_s:g} s: "
                f"no replica with version {self.version} is there"
            ) from None
        return min(candidates(), key=lambda replica: replica.running)
