"""How new weights reach all replicas, as the controller sees it.

    begin   pause every replica -> in the background: (join the group, when membership changed) -> start -> receive
    ...     the actor joins as rank 0 and sends, while the replicas receive
    finish  wait for the receivers -> finish(version) on each -> resume

Imports neither torch nor vllm.
"""

import asyncio
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from a3po_megatron.config.schema import RolloutConfig
from a3po_megatron.rollout.in_flight import go_on, stop_for_update
from a3po_megatron.rollout.replicas import Replica, Replicas


class PublicationError(RuntimeError):
    """New weights reached no replica. Nothing was published; the old version stays."""


@dataclass
class _Publication:
    version: int
    members: list[Replica]
    receiving: asyncio.Task[dict[str, str]]  # name -> reason, of members that failed


class Publications:
    """One publication at a time, over one weight group for as long as the membership stays."""

    def __init__(self, config: RolloutConfig, replicas: Replicas, rendezvous_dir: Path) -> None:
        """`rendezvous_dir` must be a folder that the actor and all servers can reach."""
        self._config = config
        self._replicas = replicas
        self._rendezvous_dir = rendezvous_dir
        self._publication: _Publication | None = None
        self._lock = asyncio.Lock()
        self._joined: tuple[str, ...] = ()  # members of the weight group of this epoch; empty: none that works
        self._store: Path | None = None
        self.epoch = 0

    @property
    def under_way(self) -> int | None:
        """The version that is being published, if any is."""
        return self._publication.version if self._publication else None

    @property
    def is_idle(self) -> bool:
        """Whether no publication is under way, nor about to begin or end."""
        return self._publication is None and not self._lock.locked()

    async def begin(self, version: int, manifest: Mapping[str, Sequence[Any]]) -> dict[str, Any]:
        """Pause the fleet and let it receive `version` in the background. Returns where the actor joins and sends.

        `manifest`: names, dtypes and shapes of all tensors in sending order. The answer: epoch (same as last time:
        reuse the group), rendezvous {store, world_size, rank}, members (names), bucket_bytes. Waits for a replica when
        there is none. Raises PublicationError when none comes within `startup_timeout_s` or a publication is under way.
        """
        async with self._lock:
            if self._publication is not None:
                raise PublicationError(
                    f"version {version}: the publication of version {self._publication.version} is not finished"
                )
            members: list[Replica] = []
            while not members:
                await self._wait_for_any(version)
                members = list(self._replicas)
                await self._replicas.on_each(members, self._pause)
                members = [replica for replica in members if self._replicas.holds(replica)]
            names = tuple(replica.client.name for replica in members)
            joins = names != self._joined
            if joins:
                self._new_epoch()
            self._joined = ()  # until this publication has ended well
            world_size = 1 + sum(replica.world_size for replica in members)
            receiving = asyncio.create_task(self._receive(members, joins, world_size, version, manifest))
            self._publication = _Publication(version, members, receiving)
            return {
                "epoch": self.epoch,
                "rendezvous": {"store": str(self._store), "world_size": world_size, "rank": 0},
                "members": list(names),
                "bucket_bytes": self._config.bucket_bytes,
            }

    async def finish(self, version: int) -> dict[str, Any]:
        """Wait until the members have `version`, make it current and resume. Returns {version, members, failed}.

        `failed` maps members that were dropped to reasons. Raises PublicationError when no member has the new weights.
        """
        async with self._lock:
            publication = self._publication
            if publication is None or publication.version != version:
                begun = publication.version if publication else "none"
                raise PublicationError(f"version {version} cannot be finished: the publication under way is {begun}")
            try:
                failed = dict(await publication.receiving)
                members = [replica for replica in publication.members if self._replicas.holds(replica)]
                failed |= await self._replicas.on_each(
                    members, lambda replica: replica.client.finish_weight_update(version)
                )
                members = [replica for replica in members if self._replicas.holds(replica)]
                if members:
                    # Before resume: what is drawn from now on, and what is asked from now on, is of this version.
                    self._replicas.version = version
                    for replica in self._replicas:  # one that came meanwhile is not a member
                        replica.state = "current" if any(replica is member for member in members) else "behind"
                failed |= await self._replicas.on_each(members, go_on)
                members = [replica for replica in members if self._replicas.holds(replica)]
            finally:
                self._publication = None
            await self._replicas.notify()
            if not members:
                raise PublicationError(
                    f"version {version} reached no replica: {'; '.join(failed.values()) or 'all were dropped'}"
                )
            names = tuple(replica.client.name for replica in members)
            if len(members) == len(publication.members):
                self._joined = names
            return {"version": version, "members": list(names), "failed": failed}

    def give_up(self) -> None:
        """Let a publication under way go."""
        if self._publication is not None:
            self._publication.receiving.cancel()

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
                    "timeout_s": timeout_s,
                }
                # A little longer than the group's own deadline, so that its error, which says more, comes first.
                await replica.client.join_weight_group(join, timeout_s + self._config.control_timeout_s)
            await replica.client.start_weight_update()
            await replica.client.update_weights(update, timeout_s + self._config.control_timeout_s)

        return await self._replicas.on_each(members, receive)

    async def _pause(self, replica: Replica) -> None:
        await stop_for_update(replica, self._config)

    async def _wait_for_any(self, version: int) -> None:
        timeout_s = self._config.startup_timeout_s
        try:
            async with asyncio.timeout(timeout_s), self._replicas.changed:
                await self._replicas.changed.wait_for(lambda: any(True for _ in self._replicas))
        except TimeoutError:
            raise PublicationError(f"version {version} waited {timeout_s:g} s for a replica; none registered") from None

    def _new_epoch(self) -> None:
        """Choose a new meeting place; the old one is of no use any more."""
        if self._store is not None:
            self._store.unlink(missing_ok=True)
        self.epoch += 1
        self._rendezvous_dir.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._store = self._rendezvous_dir.resolve() / f"epoch_{self.epoch}_{uuid.uuid4().hex}"
