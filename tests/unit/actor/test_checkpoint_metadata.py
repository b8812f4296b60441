"""A checkpoint's `.metadata` changes nothing of the process that reads it."""

import pickle
from pathlib import Path

import pytest
import torch
from torch.distributed.checkpoint import metadata as of_torch
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.planner import WriteItemType

from a3po_megatron.actor.checkpoint_reading import read_metadata
from a3po_megatron.errors import UserError

TARGETS = {
    "a class": b"ctorch.distributed.checkpoint.metadata\nMetadata\n",
    "a function": b"ctorch.serialization\n_get_layout\n",
    "a constant": b"ctorch.distributed.checkpoint.planner\nWriteItemType\n(K\x01tR",
    "a dtype": b"ctorch\nfloat32\n",
}
SLOTS = b"N}(X\x0c\x00\x00\x00planner_dataK\x07u\x86b"  # (None, {"planner_data": 7}), then BUILD
STATE = b"}(X\x0c\x00\x00\x00planner_dataK\x07ub"  # {"planner_data": 7}, then BUILD


@pytest.mark.parametrize("change", [SLOTS, STATE], ids=["slots", "state"])
@pytest.mark.parametrize("target", TARGETS)
def test_metadata_that_would_change_what_the_process_shares_is_refused_before_it_does(
    target: str, change: bytes, tmp_path: Path
) -> None:
    (tmp_path / ".metadata").write_bytes(b"\x80\x02" + TARGETS[target] + change + b".")
    with pytest.raises(
        UserError, match=r"/\.metadata: refused: it would change .*, which is not of the checkpoint"
    ) as refusal:
        read_metadata(tmp_path)
    assert "\n" not in str(refusal.value)
    shared = (of_torch.Metadata, torch.serialization._get_layout, WriteItemType.TENSOR, torch.float32)
    assert [getattr(one, "planner_data", None) for one in shared] == [None] * 4


@pytest.mark.parametrize("name", ["..", "../other", "/etc/passwd", "a/b"])
def test_metadata_that_names_what_is_not_a_file_of_the_folder_is_refused(name: str, tmp_path: Path) -> None:
    write(tmp_path, name)
    with pytest.raises(UserError, match=r"refused: it names the file"):
        read_metadata(tmp_path)


def test_metadata_as_torch_writes_it_is_read_as_it_was(tmp_path: Path) -> None:
    written = write(tmp_path, "__0_0.distcp")
    assert read_metadata(tmp_path) == written


def write(folder: Path, name: str) -> of_torch.Metadata:
    chunk = of_torch.ChunkStorageMetadata(torch.Size([0]), torch.Size([4]))
    tensor = of_torch.TensorStorageMetadata(
        of_torch.TensorProperties(dtype=torch.bfloat16), torch.Size([4]), chunks=[chunk]
    )
    place = {of_torch.MetadataIndex("weight", torch.Size([0])): _StorageInfo(name, 0, 8)}
    metadata = of_torch.Metadata({"weight": tensor, "more": of_torch.BytesStorageMetadata()}, storage_data=place)
    (folder / ".metadata").write_bytes(pickle.dumps(metadata))
    return metadata
