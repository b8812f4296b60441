"""A Hugging Face checkpoint folder on disk: check it, read single tensors, write one. Knows files, no ranks.

Checking reads only the headers of the safetensors files, without torch, so that a launcher can refuse a bad folder before
any rank starts.
"""

import json
import shutil
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from safetensors import SafetensorError, safe_open

from a3po_megatron.actor.hf_mapping import hf_shapes
from a3po_megatron.actor.safetensors_bytes import TensorInFile, same_content
from a3po_megatron.actor.safetensors_writer import (
    DTYPES,
    INDEX_FILE,
    MAX_SHARD_BYTES,
    SINGLE_FILE,
    TensorType,
    write_safetensors,
)
from a3po_megatron.config.model_shape import ModelShape
from a3po_megatron.errors import UserError

if TYPE_CHECKING:
    from torch import Tensor

EMBEDDING, OUTPUT = "model.embed_tokens.weight", "lm_head.weight"
# What belongs to a model beside its weights; carried from the folder that the run started from.
COMPANIONS = ("tokenizer*", "special_tokens_map.json", "vocab.json", "merges.txt", "generation_config.json", "*.jinja")


class HFFolder:
    """The tensors of a checkpoint folder, read one at a time."""

    def __init__(self, folder: str | Path, shape: ModelShape) -> None:
        """Open the folder. Raises UserError unless it holds exactly the tensors of `shape`, each of the right shape."""
        self.folder = Path(folder)
        self.shape = shape
        self._file_of = _locate(self.folder)
        self._check_names(hf_shapes(shape))
        self._check_tied_output()

    def tensor(self, name: str) -> "Tensor":
        """Return one whole tensor in host memory."""
        with safe_open(self._file_of[name], framework="pt") as file:
            return file.get_tensor(name)

    def specs(self) -> dict[str, TensorType]:
        """Return the type and shape of each tensor, in model order. Raises UserError for a type that weights do not have."""
        names = {code: name for name, (code, _) in DTYPES.items()}
        specs = {}
        for path, held in self._by_file(hf_shapes(self.shape)).items():
            with safe_open(path, framework="numpy") as file:
                for name in held:
                    code = file.get_slice(name).get_dtype()
                    if code not in names:
                        raise UserError(f"{path}: {name} is of type {code}; expected {', '.join(names)}")
                    specs[name] = TensorType(names[code], tuple(file.get_slice(name).get_shape()))
        return {name: specs[name] for name in hf_shapes(self.shape)}

    def _by_file(self, names: Iterable[str]) -> dict[Path, list[str]]:
        """Return the names in each file: a mixture of experts has thousands of them in one, which is opened once."""
        in_files: dict[Path, list[str]] = {}
        for name in names:
            in_files.setdefault(self._file_of[name], []).append(name)
        return in_files

    def _check_names(self, expected: dict[str, tuple[int, ...]]) -> None:
        missing, extra = expected.keys() - self._file_of.keys(), self._file_of.keys() - expected.keys()
        extra = {name for name in extra if not _is_derived(name, expected)}
        if missing:
            raise UserError(f"{self.folder}: {len(missing)} tensors are missing, among them {min(missing)}")
        if extra:
            raise UserError(f"{self.folder}: {len(extra)} tensors belong to no parameter, among them {min(extra)}")
        for path, names in self._by_file(expected).items():
            with safe_open(path, framework="numpy") as file:
                for name in names:
                    found = tuple(file.get_slice(name).get_shape())
                    if found != expected[name]:
                        raise UserError(f"{path}: {name} has shape {found}, config.json says {expected[name]}")

    def _check_tied_output(self) -> None:
        """Refuse an output layer of its own where config.json ties it: transformers would use it, megatron has no place for it."""
        if not self.shape.tie_word_embeddings or OUTPUT not in self._file_of:
            return
        if not same_content(
            TensorInFile(self._file_of[OUTPUT], OUTPUT), TensorInFile(self._file_of[EMBEDDING], EMBEDDING)
        ):
            raise UserError(
                f"{self._file_of[OUTPUT]}: {OUTPUT} is not {EMBEDDING}, but config.json says tie_word_embeddings=true; "
                "set it to false there, or remove the tensor"
            )


def write_hf_folder(
    tensors: Iterable[tuple[str, "Tensor"]],
    specs: Mapping[str, TensorType],
    source: Path,
    destination: Path,
    max_shard_bytes: int = MAX_SHARD_BYTES,
) -> None:
    """Write `tensors` as sharded safetensors, with config and tokenizer from `source`, to the new folder `destination`.

    `specs` says what comes, in order. Holds one tensor at a time. The folder appears under its name only when it is complete.
    """
    temporary = destination.with_name(destination.name + ".incomplete")
    shutil.rmtree(temporary, ignore_errors=True)
    temporary.mkdir(parents=True)
    try:
        write_safetensors(tensors, specs, temporary, max_shard_bytes)
        carry_companions(source, temporary, next(iter(specs.values())).dtype)
        shutil.rmtree(destination, ignore_errors=True)
        temporary.rename(destination)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def carry_companions(source: Path, destination: Path, dtype: str) -> None:
    """Copy config and tokenizer; the config names the type of the weights."""
    config: dict[str, Any] = json.loads((source / "config.json").read_text())
    config.pop("torch_dtype", None)
    (destination / "config.json").write_text(json.dumps({**config, "dtype": dtype}, indent=2))
    for pattern in COMPANIONS:
        for file in source.glob(pattern):
            shutil.copy2(file, destination / file.name)


def _locate(folder: Path) -> dict[str, Path]:
    """Return the file of each tensor: the one that holds it, which must be the one that the index names."""
    index = folder / INDEX_FILE
    named = _read_index(index) if index.exists() else dict.fromkeys(_names(_single_file(folder)), SINGLE_FILE)
    found: dict[str, Path] = {}
    for file in sorted(set(named.values())):
        if not (folder / file).exists():
            raise UserError(f"{folder / file}: named in {INDEX_FILE} but missing")
        for name in _names(folder / file):
            if name in found:
                raise UserError(f"{folder}: {name} is in both {found[name].name} and {file}; expected one file")
            found[name] = folder / file
    for name, file in named.items():
        if found.get(name) != folder / file:
            where = f"it is in {found[name].name}" if name in found else "no file has it"
            raise UserError(f"{index}: names {file} for {name}, but {where}")
    return found


def _read_index(index: Path) -> dict[str, str]:
    """Return the file name of each tensor. Raises UserError unless the files lie in the folder itself."""
    try:
        named = dict(json.loads(index.read_text())["weight_map"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UserError(f"{index}: damaged index: {error!r}") from None
    for name, file in named.items():
        if not isinstance(file, str) or Path(file).name != file or file in ("", ".."):
            raise UserError(
                f"{index}: damaged index: {name} is in {file!r}; expected the name of a file in this folder"
            )
    return named


def _single_file(folder: Path) -> Path:
    if (folder / ".metadata").exists():
        raise UserError(
            f"{folder}: a megatron checkpoint, where a Hugging Face folder is needed; convert it: "
            "tools/convert_checkpoint.py megatron-to-hf"
        )
    if not (folder / SINGLE_FILE).exists():
        raise UserError(f"{folder}: no weights: expected {SINGLE_FILE} or {INDEX_FILE} (model.init=random needs none)")
    return folder / SINGLE_FILE


def _is_derived(name: str, expected: dict[str, tuple[int, ...]]) -> bool:
    """Whether a tensor repeats what is known: a tied output layer, which is compared, or rotary frequencies.

    So does Transformer Engine's `_extra_state`, which some converters leave behind: scales of 8-bit kernels, which a model of
    16 or 32 bits does not use.
    """
    repeats = name.endswith(("rotary_emb.inv_freq", "._extra_state"))
    return repeats or (name == OUTPUT and name not in expected)


def _names(path: Path) -> list[str]:
    try:
        with safe_open(path, framework="numpy") as file:
            return list(file.keys())
    except (SafetensorError, OSError) as error:
        raise UserError(f"{path}: damaged weights file: {error}") from None
