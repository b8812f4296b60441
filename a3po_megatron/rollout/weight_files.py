"""One version of the weights as files, for replicas that cannot be in the weight group or came too late. Torch, no vllm.

    ROOT/version_000007/manifest.json               version, and size and crc32 of each file
    ROOT/version_000007/bucket_00000.safetensors    the tensors of bucket 0, in sending order

A version appears under its name, by one rename, when all of it is written. The controller, which knows who reads which,
removes old ones.
"""

import json
import shutil
import struct
import zlib
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch
from safetensors.torch import load

from a3po_megatron.rollout.buckets import DTYPES, Bucket, TensorSpec
from a3po_megatron.rollout.transfer_messages import FILES_UNUSABLE, version_folder

MANIFEST = "manifest.json"
SAFETENSORS_DTYPES = {"float32": "F32", "bfloat16": "BF16", "float16": "F16"}


class FilesUnusable(ValueError):
    """Files that are missing, damaged, or not those of the version."""

    def __init__(self, reason: str) -> None:
        super().__init__(f"{FILES_UNUSABLE}: {reason}")


class VersionWriter:
    """Writes one version bucket by bucket; `commit` shows it, `abandon` leaves no trace."""

    def __init__(self, root: Path, version: int) -> None:
        """Begin. Raises OSError where `root` cannot be written."""
        self._root, self._version = root, version
        self._incomplete = version_folder(root, version).with_suffix(".incomplete")
        shutil.rmtree(self._incomplete, ignore_errors=True)
        self._incomplete.mkdir(mode=0o700, parents=True)
        self._files: list[dict[str, str | int]] = []

    def add(self, bucket: Bucket, flat: torch.Tensor) -> None:
        """Write the tensors of a packed bucket, without copying those in host memory."""
        header, end = {}, 0
        for spec in bucket.specs:
            offsets = [end, end := end + spec.num_bytes]
            dtype = SAFETENSORS_DTYPES[spec.dtype]
            header[spec.name] = {"dtype": dtype, "shape": list(spec.shape), "data_offsets": offsets}
        encoded = json.dumps(header).encode()
        encoded += b" " * (-len(encoded) % 8)
        data = memoryview(flat.cpu().numpy())
        pieces: list[bytes | memoryview] = [struct.pack("<Q", len(encoded)), encoded]
        pieces += [
            data[start : start + spec.num_bytes] for spec, start in zip(bucket.specs, bucket.offsets, strict=True)
        ]
        name, crc, size = f"bucket_{len(self._files):05d}.safetensors", 0, 0
        with (self._incomplete / name).open("wb") as file:
            for piece in pieces:
                size += file.write(piece)
                crc = zlib.crc32(piece, crc)
        self._files.append({"name": name, "bytes": size, "crc32": crc})

    def commit(self) -> Path:
        """Show the version under its name, and return its folder."""
        manifest = {"version": self._version, "files": self._files}
        (self._incomplete / MANIFEST).write_text(json.dumps(manifest, indent=1))
        complete = version_folder(self._root, self._version)
        shutil.rmtree(complete, ignore_errors=True)
        self._incomplete.rename(complete)
        return complete

    def abandon(self) -> None:
        """Remove what was written."""
        shutil.rmtree(self._incomplete, ignore_errors=True)


def read_version(folder: Path, specs: Sequence[TensorSpec], version: int) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield (name, tensor) of `specs` from a version's folder, one file in memory at a time.

    Raises FilesUnusable for a file that is missing or damaged, and for another version or other tensors than expected; nothing
    of a damaged file is yielded.
    """
    try:
        manifest = json.loads((folder / MANIFEST).read_text())
        found, files = manifest["version"], [(f["name"], f["bytes"], f["crc32"]) for f in manifest["files"]]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise FilesUnusable(f"{folder / MANIFEST}: not a manifest of weights: {error!r}") from None
    if found != version:
        raise FilesUnusable(f"{folder}: expected weights of version {version}, these are of version {found}")
    expected = iter(specs)
    for name, size, crc in files:
        for key, tensor in _read_file(folder / Path(name).name, size, crc).items():
            spec = next(expected, None)
            if spec is None or (key, tensor.dtype, tuple(tensor.shape)) != (spec.name, DTYPES[spec.dtype], spec.shape):
                raise FilesUnusable(
                    f"{folder / name}: {key} is not the tensor that the manifest of the publication names"
                )
            yield key, tensor
    if (lacking := next(expected, None)) is not None:
        raise FilesUnusable(f"{folder}: the files end before {lacking.name}")


def _read_file(path: Path, size: int, crc: int) -> dict[str, torch.Tensor]:
    """Return the tensors of a file in the order in which they lie."""
    try:
        content = path.read_bytes()
    except OSError as error:
        raise FilesUnusable(f"{path}: cannot read the weights: {error.strerror}") from None
    if len(content) != size:
        raise FilesUnusable(f"{path}: {len(content)} bytes instead of {size}: the file was cut off")
    if (found := zlib.crc32(content)) != crc:
        raise FilesUnusable(f"{path}: damaged: crc32 {found:#010x}, the manifest says {crc:#010x}")
    (header_bytes,) = struct.unpack("<Q", content[:8])
    names = json.loads(content[8 : 8 + header_bytes])  # `load` sorts
    tensors = load(content)
    return {name: tensors[name] for name in names}
