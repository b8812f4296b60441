"""Says what a folder or file of weights is, from its headers alone."""

import math
from collections import Counter
from collections.abc import Iterable
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from a3po_megatron.actor.checkpoint_reading import METADATA, read_metadata
from a3po_megatron.actor.hf_folder import HFFolder
from a3po_megatron.actor.megatron_folder import common_state
from a3po_megatron.actor.megatron_keys import what_else
from a3po_megatron.checkpoint_folder import MARKER, check_complete
from a3po_megatron.config.model_shape import ModelShape, read_model_shape
from a3po_megatron.convert.gguf import open_gguf
from a3po_megatron.convert.nemo import WEIGHTS, is_nemo, nemo_config
from a3po_megatron.errors import UserError


@dataclass(frozen=True)
class Tensor:
    """One tensor of a checkpoint, without its values."""

    name: str
    dtype: str
    shape: tuple[int, ...]


@dataclass(frozen=True)
class Inspection:
    """What was found; `facts` in the order in which they are shown."""

    kind: str
    tensors: list[Tensor]
    facts: dict[str, str]

    def lines(self, with_tensors: bool) -> list[str]:
        """Return the report."""
        parameters = sum(math.prod(tensor.shape) for tensor in self.tensors)
        types = Counter(tensor.dtype for tensor in self.tensors)
        facts = {
            "kind": self.kind,
            **self.facts,
            "parameters": f"{parameters:,} in {len(self.tensors)} tensors",
            "dtype": ", ".join(f"{dtype} ({count})" if len(types) > 1 else dtype for dtype, count in types.items()),
        }
        lines = [f"{name + ':':12} {value}" for name, value in facts.items()]
        if with_tensors:
            lines += [f"  {tensor.name}  {list(tensor.shape)}  {tensor.dtype}" for tensor in self.tensors]
        return lines


def inspect(path: Path, config: Path | None = None) -> Inspection:
    """Return what `path` is. `config`: the folder with the config.json of a checkpoint that has none of its own.

    Raises UserError for anything else than weights, and for damaged ones.
    """
    if path.is_file():
        return _gguf(path)
    if is_nemo(path):
        found = _megatron(path / WEIGHTS, None)
        # Padded, where the settings do not say it.
        settings = nemo_config(path, vocab_size=_embedding_rows(found.tensors))
        names = ("model_type", "num_hidden_layers", "hidden_size", "num_attention_heads", "num_key_value_heads")
        model = ", ".join(f"{name}={settings[name]}" for name in names)
        return replace(found, kind="NeMo 2 checkpoint", facts=found.facts | {"model": model})
    if (path / METADATA).is_file():
        return _megatron(path, config or (path if (path / "config.json").is_file() else None))
    if (path / "config.json").is_file():
        return _hugging_face(path)
    raise UserError(
        f"{path}: neither a Hugging Face folder (config.json), nor a megatron checkpoint ({METADATA}), nor a NeMo 2 checkpoint "
        "(weights/ and context/), nor a GGUF file"
    )


def _hugging_face(path: Path) -> Inspection:
    shape = read_model_shape(path)
    specs = HFFolder(path, shape).specs()
    tensors = [Tensor(name, spec.dtype, spec.shape) for name, spec in specs.items()]
    return Inspection("Hugging Face folder", tensors, _model(shape))


def _megatron(path: Path, config: Path | None) -> Inspection:
    if (path / MARKER).exists():
        check_complete(path)
    metadata = read_metadata(path)
    described = metadata.state_dict_metadata
    others = Counter(what for what in map(what_else, described) if what)
    tensors = [
        Tensor(key, str(entry.properties.dtype).removeprefix("torch."), tuple(entry.size))
        for key, entry in described.items()
        if isinstance(entry, TensorStorageMetadata) and not what_else(key)
    ]
    common = common_state(path, metadata)
    facts = _model(read_model_shape(config)) if config else {"model": "no config.json beside it (--config names one)"}
    if "step" in common:
        facts["step"] = str(common["step"])
    if isinstance(layout := common.get("layout"), dict):
        sizes = [f"{name}={size}" for name, size in layout.items() if size != 1]
        facts["saved with"] = ", ".join(sizes) or "one rank"
    facts["files"] = str(len({place.relative_path for place in metadata.storage_data.values()}))
    facts["beside"] = ", ".join(f"{what} ({count} keys)" for what, count in others.items()) or "nothing"
    with_optimizer = any("optimizer" in what for what in others)
    return Inspection(f"megatron checkpoint, {'with optimizer' if with_optimizer else 'weights only'}", tensors, facts)


def _gguf(path: Path) -> Inspection:
    reader = open_gguf(path)
    tensors = [
        Tensor(tensor.name, tensor.tensor_type.name, tuple(reversed(tensor.shape.tolist())))
        for tensor in reader.tensors
    ]
    architecture = reader.fields["general.architecture"].contents() if "general.architecture" in reader.fields else "?"
    return Inspection("GGUF file", tensors, {"model": str(architecture)})


def _model(shape: ModelShape) -> dict[str, str]:
    sizes = {
        name: value for name, value in asdict(shape).items() if name not in ("family", "rope_scaling") and value != 0
    }
    scaling = {"rope_scaling": "llama3"} if shape.rope_scaling else {}
    return {"family": shape.family, "shape": ", ".join(f"{name}={value}" for name, value in (sizes | scaling).items())}


def _embedding_rows(tensors: Iterable[Tensor]) -> int | None:
    return next((tensor.shape[0] for tensor in tensors if tensor.name.endswith("word_embeddings.weight")), None)
