"""How a model's tensors are cut into buckets for the way from the actor to the replicas. Pure functions, torch only.

Both ends plan from the same list of names, dtypes and shapes, so a bucket needs no header: it is a flat uint8 buffer in
which tensor i lies at a known offset, closed by a seal of 24 bytes: checksum, version, number of the bucket. Example with
buckets of 64 bytes:

    a float32 [4] (16 bytes), b float32 [5] (20 bytes, starts at 16), c float32 [20] (80 bytes, larger than a bucket)
    -> bucket 0: a at 0, b at 16, 36 bytes, seal at 48;  bucket 1: c at 0, 80 bytes, seal at 80
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

DTYPES = {str(dtype).removeprefix("torch."): dtype for dtype in (torch.float32, torch.bfloat16, torch.float16)}
ALIGNMENT = 16  # bytes; a tensor starts where a vector load may start
SEAL_BYTES = 24  # checksum, version and number of the bucket, int64 each
ROW = 1024  # words of a row in the checksum
ROWS_IN_CACHE = 32  # 256 KiB


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

    @property
    def seal_at(self) -> int:
        """The byte at which the seal begins."""
        return _aligned(self.num_bytes)

    @property
    def wire_bytes(self) -> int:
        """Size in bytes of what travels: tensors, gaps and seal."""
        return self.seal_at + SEAL_BYTES


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
    """Take the bucket's tensors from `tensors` and return them, unsealed, as the front of `buffer` (uint8).

    Raises ValueError when the iterator ends early or its next tensor is not the one that the plan names.
    """
    flat, end = buffer[: bucket.wire_bytes], 0
    for spec, offset in zip(bucket.specs, bucket.offsets, strict=True):
        name, tensor = next(tensors, (None, None))
        if name is None or tensor is None:
            raise ValueError(f"the tensors end before {spec.name}, which the manifest names")
        if (name, tensor.dtype, tuple(tensor.shape)) != (spec.name, DTYPES[spec.dtype], spec.shape):
            raise ValueError(
                f"expected {spec.name} ({spec.dtype}, {list(spec.shape)}) as the manifest says, "
                f"got {name} ({tensor.dtype}, {list(tensor.shape)})"
            )
        flat[end:offset].zero_()  # the gaps count in the checksum
        end = offset + spec.num_bytes
        place = flat[offset:end].view(DTYPES[spec.dtype])
        if tensor.data_ptr() != place.data_ptr():  # else it was gathered right there
            place.copy_(tensor.detach().reshape(-1))
    flat[end : bucket.seal_at].zero_()
    return flat


def unpack(bucket: Bucket, flat: torch.Tensor) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield (name, tensor) for each tensor of a received bucket. The tensors are views of `flat`: keep it unchanged."""
    for spec, offset in zip(bucket.specs, bucket.offsets, strict=True):
        yield spec.name, flat[offset : offset + spec.num_bytes].view(DTYPES[spec.dtype]).view(spec.shape)


def seal(bucket: Bucket, flat: torch.Tensor, version: int, number: int) -> None:
    """Close a packed bucket with its checksum, the version and its number in the plan."""
    said = [checksum(flat[: bucket.seal_at]), version, number]
    flat[bucket.seal_at :].copy_(torch.tensor(said, dtype=torch.int64).view(torch.uint8))


def check_seal(bucket: Bucket, flat: torch.Tensor, version: int, number: int) -> None:
    """Raise ValueError when a received bucket is damaged, or is of another version or another place than expected."""
    said, sent_version, sent_number = flat[bucket.seal_at :].cpu().clone().view(torch.int64).tolist()
    found = checksum(flat[: bucket.seal_at])
    if found != said:
        raise ValueError(
            f"bucket {number + 1} of version {version} arrived damaged: checksum {found:#x}, its seal says {said:#x}"
        )
    if sent_version != version:
        raise ValueError(f"expected weights of version {version}, the sender sent version {sent_version}")
    if sent_number != number:
        raise ValueError(f"expected bucket {number + 1} of version {version}, bucket {sent_number + 1} came")


def checksum(flat: torch.Tensor) -> int:
    """Return a checksum, modulo 2^64, of uint8 data of a multiple of 16 bytes, computed where it lies (CPU or GPU).

    The sum of (2 i + 1) w over the 64-bit words, w at place i: an odd factor can be undone, so no change of a single word
    goes unseen, and each place has its own, so words that moved are seen too. Words lie in rows of 1024, which are summed by
    column and by row: the factor is 2 column + 1 and 2048 row. A crc of a bucket in a GPU's memory would have to leave it first.
    """
    words = flat.view(torch.int64)
    whole = len(words) // ROW * ROW
    rows, rest = words[:whole].view(-1, ROW), words[whole:]
    by_column, by_row = _sums_on_cpu(rows) if flat.device.type == "cpu" else (rows.sum(0), rows.sum(1))
    return int(_weigh(by_column) + 2 * ROW * (by_row * _places(by_row)).sum() + _weigh(rest, whole))


def _sums_on_cpu(rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the sums by column and by row, reading memory once: each block is still in the cache for its second sum."""
    array = rows.numpy()
    by_column, by_row = np.zeros(ROW, np.int64), np.empty(len(array), np.int64)
    for start in range(0, len(array), ROWS_IN_CACHE):
        block = array[start : start + ROWS_IN_CACHE]
        by_column += block.sum(0)
        block.sum(1, out=by_row[start : start + ROWS_IN_CACHE])
    return torch.from_numpy(by_column), torch.from_numpy(by_row)


def _weigh(words: torch.Tensor, first_place: int = 0) -> torch.Tensor:
    return (words * (2 * (first_place + _places(words)) + 1)).sum()


def _places(words: torch.Tensor) -> torch.Tensor:
    return torch.arange(len(words), device=words.device)


def _aligned(position: int) -> int:
    return -(-position // ALIGNMENT) * ALIGNMENT
