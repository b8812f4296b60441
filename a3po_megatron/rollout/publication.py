"""How new weights reach all replicas, as the controller sees it.

    begin   pause every replica -> in the background: (join the group, when membership changed) -> start -> receive
    ...     the actor joins as rank 0 and sends, while the replicas receive
    finish  wait for the receivers -> finish(version) and probe on each -> resume

When a member dies on the way, the others' group breaks. `finish` then answers `again`: the survivors stay paused, and the actor
begins the same version anew, under a new epoch, for those that lack it. In `file` mode there is no group, and the replicas are
paused by `finish`, when the files are there. Whoever is behind when it has ended is filled by `catch_up.py`. Imports neither
torch nor vllm.
"""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from a3po_megatron.config.rollout import RolloutConfig
from a3po_megatron.rollout.catch_up import CatchUps, Manifest, load
from a3po_megatron.rollout.control import ReplicaError, encode_update
from a3po_megatron.rollout.in_flight import go_on, stop_for_update
from a3po_megatron.rollout.probe import Probe
from a3po_megatron.rollout.replicas import Replica, Replicas
from a3po_megatron.rollout.transfer_messages import (
    FILES_UNUSABLE,
    GROUP_BROKEN,
    PublicationOutcome,
    Rendezvous,
    SendPlan,
    Transfer,
    version_folder,
)
from a3po_megatron.rollout.weight_group import WeightGroup, first_ranks

MAX_ATTEMPTS = 3  # of one publication; whoever lacks the weights after the last is dropped


class PublicationError(RuntimeError):
    """New weights reached no replica. Nothing was published; the old version stays."""


@dataclass
class _Publication:
    version: int
    manifest: Manifest
    transfer: Transfer
    members: list[Replica]  # of this attempt
    attempt: int = 1
    again: bool = False  # this attempt is over, the next has not begun
    done: list[Replica] = field(default_factory=list)  # paused, with the new weights
    answered: set[str] = field(default_factory=set)
    broken: set[str] = field(default_factory=set)  # their group broke; they can be filled again
    receiving: asyncio.Task[dict[str, str]] | None = None  # name -> reason, of members that were dropped
    failed: dict[str, str] = field(default_factory=dict)  # in all attempts


class Publications:
    """One publication at a time, over one weight group for as long as the membership stays."""

    def __init__(self, config: RolloutConfig, replicas: Replicas, folder: Path) -> None:
        """`folder` must be one that the actor and all servers can reach: for meeting places and kept weights."""
        self._config = config
        self._replicas = replicas
        self._folder = folder.resolve()
        self._group = WeightGroup(self._folder)
        self._publication: _Publication | None = None
        self._lock = asyncio.Lock()
        self._probe = Probe(config)
        self._catch_ups = CatchUps(config, replicas, self._published, self._probe)

    @property
    def epoch(self) -> int:
        """Number of the weight group; a new one whenever the membership changed."""
        return self._group.epoch

    @property
    def under_way(self) -> int | None:
        """The version that is being published, if any is."""
        return self._publication.version if self._publication else None

    @property
    def is_idle(self) -> bool:
        """Whether no publication is under way, nor about to begin or end."""
        return self._publication is None and not self._lock.locked()

    @property
    def keeps_current(self) -> bool:
        """Whether the current version lies there as files, so that a replica needs nobody else to catch up."""
        return self._catch_ups.has(self._replicas.version)

    async def begin(
        self, version: int, manifest: Manifest, transfer: Transfer = "gloo", unique_id: str = ""
    ) -> SendPlan:
        """Pause the fleet and let it receive `version` in the background. Returns where the actor joins and sends.

        `manifest`: names, dtypes and shapes of all tensors in sending order. `unique_id`: of `nccl`, base64. Waits for a
        replica when there is none. Raises PublicationError when none comes within `startup_timeout_s` or another publication
        is under way.
        """
        async with self._lock:
            publication = self._next_attempt(version, manifest, transfer)
            members = await self._gather_members(publication)
            joins = not self._group.is_of(members)
            by_group = transfer != "file" and bool(members)
            wants_id = by_group and transfer == "nccl" and joins and not unique_id
            if by_group and joins and not wants_id:
                self._group.begin_epoch()
            publication.members, publication.again = members, wants_id
            self._publication = publication
            rendezvous = self._group.rendezvous(transfer, members, unique_id)
            if by_group and not wants_id:
                self._group.distrust()
                publication.receiving = asyncio.create_task(self._receive(publication, rendezvous if joins else None))
            keeps = transfer == "file" or self._config.keep_published
            return SendPlan(
                epoch=self.epoch,
                rendezvous=rendezvous,
                members=_names(members),
                bucket_bytes=self._config.bucket_bytes,
                keep_in=str(self._published) if keeps and not self._catch_ups.has(version) else "",
                unique_id_wanted=wants_id,
            )

    async def finish(self, version: int, error: str = "", kept: bool = False) -> PublicationOutcome:
        """Wait until the members have `version`, make it current and resume.

        `error`: why the actor could not send, or empty; `kept`: whether the version lies in `keep_in`. Raises
        PublicationError when after the last attempt no member has them.
        """
        async with self._lock:
            publication = self._publication
            if publication is None or publication.version != version or publication.again:
                begun = publication.version if publication else "none"
                raise PublicationError(f"version {version} cannot be finished: the publication under way is {begun}")
            outcome = None
            try:
                if kept:
                    self._catch_ups.keep(version, publication.manifest)
                outcome = await self._finish_attempt(publication, error)
            finally:
                if outcome is None or not outcome.again:
                    self._publication = None
            await self._replicas.notify()
        if not outcome.again:
            self._catch_ups.start()
        return outcome

    def catch_up(self) -> None:
        """Bring replicas that are behind to the current version from the kept files, in the background, if they are there."""
        if self.is_idle:  # else `finish` will
            self._catch_ups.start()

    def give_up(self) -> None:
        """Let everything under way go, and remove the kept weights."""
        if self._publication is not None and self._publication.receiving is not None:
            self._publication.receiving.cancel()
        self._catch_ups.give_up()

    @property
    def _published(self) -> Path:
        return self._folder / "published"

    def _next_attempt(self, version: int, manifest: Manifest, transfer: Transfer) -> _Publication:
        old = self._publication
        if old is None:
            return _Publication(version, manifest, transfer, [])
        if not old.again or old.version != version:
            raise PublicationError(f"version {version}: the publication of version {old.version} is not finished")
        return _Publication(version, manifest, transfer, [], old.attempt, done=old.done, failed=old.failed)

    async def _gather_members(self, publication: _Publication) -> list[Replica]:
        """Return all that lack the version, paused, but for those that catch up. Waits for one when there is nobody else."""
        members: list[Replica] = []
        while not members:
            await self._wait_for_any(publication)
            lacking = [replica for replica in self._replicas if not _is_in(replica, publication.done)]
            members = [replica for replica in lacking if not self._catch_ups.fills(replica)]
            if publication.transfer != "file":
                members = await self._pause_all(members)
            if any(self._replicas.holds(replica) for replica in publication.done):
                break
            if not members:
                await self._catch_ups.wait()
        return members

    async def _finish_attempt(self, publication: _Publication, error: str) -> PublicationOutcome:
        version = publication.version
        if publication.transfer == "file" and not error:
            publication.members = await self._pause_all(publication.members)
            publication.receiving = asyncio.create_task(self._receive(publication, None))
        if publication.receiving is not None:
            if error:
                await self._drop_silent(publication, error)
            publication.failed |= await publication.receiving
        members = [r for r in publication.members if self._replicas.holds(r)]
        complete = [r for r in members if r.client.name not in publication.broken] if publication.receiving else []
        if publication.transfer == "file" and not complete and FILES_UNUSABLE in str(publication.failed):
            self._catch_ups.forget()  # the actor writes them again
        await self._complete(publication, complete)
        lacking = [r for r in members if self._replicas.holds(r) and not _is_in(r, publication.done)]
        if lacking or not publication.done:
            if publication.attempt < MAX_ATTEMPTS:
                publication.attempt, publication.again = publication.attempt + 1, True
                return PublicationOutcome(version, [], dict(publication.failed), again=True)
            for replica in lacking:
                reason = f"version {version} did not arrive in {MAX_ATTEMPTS} attempts: {error or GROUP_BROKEN}"
                publication.failed[replica.client.name] = reason
                await self._replicas.drop(replica.client.name, reason)
        if not publication.done:
            reasons = "; ".join(publication.failed.values()) or error or "all were dropped"
            raise PublicationError(f"version {version} reached no replica in {MAX_ATTEMPTS} attempts: {reasons}")
        return await self._make_current(publication)

    async def _complete(self, publication: _Publication, filled: list[Replica]) -> None:
        """Bring those that are filled to the version, paused, and drop whoever fails the probe."""
        version = publication.version

        async def finish(replica: Replica) -> None:
            await replica.client.finish_weight_update(version)
            await self._probe.ask(replica)

        publication.failed |= await self._replicas.on_each(filled, finish)
        reasons = self._probe.judge(version)
        for name, reason in reasons.items():
            await self._replicas.drop(name, reason)
        publication.failed |= reasons
        publication.done = [r for r in [*publication.done, *filled] if self._replicas.holds(r)]
        if reasons and not publication.done and not any(True for _ in self._replicas):
            # Other replicas would be sent the same weights.
            raise PublicationError(f"version {version}: every replica failed the probe: {'; '.join(reasons.values())}")

    async def _make_current(self, publication: _Publication) -> PublicationOutcome:
        """Resume those that are done, under the new version."""
        # Before resume: what is drawn from now on, and what is asked from now on, is of this version.
        self._replicas.version = publication.version
        for replica in self._replicas:  # one that came meanwhile is not a member
            replica.state = "current" if _is_in(replica, publication.done) else "behind"
        publication.failed |= await self._replicas.on_each(publication.done, go_on)
        members = [replica for replica in publication.done if self._replicas.holds(replica)]
        if publication.transfer != "file" and members == publication.members:
            self._group.works_for(members)
        return PublicationOutcome(publication.version, _names(members), dict(publication.failed), again=False)

    async def _receive(self, publication: _Publication, rendezvous: Rendezvous | None) -> dict[str, str]:
        """Let all members receive; return those that were dropped. Those whose group broke are noted in `broken`."""
        timeout_s = self._config.transfer_timeout_s
        folder = version_folder(self._published, publication.version) if publication.transfer == "file" else None
        update = encode_update(publication.version, publication.manifest, self._config.bucket_bytes, folder)
        first_rank = first_ranks(publication.members)

        async def receive(replica: Replica) -> None:
            name = replica.client.name
            try:
                if rendezvous:
                    join = {**rendezvous, "first_rank": first_rank[name], "timeout_s": timeout_s}
                    # A little longer than the group's own deadline, so that its error, which says more, comes first.
                    await replica.client.join_weight_group(join, timeout_s + self._config.control_timeout_s)
                await load(replica, update, self._config)
            except ReplicaError as error:
                # vLLM's executor raises at the first of its workers that failed and leaves the answers of the others in
                # their queues, where the next call would take them for its own: such a server must be restarted.
                if GROUP_BROKEN not in str(error) or replica.world_size > 1:
                    raise
                publication.broken.add(name)
            finally:
                publication.answered.add(name)

        return await self._replicas.on_each(publication.members, receive)

    async def _drop_silent(self, publication: _Publication, error: str) -> None:
        """The actor could not send: whoever does not say within a control call's time that its group broke hangs."""
        assert publication.receiving is not None
        timeout_s = self._config.control_timeout_s
        await asyncio.wait((publication.receiving,), timeout=timeout_s)
        for replica in publication.members:
            if replica.client.name not in publication.answered:
                reason = (
                    f"replica {replica.client.name} was silent for {timeout_s:g} s after the transfer failed: {error}"
                )
                publication.failed[replica.client.name] = reason
                await self._replicas.drop(replica.client.name, reason)

    async def _pause_all(self, members: list[Replica]) -> list[Replica]:
        """Pause `members` and return those that are left."""
        await self._replicas.on_each(members, lambda replica: stop_for_update(replica, self._config))
        return [replica for replica in members if self._replicas.holds(replica)]

    async def _wait_for_any(self, publication: _Publication) -> None:
        timeout_s = self._config.startup_timeout_s
        try:
            async with asyncio.timeout(timeout_s), self._replicas.changed:
                await self._replicas.changed.wait_for(lambda: any(True for _ in self._replicas))
        except TimeoutError:
            reasons = "".join(f"; {reason}" for reason in publication.failed.values())
            raise PublicationError(
                f"version {publication.version} waited {timeout_s:g} s for a replica; none registered{reasons}"
            ) from None


def _names(members: Sequence[Replica]) -> list[str]:
    return [replica.client.name for replica in members]


def _is_in(replica: Replica, members: Sequence[Replica]) -> bool:
    return any(replica is member for member in members)
