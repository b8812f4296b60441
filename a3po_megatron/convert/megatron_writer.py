"""Weights -> a megatron distributed checkpoint, one parameter at a time, without megatron and without ranks.

The format does not depend on the layout: megatron reads any part of a tensor from whichever chunks hold it. Here the chunks are
cut, and spread over files, as the ranks of a given layout would do it, so that at this layout each rank reads its own bytes.
Only parameters are written, no optimizer: it is the start of a run, not a run that goes on.
"""

import json
import pickle
import shutil
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import IO

import torch
from torch import Tensor
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)

from a3po_megatron.actor import hf_layout
from a3po_megatron.actor.checkpoint_reading import METADATA
from a3po_megatron.actor.hf_folder import carry_companions
from a3po_megatron.actor.megatron_keys import COMMON_KEY, Entry, entries
from a3po_megatron.checkpoint_folder import INCOMPLETE, finish_folder
from a3po_megatron.config.actor import ActorConfig
from a3po_megatron.config.model_shape import ModelShape
from a3po_megatron.convert.weights import Summary, Watch, Weights, summarise
from a3po_megatron.errors import UserError

FORMAT = {"sharded_backend": "torch_dist", "sharded_backend_version": 1}  # metadata.json


def write_megatron_folder(
    weights: Weights, layout: ActorConfig, companions: Path, destination: Path, watch: Watch
) -> Summary:
    """Write the new folder `destination`; it appears under its name only when it is complete.

    `layout`: how chunks are cut; the vocabulary is padded for its tensor parallelism. `companions`: a folder with config.json
    and tokenizer, which go along. Raises UserError for weights that megatron cannot hold as they are.
    """
    dtypes = _parameter_dtypes(weights)
    temporary = destination.with_name(destination.name + INCOMPLETE)
    shutil.rmtree(temporary, ignore_errors=True)
    temporary.mkdir(parents=True)
    try:
        with ExitStack() as stack:
            writer = _ChunkWriter(temporary, stack)
            writer.write_common({"layout": _numbers(layout), "step": 0, "holds": "weights"})
            for entry in watch(list(entries(weights.shape))):
                _write_entry(writer, weights, entry, layout, dtypes)
            writer.write_metadata()
        carry_companions(companions, temporary, dtypes[next(iter(dtypes))])
        finish_folder(temporary, step=0)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    return summarise(weights)


def _write_entry(
    writer: "_ChunkWriter", weights: Weights, entry: Entry, layout: ActorConfig, dtypes: dict[str, str]
) -> None:
    parts = _parts(entry, weights, layout)
    size = (*entry.stack, sum(part.shape[0] for part in parts), *parts[0].shape[1:])
    assert dtypes[entry.key] == str(parts[0].dtype).removeprefix("torch.")
    for offsets, chunk, rank in _chunks(parts, entry, weights.shape, layout):
        writer.write(entry, size, offsets, chunk, rank)


def _parts(entry: Entry, weights: Weights, layout: ActorConfig) -> list[Tensor]:
    """Return megatron's whole parameter, as the parts, one below the other, that tensor parallelism cuts on their own."""
    whole = [weights.tensor(name) for name in entry.rule.hf]
    match entry.rule.split:
        case "gate_up":
            return whole
        case "vocab":
            missing = weights.shape.padded_vocab_size(layout.tensor_parallel) - whole[0].shape[0]
            return [torch.nn.functional.pad(whole[0], (0, 0, 0, missing))] if missing else whole
        case _:
            return [hf_layout.shard(entry.rule.split, whole, weights.shape, 1, 0)]


def _chunks(
    parts: Sequence[Tensor], entry: Entry, shape: ModelShape, layout: ActorConfig
) -> Iterator[tuple[tuple[int, ...], Tensor, int]]:
    """Yield (offsets within the slice, chunk, rank that would hold it)."""
    dimension = 1 if entry.rule.split == "columns" else 0
    is_split = entry.rule.split != "replicated" and entry.rule.expert is None
    row = 0
    for part in parts:
        chunks = part.chunk(layout.tensor_parallel, dimension) if is_split else (part,)
        for tp_rank, chunk in enumerate(chunks):
            along = tp_rank * chunks[0].shape[dimension]
            offsets = [0] * part.dim()
            offsets[dimension] = along
            offsets[0] += row
            yield tuple(offsets), chunk, _rank(entry, tp_rank, shape, layout)
        row += part.shape[0]


def _rank(entry: Entry, tp_rank: int, shape: ModelShape, layout: ActorConfig) -> int:
    """Return which rank holds a chunk, where the layers are spread over the stages as evenly as they can be."""
    if entry.index:
        stage = entry.index[0] * layout.pipeline_parallel // shape.num_layers
    else:
        stage = 0 if entry.key.startswith("embedding") else layout.pipeline_parallel - 1
    within = tp_rank if entry.rule.expert is None else entry.rule.expert * layout.expert_parallel // shape.num_experts
    return stage * (layout.world_size // layout.pipeline_parallel) + within


class _ChunkWriter:
    """The files of a checkpoint and what its metadata will say of them."""

    def __init__(self, folder: Path, stack: ExitStack) -> None:
        self._folder, self._stack = folder, stack
        self._files: dict[int, IO[bytes]] = {}
        self._tensors: dict[str, TensorStorageMetadata] = {}
        self._places: dict[MetadataIndex, _StorageInfo] = {}

    def write(self, entry: Entry, size: tuple[int, ...], offsets: tuple[int, ...], chunk: Tensor, rank: int) -> None:
        """Append one chunk of an entry to the file of a rank. `size`: of the whole tensor of its key."""
        place = torch.Size((*entry.index, *offsets))
        chunk = chunk.reshape(*[1] * len(entry.index), *chunk.shape)
        if chunk.untyped_storage().nbytes() != chunk.nbytes or not chunk.is_contiguous():
            chunk = chunk.clone(memory_format=torch.contiguous_format)  # torch.save writes the storage, not the view
        described = self._tensors.setdefault(
            entry.key, TensorStorageMetadata(TensorProperties(dtype=chunk.dtype), torch.Size(size), [])
        )
        described.chunks.append(ChunkStorageMetadata(place, chunk.shape))
        self._append(rank, MetadataIndex(entry.key, place), chunk)

    def write_common(self, state: dict[str, object]) -> None:
        """Write what is the same on all ranks."""
        self._append(0, MetadataIndex(COMMON_KEY), [state])

    def write_metadata(self) -> None:
        """Write which chunk is where, once all are written."""
        (self._folder / "metadata.json").write_text(json.dumps(FORMAT))
        metadata = Metadata(
            {COMMON_KEY: BytesStorageMetadata(), **self._tensors},
            storage_data=self._places,
            storage_meta=StorageMeta(),
            version="1.0.0",
        )
        (self._folder / METADATA).write_bytes(pickle.dumps(metadata))

    def _append(self, rank: int, index: MetadataIndex, value: object) -> None:
        name = f"__{rank}_0.distcp"
        if rank not in self._files:
            self._files[rank] = self._stack.enter_context((self._folder / name).open("wb"))
        file = self._files[rank]
        start = file.tell()
        torch.save(value, file)
        self._places[index] = _StorageInfo(name, start, file.tell() - start)


def _parameter_dtypes(weights: Weights) -> dict[str, str]:
    """Return the type of each key. Raises UserError where tensors that megatron fuses or stacks differ in it."""
    specs = weights.specs()
    dtypes: dict[str, str] = {}
    for entry in entries(weights.shape):
        for name in entry.rule.hf:
            if (found := specs[name].dtype) != dtypes.setdefault(entry.key, found):
                raise UserError(
                    f"{name} is {found}, others that megatron keeps in one tensor with it ({entry.key}) are "
                    f"{dtypes[entry.key]}; name the type they shall have: --dtype bfloat16 or float32"
                )
    return dtypes


def _numbers(layout: ActorConfig) -> dict[str, int]:
    names = ("tensor", "pipeline", "virtual_pipeline", "context", "data", "expert", "expert_tensor")
    return {name: getattr(layout, f"{name}_parallel") for name in names}
