"""Writes a stream of tensors as safetensors files, holding one tensor at a time.

safetensors' own `save_file` wants a file's tensors at once. The format begins with a header that gives every tensor's place, so
the names, types and shapes of the whole stream are asked for beforehand.
"""

import json
import math
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from a3po_megatron.errors import UserError

if TYPE_CHECKING:
    from torch import Tensor

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
MAX_SHARD_BYTES = 4 << 30
DTYPES = {"float64": ("F64", 8), "float32": ("F32", 4), "bfloat16": ("BF16", 2), "float16": ("F16", 2)}


class TensorType(NamedTuple):
    """What a tensor will be."""

    dtype: str  # torch's name
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        """Size in a file. Raises UserError for a type that weights do not have here."""
        if self.dtype not in DTYPES:
            raise UserError(f"weights of type {self.dtype} are not supported; supported: {', '.join(DTYPES)}")
        return math.prod(self.shape) * DTYPES[self.dtype][1]


def write_safetensors(
    tensors: Iterable[tuple[str, "Tensor"]], specs: Mapping[str, TensorType], folder: Path, max_shard_bytes: int
) -> None:
    """Write `tensors`, which come in the order of `specs`, as one file, or as several of at most `max_shard_bytes` and an index."""
    shards = _split(specs, max_shard_bytes)
    stream = iter(tensors)
    weight_map: dict[str, str] = {}
    for number, names in enumerate(shards):
        file = SINGLE_FILE if len(shards) == 1 else f"model-{number + 1:05d}-of-{len(shards):05d}.safetensors"
        _write_file(folder / file, stream, {name: specs[name] for name in names})
        weight_map.update(dict.fromkeys(names, file))
    assert next(stream, None) is None, "the stream holds more than its specification"
    if len(shards) > 1:
        index = {"metadata": {"total_size": sum(spec.nbytes for spec in specs.values())}, "weight_map": weight_map}
        (folder / INDEX_FILE).write_text(json.dumps(index, indent=2))


def _split(specs: Mapping[str, TensorType], max_bytes: int) -> list[list[str]]:
    shards: list[list[str]] = [[]]
    held = 0
    for name, spec in specs.items():
        if shards[-1] and held + spec.nbytes > max_bytes:
            shards.append([])
            held = 0
        shards[-1].append(name)
        held += spec.nbytes
    return shards


def _write_file(path: Path, stream: Iterable[tuple[str, "Tensor"]], specs: Mapping[str, TensorType]) -> None:
    import torch

    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    start = 0
    for name, spec in specs.items():
        place = [start, start := start + spec.nbytes]
        header[name] = {"dtype": DTYPES[spec.dtype][0], "shape": list(spec.shape), "data_offsets": place}
    encoded = json.dumps(header, separators=(",", ":")).encode()
    encoded += b" " * (-len(encoded) % 8)
    with path.open("wb") as file:
        file.write(len(encoded).to_bytes(8, "little") + encoded)
        for expected, (name, tensor) in zip(specs, stream, strict=False):
            found = name, str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape)
            assert found == (expected, *specs[expected]), f"the stream holds {found}, not {expected} {specs[expected]}"
            file.write(tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().data)
        assert file.tell() == 8 + len(encoded) + start, f"the stream ends before {path.name} does"
