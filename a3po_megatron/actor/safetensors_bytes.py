"""Compares tensors of safetensors files byte by byte, without torch: numpy has no bfloat16."""

import json
from pathlib import Path
from typing import Any, NamedTuple

CHUNK_BYTES = 16 << 20


class TensorInFile(NamedTuple):
    """A tensor in a file that safetensors has opened before: its header is sound."""

    path: Path
    name: str


def same_content(first: TensorInFile, second: TensorInFile) -> bool:
    """Whether two tensors have the same type, shape and bits."""
    (begin, *what), (other_begin, *other_what) = _place(first), _place(second)
    if what != other_what:
        return False
    left = what[0]
    with first.path.open("rb") as a, second.path.open("rb") as b:
        a.seek(begin)
        b.seek(other_begin)
        while left:
            size = min(left, CHUNK_BYTES)
            if a.read(size) != b.read(size):
                return False
            left -= size
    return True


def _place(tensor: TensorInFile) -> tuple[Any, ...]:
    """Return where the bytes begin, how many they are, type and shape."""
    with tensor.path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        entry = json.loads(file.read(length))[tensor.name]
    begin, end = entry["data_offsets"]
    return 8 + length + begin, end - begin, entry["dtype"], entry["shape"]
