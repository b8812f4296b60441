"""The controller's view of its fleet: which replica answers the next request, and that every request is answered.

`replicas.py` knows who is there, `publication.py` brings new weights to them. Imports neither torch nor vllm. All methods
belong to one asyncio loop.
"""

import asyncio
import time
from collections.abc import Callable, Coroutine, Mapping, Sequence
from pathlib import Path
from typing import Any

import httpx
import numpy as np

from a3po_megatron.config.rollout import RolloutConfig
from a3po_megatron.records import Int32
from a3po_megatron.rollout.client import Generation, Interrupted, PartialGeneration, ReplicaClient, RequestOverdue
from a3po_megatron.rollout.control import ReplicaError, RequestRefused
from a3po_megatron.rollout.publication import Publications
from a3po_megatron.rollout.replicas import Replica, Replicas, unless_dropped
from a3po_megatron.rollout.routing import Router
from a3po_megatron.rollout.sampling import SamplingSettings
from a3po_megatron.rollout.transfer_messages import PublicationOutcome, SendPlan, Transfer
from a3po_megatron.rollout.watch import watch

MAX_FAILURES = 3  # replicas that may fail under one request before the request itself is the suspect


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
        self._router = Router(self._replicas)
        self._replicas.on_change = self._router.serve
        self._publications = Publications(config, self._replicas, rendezvous_dir)
        self._watches: set[asyncio.Task[None]] = set()
        self._moved = 0  # responses that went on elsewhere after their replica failed
        self._interrupted = 0  # responses that went on as a new request after new weights

    @property
    def version(self) -> int:
        """The version that new tokens get."""
        return self._replicas.version

    @property
    def needs_publication(self) -> bool:
        """True when replicas wait but none may answer: only publishing the current weights again goes on from here."""
        states = {replica.state for replica in self._replicas}
        return self._publications.under_way is None and states == {"behind"} and not self._publications.keeps_current

    async def register(self, name: str, url: str, world_size: int) -> dict[str, str]:
        """Add a server that has proved it generates; repeat it as a heartbeat. Returns {state, reason}.

        `state` is `current`, `behind` (has the initial weights; gets the current ones from the kept files, or at the next
        publication) or `fenced` (was dropped, or another url has this name: restart it and register under a new name).
        """
        if name in self._replicas.fenced:
            return {"state": "fenced", "reason": self._replicas.fenced[name]}
        replica = self._replicas.get(name)
        if replica is not None and replica.client.url != url:
            reason = (
                f"{name} at {url} bears the name of the server at {replica.client.url}: give each node its own name"
            )
            return {"state": "fenced", "reason": reason}
        if replica is None:
            transport = self._make_transport(url) if self._make_transport else None
            up_to_date = self.version == self._initial_version and self._publications.is_idle
            replica = Replica(
                client=ReplicaClient(name, url, self._token, self._config, self._vocab_size, transport),
                world_size=world_size,
                state="current" if up_to_date else "behind",
                limit=self._config.max_num_seqs,
            )
            await self._replicas.add(replica)
            if not up_to_date:
                self._publications.catch_up()
            task = asyncio.create_task(self._watch(replica), name=f"watch {name}")
            self._watches.add(task)
            task.add_done_callback(self._watches.discard)
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
        """Sample one response on the replica that `Router` chooses and return it.

        A replica that fails is dropped and the response goes on, after the tokens it has, on another one; one that new
        weights interrupted goes on with them. Waits at most `request_timeout_s` for a replica with room, and as long
        again for the response, all parts together. Raises UserError for settings that cannot give true samples,
        RequestOverdue, and ReplicaError when the request is refused or fails on three replicas.
        """
        partial = PartialGeneration() if partial is None else partial
        prompt_hash = hash(np.asarray(prompt_ids).tobytes())
        deadline: float | None = None
        failures, part, replica = 0, 0, None
        while True:
            replica = await self._place(prompt_hash, replica, request_id)
            part += 1
            deadline = deadline or time.monotonic() + self._config.request_timeout_s
            name, left_s = f"{request_id}.{part}", max(0.0, deadline - time.monotonic())
            call = replica.client.generate(prompt_ids, sampling, name, lambda: self.version, partial, left_s)
            try:
                return await self._answer(replica, call)
            except (RequestRefused, RequestOverdue):
                raise
            except Interrupted:
                self._interrupted += 1
            except ReplicaError as error:
                await self.deregister(replica.client.name, str(error))
                failures += 1
                if failures == MAX_FAILURES:
                    raise ReplicaError(f"request {request_id} failed on {failures} replicas: {error}") from error
                self._moved += 1
            finally:
                self._router.leave(replica)

    async def begin_publication(
        self, version: int, manifest: Mapping[str, Sequence[Any]], transfer: Transfer = "gloo", unique_id: str = ""
    ) -> SendPlan:
        """Pause the fleet and let it receive `version`: see `Publications.begin`."""
        return await self._publications.begin(version, manifest, transfer, unique_id)

    async def finish_publication(self, version: int, error: str = "", kept: bool = False) -> PublicationOutcome:
        """Wait until the members have `version` and resume: see `Publications.finish`."""
        return await self._publications.finish(version, error, kept)

    def status(self) -> dict[str, Any]:
        """Return what a person wants to see: version, epoch, each replica's url, state and load, the fenced and why."""
        return {
            "version": self.version,
            "epoch": self._publications.epoch,
            "publishing": self._publications.under_way,
            "waiting": self._router.num_waiting,
            "moved": self._moved,
            "interrupted": self._interrupted,
            "replicas": {
                replica.client.name: {
                    "url": replica.client.url,
                    "state": replica.state,
                    "running": replica.running,
                    "limit": replica.limit,
                }
                for replica in self._replicas
            },
            "fenced": dict(self._replicas.fenced),
        }

    async def aclose(self) -> None:
        """Close every connection; a publication under way is given up."""
        self._publications.give_up()
        for watching in self._watches:
            watching.cancel()
        for replica in self._replicas:
            await replica.client.aclose()

    async def _answer(self, replica: Replica, call: Coroutine[Any, Any, Generation]) -> Generation:
        """Await `call` of `replica`. An interruption that we did not cause is a failure: else it would be asked for ever."""
        held_before = replica.times_held - replica.held  # a hold that goes on now may still abort the request
        try:
            return await unless_dropped(replica, call)
        except Interrupted as error:
            if self._config.in_flight == "continue" or replica.times_held == held_before:
                raise ReplicaError(f"{error}, though it was not asked to abort") from error
            raise

    async def _place(self, prompt_hash: int, last: Replica | None, request_id: str) -> Replica:
        timeout_s = self._config.request_timeout_s
        try:
            return await self._router.enter(prompt_hash, last, timeout_s)
        except TimeoutError:
            there = sum(replica.state == "current" for replica in self._replicas)
            reason = "is there" if there == 0 else f"had room ({there} are there)"
            raise RequestOverdue(
                f"request {request_id} waited {timeout_s:g} s: no replica with version {self.version} {reason}"
            ) from None

    async def _watch(self, replica: Replica) -> None:
        """Drop `replica` once it is ill."""
        try:
            reason = await watch(replica, self._config, self._router.serve)
        except Exception as error:  # a mistake of ours: without its watch the replica cannot be trusted
            reason = f"its watch failed: {type(error).__name__}: {error}"
        await self.deregister(replica.client.name, reason)
