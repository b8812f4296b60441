"""Replicas that come when a version is live get it from the files that the actor kept. Imports neither torch nor vllm.

Each is filled on its own, whatever else goes on. A publication neither waits for one that is being filled nor breaks it off,
for vLLM begins no update before the one under way has ended: it leaves it out, unless there is nobody else. Files stay until
nobody reads them.
"""

import asyncio
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from a3po_megatron.config.rollout import RolloutConfig
from a3po_megatron.rollout.control import ReplicaError, encode_update
from a3po_megatron.rollout.in_flight import go_on, stop_for_update
from a3po_megatron.rollout.probe import Probe
from a3po_megatron.rollout.replicas import Replica, Replicas
from a3po_megatron.rollout.transfer_messages import FILES_UNUSABLE, version_folder

Manifest = Mapping[str, Sequence[Any]]  # names, dtypes and shapes of all tensors


class CatchUps:
    """The kept version, and those that it is being read by."""

    def __init__(self, config: RolloutConfig, replicas: Replicas, folder: Path, probe: Probe) -> None:
        """`folder`: where versions lie, each in a folder of its own."""
        self._config = config
        self._replicas = replicas
        self._folder = folder
        self._probe = probe
        self._kept: tuple[int, bytes] | None = None  # version, the update that tells a replica to read it
        self._lying: set[int] = set()  # versions in the folder
        self._reads: dict[Replica, int] = {}  # which version each reads
        self._tasks: set[asyncio.Task[None]] = set()

    def has(self, version: int) -> bool:
        """Whether `version` lies there and can be read, as far as is known."""
        return self._kept is not None and self._kept[0] == version

    def keep(self, version: int, manifest: Manifest) -> None:
        """Fill from `version`, which lies there now, from now on."""
        update = encode_update(version, manifest, self._config.bucket_bytes, version_folder(self._folder, version))
        self._kept = version, update
        self._lying.add(version)

    def forget(self) -> None:
        """Fill nobody any more: the files cannot be read."""
        self._kept = None

    def fills(self, replica: Replica) -> bool:
        """Whether `replica` is being filled now."""
        return replica in self._reads

    def start(self) -> None:
        """Begin to fill, in the background, all that are behind the current version, if it lies there; remove old files."""
        if self._kept is not None and self.has(self._replicas.version):
            for replica in self._replicas:
                if replica.state == "behind" and not self.fills(replica):
                    self._reads[replica] = self._kept[0]
                    self._run(self._fill(replica, *self._kept), f"catch up {replica.client.name}")
        self._remove_old()

    async def wait(self) -> None:
        """Return when one of those under way has ended; each has deadlines of its own."""
        if self._tasks:
            await asyncio.wait(self._tasks, return_when=asyncio.FIRST_COMPLETED)

    def give_up(self) -> None:
        """Let everything under way go, and remove the files."""
        for task in self._tasks:
            task.cancel()
        shutil.rmtree(self._folder, ignore_errors=True)

    async def _fill(self, replica: Replica, version: int, update: bytes) -> None:
        async def fill(replica: Replica) -> None:
            await stop_for_update(replica, self._config)
            try:
                await load(replica, update, self._config)
            except ReplicaError as error:
                if FILES_UNUSABLE in str(error) and self.has(version):
                    self.forget()  # else every newcomer would be dropped for it
                raise
            await replica.client.finish_weight_update(version)
            await self._probe.check(replica, version)
            await go_on(replica)

        try:
            failed = await self._replicas.on_each([replica], fill)
        finally:
            del self._reads[replica]
        if not failed and version == self._replicas.version:  # else it waits for the next publication
            replica.state = "current"
        self._remove_old()
        await self._replicas.notify()

    def _remove_old(self) -> None:
        if self._kept is not None:
            old = self._lying - {self._kept[0], *self._reads.values()}
            self._lying -= old
            for version in old:
                folder = version_folder(self._folder, version)
                self._run(asyncio.to_thread(shutil.rmtree, folder, ignore_errors=True), f"remove {folder.name}")

    def _run(self, work: Any, name: str) -> None:
        task = asyncio.create_task(work, name=name)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)


async def load(replica: Replica, update: bytes, config: RolloutConfig) -> None:
    """Let a paused replica receive or read one version; `finish_weight_update` comes next. Raises ReplicaError."""
    await replica.client.start_weight_update()
    await replica.client.update_weights(update, config.transfer_timeout_s + config.control_timeout_s)
