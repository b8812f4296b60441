"""A replica's end of a publication: the mirror of `weight_sender.py`. Torch, no vllm: `weight_engine.py` is the adapter.

While one bucket is loaded the next one arrives. A receiver that cannot use what comes receives it to the end all the same: in
gloo's tree others get their weights through it. Then it says why.
"""

import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from a3po_megatron.rollout import buckets
from a3po_megatron.rollout.buckets import TensorSpec
from a3po_megatron.rollout.rendezvous import join_group
from a3po_megatron.rollout.transfer_group import GroupBroken, Pending, TransferGroup
from a3po_megatron.rollout.weight_files import read_version

KEPT_BUFFERS = 2  # one that arrives while the other is loaded
Tensors = Iterator[tuple[str, torch.Tensor]]


@dataclass(frozen=True)
class Incoming:
    """One version on its way: what comes, in which order, in buckets of what size, and the folder if it comes as files."""

    version: int
    specs: Sequence[TensorSpec]
    bucket_bytes: int
    folder: str = ""


class WeightReceiver:
    """One worker of a replica. Is in at most one weight group at a time."""

    def __init__(self) -> None:
        self._group: TransferGroup | None = None
        self._buffers = _Buffers()

    def join(self, rendezvous: Mapping[str, Any], rank: int, timeout_s: float, host: str) -> None:
        """Leave the old group, then join that of a new epoch. Raises GroupBroken when not all come in time."""
        self.leave()
        self._group = join_group(rendezvous, rank, timeout_s, host)

    def receive[T](self, incoming: Incoming, load: Callable[[Tensors], T]) -> T:
        """Return `load` of the tensors, which arrive while it takes them.

        Raises ValueError for weights that are damaged or of another version, GroupBroken when another member fails or the
        sender is too slow. After any error the group has been left.
        """
        if incoming.folder:
            return load(read_version(Path(incoming.folder), incoming.specs, incoming.version))
        if self._group is None:
            raise RuntimeError(f"version {incoming.version} was announced before this worker joined a weight group")
        stream = _Stream(self._group, incoming, self._buffers)
        try:
            loaded = load(stream.tensors())
            stream.drain()
        except BaseException:
            with suppress(GroupBroken):  # what went wrong first is the reason
                stream.drain()
            self.leave()
            raise
        return loaded

    def leave(self) -> None:
        """Leave the weight group, if any."""
        if self._group is not None:
            self._group.close()
            self._group = None
            self._buffers = _Buffers()


class _Buffers:
    """Host memory for buckets. Used again, since fresh memory costs several times what filling it does.

    A buffer is free when nobody refers to its tensor or a view of it: a half loaded layer refers to earlier buckets.
    """

    def __init__(self) -> None:
        self._free: list[NDArray[np.uint8]] = []

    def take(self, num_bytes: int, at_least: int) -> torch.Tensor:
        """Return `num_bytes` of a buffer that holds `at_least` bytes."""
        memory = next((memory for memory in self._free if len(memory) >= num_bytes), None)
        if memory is None:
            memory = np.empty(max(num_bytes, at_least), np.uint8)
        else:
            self._free = [other for other in self._free if other is not memory]
        lease = memory[:num_bytes]  # torch refers to it as long as a tensor refers to the memory
        weakref.finalize(lease, self._give_back, memory).atexit = False
        return torch.from_numpy(lease)

    def _give_back(self, memory: NDArray[np.uint8]) -> None:
        if len(self._free) < KEPT_BUFFERS:
            self._free.append(memory)


class _Stream:
    """The buckets of one version, each asked for while the one before it is used."""

    def __init__(self, group: TransferGroup, incoming: Incoming, buffers: _Buffers) -> None:
        self._group, self._incoming, self._buffers = group, incoming, buffers
        self._plan = buckets.plan(incoming.specs, incoming.bucket_bytes)
        self._largest = max(bucket.wire_bytes for bucket in self._plan)
        self._asked = 0
        self._ahead: tuple[torch.Tensor, Pending] | None = None
        self._broken = False

    def tensors(self) -> Tensors:
        """Yield (name, tensor); nothing of a damaged bucket."""
        for number, bucket in enumerate(self._plan):
            flat = self._next()
            buckets.check_seal(bucket, flat, self._incoming.version, number)
            yield from buckets.unpack(bucket, flat)

    def drain(self) -> None:
        """Receive what was not taken, for the others' sake. Nothing is left to do after a whole version."""
        while not self._broken and (self._ahead is not None or self._asked < len(self._plan)):
            self._next()

    def _next(self) -> torch.Tensor:
        """Return the next bucket, and ask for the one after it."""
        try:
            flat, pending = self._ahead or self._ask()
            self._ahead = None
            pending.wait()
            if self._asked < len(self._plan):
                self._ahead = self._ask()
        except GroupBroken:
            self._broken = True
            raise
        return flat

    def _ask(self) -> tuple[torch.Tensor, Pending]:
        num_bytes = self._plan[self._asked].wire_bytes
        if self._group.device.type == "cpu":
            flat = self._buffers.take(num_bytes, self._largest)
        else:  # torch keeps a GPU's memory itself
            flat = torch.empty(num_bytes, dtype=torch.uint8, device=self._group.device)
        self._asked += 1
        what = f"receiving bucket {self._asked} of {len(self._plan)} of version {self._incoming.version}"
        return flat, self._group.broadcast(flat, what)
