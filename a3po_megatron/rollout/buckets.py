"""How a model's tensors are cut into buckets for the way from the actor to the replicas. Pure functions, torch only.

Both ends plan from the same list of names, dtypes and shapes, so a bucket needs no header: it is a flat uint8 buffer in
which tensor i lies at a known offset. Example with buckets of 64 bytes:

    a float32 [4] (16 bytes), b float32 [5] (20 bytes, starts at 16), c float32 [20] (80 bytes, larger than a bucket)
    -> bucket 0: a at 0, b at 16, 36 bytes;  bucket 1: c at 0, 80 bytes
"""

import math
import struct
import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

DTYPES = {str(dtype).removeprefix("torch."): dtype for dtype in (torch.float32, torch.bfloat16, torch.float16)}
ALIGNMENT = 16  # bytes; a tensor starts where a vector load may start
TRAILER_BYTES = 8  # checksum and version, after the last bucket


@dataclass(frozen=True)
class TensorSpec:
    """Name, dtype (`float32`, `bfloat16` or `float16`) and shape of one tensor of the Hugging Face checkpoint."""

    name: str
    dtype: str
    shape: tuple[int, ...]

    @property
    def num_bytes(self) -> int:
        """Size of the tensor's data in bytes."""
        return math.prod(self.shape) * DTYPES[self.dtype].itemsize


@dataclass(frozen=True)
class Bucket:
    """Tensors that travel in one broadcast, the byte at which each starts, and the size of the whole in bytes."""

    specs: tuple[TensorSpec, ...]
    offsets: tuple[int, ...]
    num_bytes: int


def manifest_of(specs: Sequence[TensorSpec]) -> dict[str, list[Any]]:
    """Return the lists that name, type and shape the tensors in an HTTP message, in sending order."""
    return {
        "names": [spec.name for spec in specs],
        "dtypes": [spec.dtype for spec in specs],
        "shapes": [list(spec.shape) for spec in specs],
    }


def read_manifest(manifest: Mapping[str, Sequence[Any]]) -> tuple[TensorSpec, ...]:
    """Return the tensors that a message names. Raises ValueError when the lists do not describe a model."""
    names, dtypes, shapes = manifest["names"], manifest["dtypes"], manifest["shapes"]
    if not len(names) == len(dtypes) == len(shapes):
        raise ValueError(
            f"manifest: {len(names)} names, {len(dtypes)} dtypes and {len(shapes)} shapes; one of each a tensor"
        )
    if not names:
        raise ValueError("manifest: no tensor is named; a publication sends the whole model")
    if len(set(names)) != len(names):
        raise ValueError(
            f"manifest: a tensor is named twice: {sorted(name for name in set(names) if names.count(name) > 1)}"
        )
    for name, dtype, shape in zip(names, dtypes, shapes, strict=True):
        if dtype not in DTYPES:
            raise ValueError(f"manifest: {name} has dtype {dtype}; weights travel as {', '.join(DTYPES)}")
        if any(size < 0 for size in shape):
            raise ValueError(f"manifest: {name} has shape {list(shape)}; no size may be negative")
    return tuple(
        TensorSpec(name, dtype, tuple(shape)) for name, dtype, shape in zip(names, dtypes, shapes, strict=True)
    )


def plan(specs: Sequence[TensorSpec], bucket_bytes: int) -> tuple[Bucket, ...]:
    """Cut `specs`, in order, into buckets of at most `bucket_bytes` bytes; a tensor larger than that travels alone."""
    if bucket_bytes < 1:
        raise ValueError(f"bucket_bytes={bucket_bytes}: must be at least 1")
    buckets: list[Bucket] = []
    members: list[TensorSpec] = []
    offsets: list[int] = []
    end = 0
    for spec in specs:
        start = _aligned(end)
        if members and start + spec.num_bytes > bucket_bytes:
            buckets.append(Bucket(tuple(members), tuple(offsets), end))
            members, offsets, start = [], [], 0
        members.append(spec)
        offsets.append(start)
        end = start + spec.num_bytes
    if members:
        buckets.append(Bucket(tuple(members), tuple(offsets), end))
    return tuple(buckets)


def pack(bucket: Bucket, tensors: Iterator[tuple[str, torch.Tensor]], buffer: torch.Tensor) -> torch.Tensor:
    """Take the bucket's tensors from `tensors` and return them as the front of `buffer` (uint8, on the CPU).

    Raises ValueError when the iterator ends early or its next tensor is not the one that the plan names.
    """
    flat = buffer[: bucket.num_bytes]
    flat.zero_()  # the gaps between tensors count in the checksum
    for spec, offset in zip(bucket.specs, bucket.offsets, strict=True):
        name, tensor = next(tensors, (None, None))
        if name is None or tensor is None:
            raise ValueError(f"the tensors end before {spec.name}, which the manifest names")
        if (name, tensor.dtype, tuple(tensor.shape)) != (spec.name, DTYPES[spec.dtype], spec.shape):
            raise ValueError(
                f"expected {spec.name} ({spec.dtype}, {list(spec.shape)}) as the manifest says, "
                f"got {name} ({tensor.dtype}, {list(tensor.shape)})"
            )
        flat[offset : offset + spec.num_bytes].view(DTYPES[spec.dtype]).copy_(tensor.detach().reshape(-1))
    return flat


def unpack(bucket: Bucket, flat: torch.Tensor) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield (name, tensor) for each tensor of a received bucket. The tensors are views of `flat`: keep it unchanged."""
    for spec, offset in zip(bucket.specs, bucket.offsets, strict=True):
        yield spec.name, flat[offset : offset + spec.num_bytes].view(DTYPES[spec.dtype]).view(spec.shape)


def add_to_checksum(checksum: int, flat: torch.Tensor) -> int:
    """Return the crc32 of everything so far and the bytes of `flat`; start from 0."""
    return zlib.crc32(flat.numpy(), checksum)


def trailer(checksum: int, version: int) -> torch.Tensor:
    """Return the 8 bytes that close a publication: crc32 of all buckets and the version, little endian."""
    return torch.frombuffer(bytearray(struct.pack("<II", checksum, version)), dtype=torch.uint8)


def check_trailer(received: torch.Tensor, checksum: int, version: int) -> None:
    """Raise ValueError when the sender's trailer names another checksum or version than this end has seen."""
    sent_checksum, sent_version = struct.unpack("<II", received.numpy().tobytes())
    if sent_checksum != checksum:
        raise ValueError(
            f"weights of version {version} arrived damaged: crc32 {checksum:#010x}, sent {sent_checksum:#010x}"
        )
    if sent_version != version:
        raise ValueError(f"expected weights of version {version}, the sender sent version {sent_version}")


def _aligned(position: int) -> int:
    return -(-position // ALIGNMENT) * ALIGNMENT
