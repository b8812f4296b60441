"""The actor's end of a publication: sends a model's tensors bucket by bucket, and keeps them as files. Torch, no vllm.

tensors   gather, pack, seal 0 | gather, pack, seal 1 | gather, pack, seal 2 | ...
wire, file                     | bucket 0             | bucket 1             | ...
"""

import time
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

import torch

from a3po_megatron.rollout import buckets
from a3po_megatron.rollout.buckets import Bucket, TensorSpec
from a3po_megatron.rollout.transfer_group import GroupBroken, Pending, TransferGroup
from a3po_megatron.rollout.weight_files import VersionWriter


@dataclass
class Sent:
    """What was sent, and where the time went: seconds of gathering, packing, and waiting for the wire and the files."""

    num_bytes: int = 0
    error: str = ""  # how the group broke
    kept: bool = False  # whether all of it lies as files where it was to be kept
    keep_error: str = ""  # why the version was not kept as files, though that was asked for
    seconds: dict[str, float] = field(default_factory=lambda: dict.fromkeys(("gather", "pack", "wire", "file"), 0.0))


class WeightSender:
    """Rank 0 of one weight group, or of none (files only). Holds two buckets, reused, besides the tensor at hand.

    After any error, and when the group broke, it is closed, so that receivers fail at once instead of at their deadline; make a
    new sender with the rendezvous of the next epoch.
    """

    def __init__(self, group: TransferGroup | None) -> None:
        """Send to `group`, which is closed with the sender."""
        self._group = group
        self._slots = [_Slot(group.device if group else torch.device("cpu")) for _ in range(2)]
        self._rooms: dict[str, torch.Tensor] = {}

    def room(self, name: str) -> torch.Tensor | None:
        """Return where tensor `name` of the bucket at hand will lie, so that it may be gathered right there."""
        return self._rooms.get(name)

    def send(
        self,
        specs: Sequence[TensorSpec],
        tensors: Iterable[tuple[str, torch.Tensor]],
        version: int,
        bucket_bytes: int,
        keep_in: Path | None = None,
    ) -> Sent:
        """Send `tensors`, which must be those of `specs` in that order, as weights of `version`; keep them in `keep_in`.

        A group that breaks is told in `Sent.error`; the tensors are taken to the end all the same, for the files and because other
        ranks gather along. A disk that fails is told in `Sent.keep_error`; the receivers get their weights all the same. Raises
        ValueError when tensors and specs differ.
        """
        sent, plan = Sent(), buckets.plan(specs, bucket_bytes)
        stream = _Timed(iter(tensors), sent)
        files = _Files(keep_in, version, sent) if keep_in else None
        try:
            for number, bucket in enumerate(plan):
                slot = self._slots[number % 2]
                slot.wait(sent)
                flat = self._pack(bucket, stream, slot, sent)
                if number + 1 == len(plan) and (extra := next(stream, None)) is not None:
                    raise ValueError(f"{extra[0]} is not in the manifest: the tensors go on after its end")
                began = time.perf_counter()
                buckets.seal(bucket, flat, version, number)
                sent.seconds["pack"] += time.perf_counter() - began
                if self._group and not sent.error:
                    slot.send(
                        self._group, flat, f"sending bucket {number + 1} of {len(plan)} of version {version}", sent
                    )
                if files:
                    slot.writing = files.write(bucket, flat)
                sent.num_bytes += bucket.num_bytes
            for slot in self._slots:
                slot.wait(sent)
            if files:
                sent.kept = files.commit()
        except BaseException:
            self.close()
            raise
        finally:
            if files:
                files.close()
        if sent.error:
            self.close()
        return sent

    def _pack(
        self, bucket: Bucket, stream: Iterator[tuple[str, torch.Tensor]], slot: "_Slot", sent: Sent
    ) -> torch.Tensor:
        began, gathered = time.perf_counter(), sent.seconds["gather"]
        buffer = slot.room(bucket)
        self._rooms = dict(buckets.unpack(bucket, buffer))
        flat = buckets.pack(bucket, stream, buffer)
        sent.seconds["pack"] += time.perf_counter() - began - (sent.seconds["gather"] - gathered)
        return flat

    def close(self) -> None:
        """Leave the group, once what is on its way has arrived or failed, and free the buckets."""
        self._rooms.clear()
        for slot in self._slots:
            slot.wait(Sent())
            slot.buffer = torch.empty(0, dtype=torch.uint8)
        if self._group:
            self._group.close()


class _Slot:
    """Room for one bucket, and what still reads it."""

    def __init__(self, device: torch.device) -> None:
        self.buffer = torch.empty(0, dtype=torch.uint8, device=device)
        self.sending: Pending | None = None
        self.writing: Future[None] | None = None

    def room(self, bucket: Bucket) -> torch.Tensor:
        if self.buffer.numel() < bucket.wire_bytes:
            self.buffer = torch.empty(bucket.wire_bytes, dtype=torch.uint8, device=self.buffer.device)
        return self.buffer

    def send(self, group: TransferGroup, flat: torch.Tensor, what: str, sent: Sent) -> None:
        try:
            self.sending = group.broadcast(flat, what)
        except GroupBroken as error:
            sent.error = str(error)

    def wait(self, sent: Sent) -> None:
        """Return once the buffer may be overwritten."""
        began = time.perf_counter()
        sending, self.sending = self.sending, None
        writing, self.writing = self.writing, None
        try:
            if sending is not None:
                sending.wait()
        except GroupBroken as error:
            sent.error = sent.error or str(error)
        arrived = time.perf_counter()
        if writing is not None:
            writing.result()
        sent.seconds["wire"] += arrived - began
        sent.seconds["file"] += time.perf_counter() - arrived


class _Files:
    """Writes a version in a thread of its own; the first error of the disk ends that and is remembered."""

    def __init__(self, root: Path, version: int, sent: Sent) -> None:
        self._sent = sent
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="keep weights")
        self._writer: VersionWriter | None = None
        try:
            self._writer = VersionWriter(root, version)
        except OSError as error:
            self._fail(error)

    def write(self, bucket: Bucket, flat: torch.Tensor) -> "Future[None]":
        return self._pool.submit(self._write, bucket, flat)

    def commit(self) -> bool:
        """Show the version; return whether all of it is there."""
        if self._writer:
            try:
                self._writer.commit()
                self._writer = None
                return True
            except OSError as error:
                self._fail(error)
        return False

    def close(self) -> None:
        """End the thread; remove what was not committed."""
        self._pool.shutdown()
        if self._writer:
            self._writer.abandon()

    def _write(self, bucket: Bucket, flat: torch.Tensor) -> None:
        if self._writer:
            try:
                self._writer.add(bucket, flat)
            except OSError as error:
                self._fail(error)

    def _fail(self, error: OSError) -> None:
        self._sent.keep_error = f"{error.filename or 'the folder of kept weights'}: {error.strerror}"
        if self._writer:
            self._writer.abandon()
            self._writer = None


class _Timed:
    """An iterator that adds the time of each step to `sent`."""

    def __init__(self, stream: Iterator[tuple[str, torch.Tensor]], sent: Sent) -> None:
        self._stream, self._sent = stream, sent

    def __iter__(self) -> "_Timed":
        return self

    def __next__(self) -> tuple[str, torch.Tensor]:
        began = time.perf_counter()
        try:
            return next(self._stream)
        finally:
            self._sent.seconds["gather"] += time.perf_counter() - began
