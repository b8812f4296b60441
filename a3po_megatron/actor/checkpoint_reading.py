"""Reads the pickles inside a checkpoint without letting them run anything.

megatron-core 0.19.2 and torch read three kinds of pickle from a checkpoint's folder:

1. `.metadata` by `pickle.load` (torch/distributed/checkpoint/filesystem.py): here by an unpickler that knows the few classes
   that torch and megatron write there, and calls nothing else;
2. objects in `*.distcp`, megatron's `common_state` among them, by `torch.load(weights_only=False)`
   (torch/distributed/checkpoint/default_planner.py): here with `weights_only=True`;
3. tensors in `*.distcp`, by `torch.load(weights_only=True)`, which is left as it is.

A `common.pt`, which older versions wrote and whose presence turns 2. off, is refused. `.metadata` also names the files to read:
only names of files in the folder pass.
"""

import io
import pickle
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import IO, Any

import torch
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.checkpoint._nested_dict import set_element
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta
from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner, ReadItem
from torch.futures import Future

from a3po_megatron.errors import UserError

METADATA = ".metadata"
COMMON_STATE = "common.pt"  # COMMON_STATE_FNAME in megatron/core/dist_checkpointing/strategies/common.py
ALLOWED = {
    "collections": {"OrderedDict"},
    "torch": {"Size", *(name for name, value in vars(torch).items() if isinstance(value, torch.dtype))},
    "torch.serialization": {"_get_layout"},
    "torch.distributed.checkpoint.filesystem": {"_StorageInfo"},
    "torch.distributed.checkpoint.metadata": {
        "BytesStorageMetadata",
        "ChunkStorageMetadata",
        "Metadata",
        "MetadataIndex",
        "StorageMeta",
        "TensorProperties",
        "TensorStorageMetadata",
        "_MEM_FORMAT_ENCODING",
    },
    # megatron attaches every rank's plan
    "torch.distributed.checkpoint.planner": {
        "BytesIOWriteData",
        "SavePlan",
        "TensorWriteData",
        "WriteItem",
        "WriteItemType",
    },
}


class _Unpickler(pickle.Unpickler):
    def __init__(self, path: Path, content: bytes) -> None:
        super().__init__(io.BytesIO(content))
        self.path = path

    def find_class(self, module: str, name: str) -> Any:
        if name not in ALLOWED.get(module, ()):
            raise UserError(
                f"{self.path}: refused: it asks for {module}.{name}, which no checkpoint's metadata needs; "
                "do not load this folder unless you know who wrote it"
            )
        return super().find_class(module, name)


def read_metadata(folder: Path) -> Metadata:
    """Return torch's metadata of a checkpoint. Raises UserError when it is damaged, not metadata, or asks for another class."""
    path = folder / METADATA
    try:
        content = path.read_bytes()
    except OSError as error:
        raise UserError(f"{path}: {error.strerror}; a checkpoint has this file") from error
    try:
        metadata = _Unpickler(path, content).load()
        assert isinstance(metadata, Metadata)
        names = {info.relative_path for info in metadata.storage_data.values()}
    except UserError:
        raise
    except Exception as error:  # a pickle of nonsense can raise anything
        raise UserError(f"{path}: damaged metadata of a checkpoint ({type(error).__name__})") from error
    for name in names:
        if not isinstance(name, str) or Path(name).name != name:
            raise UserError(f"{path}: refused: it names the file {name!r}, which is not in the checkpoint's folder")
    return metadata


def load_plain(path: Path, content: bytes | IO[bytes]) -> Any:
    """Return an object of tensors and plain values that torch.save wrote. Raises UserError for anything else.

    `path` is where `content` comes from, for the message.
    """
    file = io.BytesIO(content) if isinstance(content, bytes) else content
    try:
        return torch.load(file, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as error:
        asked = re.search(r"GLOBAL ([\w.]+)", str(error))
        what = f"it asks for {asked[1]}" if asked else "damaged, or made to run something"
        raise UserError(f"{path}: refused: {what}; a checkpoint holds tensors and plain values only") from error
    except (RuntimeError, EOFError, ValueError, OSError) as error:
        raise UserError(f"{path}: damaged checkpoint: {str(error).splitlines()[0]}") from error


class _Reader(FileSystemReader):
    """torch's reader, with both pickles read as the module's docstring says; megatron makes several, for one `metadata`."""

    def __init__(self, path: str, metadata: Metadata) -> None:
        super().__init__(path)
        self._metadata = metadata

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        storage_meta = self._metadata.storage_meta or StorageMeta()
        return replace(self._metadata, storage_meta=replace(storage_meta, load_id=self.load_id))

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> "Future[None]":
        def load_bytes(item: ReadItem, value: io.BytesIO) -> None:
            path = Path(self.path) / self.storage_data[item.storage_index].relative_path
            place, loaded = item.dest_index.fqn, load_plain(path, value.getvalue())
            if of_torch.flatten_state_dict:
                set_element(of_torch.original_state_dict, of_torch.mappings[place], loaded)
            else:
                of_torch.state_dict[place] = loaded

        of_torch: Any = planner  # a DefaultLoadPlanner, whose own `load_bytes` differs in `weights_only` alone
        of_torch.load_bytes = load_bytes
        return super().read_data(plan, planner)


@contextmanager
def restricted_reading(folder: Path) -> Iterator[None]:
    """For a while, let megatron read checkpoints by the restricted reader. Raises UserError for a `common.pt`."""
    # here, since who reads without megatron (megatron_folder.py) needs no import of it, which takes seconds
    from megatron.core.dist_checkpointing import serialization
    from megatron.core.dist_checkpointing.strategies import torch as torch_strategy

    if (folder / COMMON_STATE).exists():
        raise UserError(f"{folder / COMMON_STATE}: refused: a checkpoint of another program or version")
    metadata = read_metadata(folder)
    modules = (serialization, torch_strategy)
    before = [module._get_filesystem_reader for module in modules]
    for module in modules:
        module._get_filesystem_reader = lambda checkpoint_dir, *args, **kwargs: _Reader(checkpoint_dir, metadata)
    try:
        yield
    finally:
        for module, reader in zip(modules, before, strict=True):
            module._get_filesystem_reader = reader
