"""The controller's view of its replicas: who is there, who answers the next request, how new weights reach them all.

    supervisor --register--> [behind] --publication--> [current] <--generate-- controller
                                 any failed call -----> [fenced]  (its supervisor restarts it, under a new name)

A publication, in order:
    begin   pause every replica -> in the background: (join the group, when membership changed) -> start -> receive
    ...     the actor joins as rank 0 and sends, while the replicas receive
    finish  wait for the receivers -> finish(version) on each -> resume
Imports neither torch nor vllm. All methods belong to one asyncio loop.
"""

import asyncio
import time
import uuid
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import httpx

from a3po_megatron.config.schema import RolloutConfig
from a3po_megatron.records import Int32
from a3po_megatron.rollout.client import Generation, PartialGeneration, ReplicaClient, ReplicaError, RequestRefused
from a3po_megatron.rollout.sampling import SamplingSettings

MAX_FENCED_REMEMBERED = 100
MAX_ATTEMPTS = 3  # replicas that may fail under one request before the request itself is the suspect


class PublicationError(RuntimeError):
    """New weights reached no replica. Nothing was published; the old version stays."""


@dataclass
class Replica:
    """One registered server."""

    client: ReplicaClient
    world_size: int  # its workers in the weight group
    state: Literal["current", "behind"]  # behind: must not answer before it has taken part in a publication
    running: int = 0  # requests it is answering
    failed: asyncio.Event = field(default_factory=asyncio.Event)


@dataclass
class _Publication:
    version: int
    members: list[Replica]
    receiving: asyncio.Task[dict[str, str]]  # name -> reason, of members that failed


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
        self._rendezvous_dir = rendezvous_dir
        self._initial_version = version
        self._version = version
        self._make_transport = make_transport
        self._replicas: dict[str, Replica] = {}
        self._fenced: dict[str, str] = {}  # name -> reason
        self._changed = asyncio.Condition()
        self._publication: _Publication | None = None
        self._publication_lock = asyncio.Lock()
        self._epoch = 0
        self._joined: tuple[str, ...] = ()  # members of the weight group of this epoch; empty: none that works
        self._store: Path | None = None

    @property
    def version(self) -> int:
        """The version that new tokens get."""
        return self._version

    @property
    def needs_publication(self) -> bool:
        """True when replicas wait but none may answer: only publishing the current weights again goes on from here."""
        states = {replica.state for replica in self._replicas.values()}
        return self._publication is None and states == {"behind"}

    async def register(self, name: str, url: str, world_size: int) -> dict[str, str]:
        """Add a server that has proved it generates; repeat it as a heartbeat. Returns {state, reason}.

        `state` is `current`, `behind` (has the initial weights, gets the current ones at the next publication) or
        `fenced` (was dropped for `reason`: restart it and register under a new name).
        """
        if name in self._fenced:
            return {"state": "fenced", "reason": self._fenced[name]}
        if name not in self._replicas:
            transport = self._make_transport(url) if self._make_transport else None
            publishing = self._publication is not None or self._publication_lock.locked()
            up_to_date = self._version == self._initial_version and not publishing
            self._replicas[name] = Replica(
                client=ReplicaClient(name, url, self._token, self._config, self._vocab_size, transport),
                world_size=world_size,
                state="current" if up_to_date else "behind",
            )
            await self._notify()
        return {"state": self._replicas[name].state, "reason": ""}

    async def deregister(self, name: str, reason: str) -> None:
        """Drop a server; its requests go on elsewhere. An unknown name is not an error: two sides may see one death."""
        replica = self._replicas.pop(name, None)
        if replica is None:
            return
        self._fenced[name] = reason
        while len(self._fenced) > MAX_FENCED_REMEMBERED:
            del self._fenced[next(iter(self._fenced))]
        replica.failed.set()
        await replica.client.aclose()
        await self._notify()

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
                prompt_ids, sampling, f"{request_id}.{attempt}", lambda: self._version, partial
            )
            try:
                return await _unless(replica.failed, call, f"replica {replica.client.name} was dropped")
            except RequestRefused:
                raise
            except ReplicaError as error:
                await self.deregister(replica.client.name, str(error))
                if attempt == MAX_ATTEMPTS or time.monotonic() >= deadline:
                    raise ReplicaError(f"request {request_id} failed on {attempt} replicas: {error}") from error
            finally:
                replica.running -= 1

    async def begin_publication(self, version: int, manifest: Mapping[str, Sequence[Any]]) -> dict[str, Any]:
        """Pause the fleet and let it receive `version` in the background. Returns where the actor joins and sends.

        `manifest`: names, dtypes and shapes of all tensors in sending order. The answer: epoch (same as last time:
        reuse the group), rendezvous {store, world_size, rank}, members (names), bucket_bytes. Waits for a replica when
        there is none. Raises PublicationError when none comes within `startup_timeout_s` or a publication is under way.
        """
        async with self._publication_lock:
            if self._publication is not None:
                raise PublicationError(
                    f"version {version}: the publication of version {self._publication.version} is not finished"
                )
            members: list[Replica] = []
            while not members:
                await self._wait_for_any(version)
                members = list(self._replicas.values())
                await self._on_each(members, self._pause)
                members = [replica for replica in members if self._is_member(replica)]
            names = tuple(replica.client.name for replica in members)
            joins = names != self._joined
            if joins:
                self._new_epoch()
            self._joined = ()  # until this publication has ended well
            world_size = 1 + sum(replica.world_size for replica in members)
            receiving = asyncio.create_task(self._receive(members, joins, world_size, version, manifest))
            self._publication = _Publication(version, members, receiving)
            return {
                "epoch": self._epoch,
                "rendezvous": {"store": str(self._store), "world_size": world_size, "rank": 0},
                "members": list(names),
                "bucket_bytes": self._config.bucket_bytes,
            }

    async def finish_publication(self, version: int) -> dict[str, Any]:
        """Wait until the members have `version`, make it current and resume. Returns {version, members, failed}.

        `failed` maps members that were dropped to reasons. Raises PublicationError when no member has the new weights.
        """
        async with self._publication_lock:
            publication = self._publication
            if publication is None or publication.version != version:
                begun = publication.version if publication else "none"
                raise PublicationError(f"version {version} cannot be finished: the publication under way is {begun}")
            try:
                failed = dict(await publication.receiving)
                members = [replica for replica in publication.members if self._is_member(replica)]
                failed |= await self._on_each(members, lambda replica: replica.client.finish_weight_update(version))
                members = [replica for replica in members if self._is_member(replica)]
                if members:
                    # Before resume: what is drawn from now on, and what is asked from now on, is of this version.
                    self._version = version
                    for replica in self._replicas.values():  # one that came meanwhile is not a member
                        replica.state = "current" if any(replica is member for member in members) else "behind"
                failed |= await self._on_each(members, lambda replica: replica.client.resume())
                members = [replica for replica in members if self._is_member(replica)]
            finally:
                self._publication = None
            await self._notify()
            if not members:
                raise PublicationError(
                    f"version {version} reached no replica: {'; '.join(failed.values()) or 'all were dropped'}"
                )
            names = tuple(replica.client.name for replica in members)
            if len(members) == len(publication.members):
                self._joined = names
            return {"version": version, "members": list(names), "failed": failed}

    def status(self) -> dict[str, Any]:
        """Return what a person wants to see: version, epoch, each replica's url, state and load, the fenced and why."""
        return {
            "version": self._version,
            "epoch": self._epoch,
            "publishing": self._publication.version if self._publication else None,
            "replicas": {
                name: {"url": replica.client.url, "state": replica.state, "running": replica.running}
                for name, replica in self._replicas.items()
            },
            "fenced": dict(self._fenced),
        }

    async def aclose(self) -> None:
        """Close every connection; a publication under way is given up."""
        if self._publication is not None:
            self._publication.receiving.cancel()
        for replica in list(self._replicas.values()):
            await replica.client.aclose()

    async def _receive(
        self, members: list[Replica], joins: bool, world_size: int, version: int, manifest: Mapping[str, Sequence[Any]]
    ) -> dict[str, str]:
        update = {"version": version, "bucket_bytes": self._config.bucket_bytes, **manifest}
        timeout_s = self._config.transfer_timeout_s
        first_ranks, next_rank = {}, 1
        for replica in members:
            first_ranks[replica.client.name] = next_rank
            next_rank += replica.world_size

        async def receive(replica: Replica) -> None:
            if joins:
                join = {
                    "store": str(self._store),
                    "first_rank": first_ranks[replica.client.name],
                    "world_size": world_size,
                }
                join |= {"timeout_s": timeout_s, "host": self._config.host}
                # A little longer than the group's own deadline, so that its error, which says more, comes first.
                await replica.client.join_weight_group(join, timeout_s + self._config.control_timeout_s)
            await replica.client.start_weight_update()
            await replica.client.update_weights(update, timeout_s + self._config.control_timeout_s)

        return await self._on_each(members, receive)

    async def _pause(self, replica: Replica) -> None:
        await replica.client.pause(rebuild_kv=self._config.kv_on_update == "rebuild")

    async def _on_each(self, members: Sequence[Replica], call: Callable[[Replica], Awaitable[None]]) -> dict[str, str]:
        """Do `call` on all members at once; drop those that fail and return their reasons by name."""

        async def guarded(replica: Replica) -> tuple[str, str] | None:
            try:
                await _unless(replica.failed, call(replica), f"replica {replica.client.name} was dropped")
            except ReplicaError as error:
                await self.deregister(replica.client.name, str(error))
                return replica.client.name, str(error)
            return None

        return dict(failure for failure in await asyncio.gather(*map(guarded, members)) if failure)

    async def _least_loaded(self, deadline: float, request_id: str) -> Replica:
        def candidates() -> list[Replica]:
            return [replica for replica in self._replicas.values() if replica.state == "current"]

        try:
            async with asyncio.timeout(deadline - time.monotonic()), self._changed:
                await self._changed.wait_for(lambda: bool(candidates()))
        except TimeoutError:
            raise ReplicaError(
                f"request {request_id} waited {self._config.request_timeout_s:g} s: "
                f"no replica with version {self._version} is there"
            ) from None
        return min(candidates(), key=lambda replica: replica.running)

    async def _wait_for_any(self, version: int) -> None:
        timeout_s = self._config.startup_timeout_s
        try:
            async with asyncio.timeout(timeout_s), self._changed:
                await self._changed.wait_for(lambda: bool(self._replicas))
        except TimeoutError:
            raise PublicationError(f"version {version} waited {timeout_s:g} s for a replica; none registered") from None

    def _new_epoch(self) -> None:
        """Choose a new meeting place; the old one is of no use any more."""
        if self._store is not None:
            self._store.unlink(missing_ok=True)
        self._epoch += 1
        self._rendezvous_dir.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._store = self._rendezvous_dir.resolve() / f"epoch_{self._epoch}_{uuid.uuid4().hex}"

    def _is_member(self, replica: Replica) -> bool:
        return self._replicas.get(replica.client.name) is replica

    async def _notify(self) -> None:
        async with self._changed:
            self._changed.notify_all()


async def _unless[T](failed: asyncio.Event, call: Awaitable[T], reason: str) -> T:
    """Await `call`, but end it with ReplicaError as soon as `failed` is set."""
    work = asyncio.ensure_future(call)
    watch = asyncio.ensure_future(failed.wait())
    try:
        await asyncio.wait((work, watch), return_when=asyncio.FIRST_COMPLETED)
        # A client that is closed under a call lets it fail in many ways; all of them mean that the replica was dropped.
        if failed.is_set() and (not work.done() or work.exception() is not None):
            raise ReplicaError(reason)
        return work.result()
    finally:
        watch.cancel()
        work.cancel()
