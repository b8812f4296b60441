"""A replica's end of a publication: the mirror of `weight_sender.py`. Torch only, no vllm."""

from collections.abc import Iterator, Sequence

import torch

from a3po_megatron.rollout import buckets
from a3po_megatron.rollout.buckets import TensorSpec
from a3po_megatron.rollout.transfer_group import TransferGroup


def receive_tensors(
    group: TransferGroup, specs: Sequence[TensorSpec], version: int, bucket_bytes: int
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield (name, tensor) of `specs` as their buckets arrive; after the last, check the checksum and the version.

    Raises ValueError when bytes or version are not what was sent, RuntimeError when a member fails or is too slow.
    """
    plan, checksum = buckets.plan(specs, bucket_bytes), 0
    for index, bucket in enumerate(plan):
        # A fresh buffer each time: a half loaded layer still refers to the tensors of earlier buckets.
        flat = torch.empty(bucket.num_bytes, dtype=torch.uint8)
        group.broadcast(flat, f"receiving bucket {index + 1} of {len(plan)} of version {version}")
        checksum = buckets.add_to_checksum(checksum, flat)
        yield from buckets.unpack(bucket, flat)
    trailer = torch.empty(buckets.TRAILER_BYTES, dtype=torch.uint8)
    group.broadcast(trailer, f"receiving the checksum of version {version}")
    buckets.check_trailer(trailer, checksum, version)
