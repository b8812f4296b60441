"""The actor's end of a publication: sends a model's tensors bucket by bucket. Torch only, no vllm."""

from collections.abc import Iterable, Sequence
from pathlib import Path

import torch

from a3po_megatron.rollout import buckets
from a3po_megatron.rollout.buckets import TensorSpec
from a3po_megatron.rollout.transfer_group import SENDER_RANK, TransferGroup


class WeightSender:
    """Rank 0 of one weight group. Holds one bucket in memory, reused, besides the tensor at hand.

    After any error the group is closed, so that receivers fail at once instead of at their deadline; make a new sender
    with the rendezvous of the next epoch.
    """

    def __init__(self, store: str | Path, world_size: int, timeout_s: float, host: str = "127.0.0.1") -> None:
        """Join the group that meets at `store` and wait for the replicas' workers. RuntimeError at the deadline."""
        self._group = TransferGroup(store, SENDER_RANK, world_size, timeout_s, host)
        self._buffer = torch.empty(0, dtype=torch.uint8)

    def send(
        self, specs: Sequence[TensorSpec], tensors: Iterable[tuple[str, torch.Tensor]], version: int, bucket_bytes: int
    ) -> int:
        """Send `tensors`, which must be those of `specs` in that order, as weights of `version`. Returns bytes sent.

        Raises ValueError when tensors and specs differ, RuntimeError when a receiver fails or is too slow.
        """
        stream, checksum, num_bytes = iter(tensors), 0, 0
        plan = buckets.plan(specs, bucket_bytes)
        largest = max(bucket.num_bytes for bucket in plan)
        if self._buffer.numel() < largest:
            self._buffer = torch.empty(largest, dtype=torch.uint8)
        try:
            for index, bucket in enumerate(plan):
                flat = buckets.pack(bucket, stream, self._buffer)
                checksum = buckets.add_to_checksum(checksum, flat)
                self._group.broadcast(flat, f"sending bucket {index + 1} of {len(plan)} of version {version}")
                num_bytes += bucket.num_bytes
            extra = next(stream, None)
            if extra is not None:
                raise ValueError(f"{extra[0]} is not in the manifest: the tensors go on after its end")
            self._group.broadcast(buckets.trailer(checksum, version), f"sending the checksum of version {version}")
        except BaseException:
            self.close()
            raise
        return num_bytes

    def close(self) -> None:
        """Leave the group and free the bucket."""
        self._group.close()
        self._buffer = torch.empty(0, dtype=torch.uint8)
