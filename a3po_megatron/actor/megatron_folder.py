"""The weights in a megatron distributed checkpoint, read one parameter at a time, without megatron and without ranks.

Checkpoints of a run, of `hf-to-megatron`, of Megatron-LM and of NeMo 2 (its `weights/`) are read alike. Pickles are read by the
restricted readers of checkpoint_reading.py; a `common.pt` is not read at all.
"""

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, cast

import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, TensorStorageMetadata
from torch.distributed.checkpoint.utils import _create_file_view

from a3po_megatron.actor import hf_layout
from a3po_megatron.actor.checkpoint_reading import load_plain, read_metadata
from a3po_megatron.actor.hf_mapping import hf_shapes
from a3po_megatron.actor.megatron_keys import COMMON_KEY, WRAPPER, Entry, entries, what_else
from a3po_megatron.actor.safetensors_writer import TensorType
from a3po_megatron.checkpoint_folder import MARKER, check_complete
from a3po_megatron.config.model_shape import ModelShape
from a3po_megatron.errors import UserError

MAX_PADDING = 8192  # rows; Megatron-LM and NeMo pad a vocabulary to a multiple of 128 x tensor parallelism


@dataclass(frozen=True)
class StoredChunk:
    """A block of a tensor and the bytes that hold it."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    file: str
    start: int
    length: int


class MegatronFolder:
    """The weights of a checkpoint under Hugging Face names."""

    def __init__(self, folder: Path, shape: ModelShape) -> None:
        """Open the folder. Raises UserError unless it holds exactly the parameters of `shape`, each of the right shape."""
        self.folder, self.shape = folder, shape
        if (folder / MARKER).exists():
            check_complete(folder)
        self._metadata = read_metadata(folder)
        wrapper = WRAPPER if any(key.startswith(WRAPPER) for key in self._metadata.state_dict_metadata) else ""
        self._tensors = {
            key.removeprefix(wrapper): entry
            for key, entry in self._metadata.state_dict_metadata.items()
            if isinstance(entry, TensorStorageMetadata)
        }
        self.ignored = self._check_keys(wrapper)
        self._entry_of = {name: entry for entry in entries(shape) for name in entry.rule.hf}
        self._chunks = _by_slice(stored_chunks(self._metadata, wrapper), self._entry_of.values())
        self._last: tuple[Entry, list[Tensor]] | None = None

    def specs(self) -> dict[str, TensorType]:
        """Return what each Hugging Face tensor will be, in model order."""
        return {
            name: TensorType(_dtype_name(self._tensors[self._entry_of[name].key]), size)
            for name, size in hf_shapes(self.shape).items()
        }

    def tensor(self, name: str) -> Tensor:
        """Return one whole Hugging Face tensor. Those that megatron fuses are read together: ask for them in turn."""
        entry = self._entry_of[name]
        if self._last is None or self._last[0] is not entry:
            self._last = None  # let go of it before the next is read
            whole = self._read(entry)
            self._last = entry, hf_layout.join(entry.rule.split, [whole], self.shape)
        return self._last[1][entry.rule.hf.index(name)]

    def _read(self, entry: Entry) -> Tensor:
        """Return megatron's whole parameter, put together from the chunks that hold parts of it."""
        size = _slice_size(self._tensors[entry.key], entry)
        start, extent = (*entry.index, *[0] * len(size)), (*[1] * len(entry.index), *size)
        near = [*self._chunks[entry.key, entry.index], *self._chunks[entry.key, None]]
        found = [chunk for chunk in near if _overlap(chunk, start, extent)]
        if len(found) == 1 and (found[0].offsets, found[0].sizes) == (start, extent):
            return self._read_chunk(entry.key, found[0]).reshape(size)
        whole = torch.empty(extent, dtype=self._tensors[entry.key].properties.dtype)
        num_filled = 0
        for chunk in found:
            ranges = _overlap(chunk, start, extent)
            there = tuple(slice(a - o, b - o) for (a, b), o in zip(ranges, chunk.offsets, strict=True))
            here = tuple(slice(a - o, b - o) for (a, b), o in zip(ranges, start, strict=True))
            part = self._read_chunk(entry.key, chunk)[there]
            whole[here] = part
            num_filled += part.numel()
        if num_filled != whole.numel():
            raise UserError(f"{self.folder}: {entry.key}{list(entry.index) or ''}: the checkpoint lacks a part of it")
        return whole.reshape(size)

    def _read_chunk(self, key: str, chunk: StoredChunk) -> Tensor:
        path = self.folder / chunk.file
        try:
            with path.open("rb") as file:
                tensor = load_plain(path, cast(IO[bytes], _create_file_view(file, chunk.start, chunk.length)))
        except OSError as error:
            raise UserError(f"{path}: cannot read {key}: {error.strerror}") from None
        if not isinstance(tensor, Tensor) or tuple(tensor.shape) != chunk.sizes:
            raise UserError(f"{path}: damaged checkpoint: not the part of {key} that .metadata says")
        return tensor

    def _check_keys(self, wrapper: str) -> Counter[str]:
        """Check that every parameter is there and nothing unknown; return what else there is, with the number of its keys."""
        expected = {entry.key: entry for entry in entries(self.shape)}
        present = {key.removeprefix(wrapper) for key in self._metadata.state_dict_metadata}
        if missing := expected.keys() - self._tensors.keys():
            raise UserError(f"{self.folder}: {len(missing)} keys are missing, among them {min(missing)}")
        others = {key: what_else(key) for key in present - expected.keys()}
        if unknown := [key for key, what in others.items() if what is None]:
            raise UserError(
                f"{self.folder}: {len(unknown)} keys belong to no parameter of the {self.shape.family} model that config.json "
                f"describes, among them {min(unknown)}"
            )
        for key, entry in expected.items():
            size, wanted = tuple(self._tensors[key].size), (*entry.stack, *entry.shape)
            if size != wanted and not (entry.rule.split == "vocab" and self._is_padded(size)):
                raise UserError(f"{self.folder}: {key} has shape {size}, config.json says {wanted}")
        return Counter(what for what in others.values() if what)

    def _is_padded(self, size: tuple[int, ...]) -> bool:
        """Whether an embedding of `size` is the vocabulary with the padding of the layout that wrote it, where it says which."""
        rows, hidden = size if len(size) == 2 else (0, 0)
        layout = common_state(self.folder, self._metadata).get("layout")
        if isinstance(layout, dict) and "tensor" in layout:
            fits = rows == self.shape.padded_vocab_size(layout["tensor"])
        else:
            fits = 0 <= rows - self.shape.vocab_size < MAX_PADDING
        return fits and hidden == self.shape.hidden_size


def common_state(folder: Path, metadata: Metadata) -> dict[str, Any]:
    """Return what is the same on all ranks; nothing where another program keeps it in a `common.pt`, which is not read."""
    place = metadata.storage_data.get(MetadataIndex(COMMON_KEY))
    if place is None:
        return {}
    path = folder / place.relative_path
    try:
        with path.open("rb") as file:
            state = load_plain(path, cast(IO[bytes], _create_file_view(file, place.offset, place.length)))
    except OSError as error:
        raise UserError(f"{path}: cannot be read: {error.strerror}") from None
    return state[0] if isinstance(state, list) and state and isinstance(state[0], dict) else {}


def stored_chunks(metadata: Metadata, wrapper: str) -> dict[str, list[StoredChunk]]:
    """Return key -> the chunks of its tensor."""
    stored: dict[str, list[StoredChunk]] = {}
    for key, entry in metadata.state_dict_metadata.items():
        if isinstance(entry, TensorStorageMetadata):
            chunks = stored[key.removeprefix(wrapper)] = []
            for chunk in entry.chunks:
                place = metadata.storage_data.get(MetadataIndex(key, chunk.offsets))
                if place is not None:
                    sizes = tuple(chunk.offsets), tuple(chunk.sizes)
                    chunks.append(StoredChunk(*sizes, place.relative_path, place.offset, place.length))
    return stored


def _by_slice(
    stored: Mapping[str, Sequence[StoredChunk]], parameters: Iterable[Entry]
) -> dict[tuple[str, tuple[int, ...] | None], list[StoredChunk]]:
    """Return (key, index) -> the chunks within one slice of a stack; index None: chunks that reach over several.

    A mixture of experts has thousands of slices under one key, each of which would look through all chunks.
    """
    found: dict[tuple[str, tuple[int, ...] | None], list[StoredChunk]] = defaultdict(list)
    for key, depth in {entry.key: len(entry.stack) for entry in parameters}.items():
        for chunk in stored[key]:
            is_within = all(size == 1 for size in chunk.sizes[:depth])
            found[key, chunk.offsets[:depth] if is_within else None].append(chunk)
    return found


def _slice_size(tensor: TensorStorageMetadata, entry: Entry) -> tuple[int, ...]:
    return tuple(tensor.size[len(entry.stack) :])


def _dtype_name(tensor: TensorStorageMetadata) -> str:
    return str(tensor.properties.dtype).removeprefix("torch.")


def _overlap(chunk: StoredChunk, start: Sequence[int], extent: Sequence[int]) -> list[tuple[int, int]]:
    """Return (from, to) in each dimension of what a chunk shares with the block at `start`; empty where they share nothing."""
    ranges = [
        (max(a, o), min(a + n, o + s)) for a, n, o, s in zip(start, extent, chunk.offsets, chunk.sizes, strict=True)
    ]
    return ranges if all(a < b for a, b in ranges) else []
