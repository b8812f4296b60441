"""The weights that a model starts from: a Hugging Face folder, or a megatron checkpoint with config.json beside it. Torch-free."""

from pathlib import Path
from typing import TYPE_CHECKING

from a3po_megatron.actor.hf_folder import HFFolder
from a3po_megatron.config.model_shape import ModelShape

if TYPE_CHECKING:
    from a3po_megatron.actor.megatron_folder import MegatronFolder


def open_weights(folder: str | Path, shape: ModelShape) -> "HFFolder | MegatronFolder":
    """Open the folder; `tensor(name)` of the result is a whole Hugging Face tensor. Raises UserError unless it fits `shape`."""
    if not (Path(folder) / ".metadata").is_file():
        return HFFolder(folder, shape)
    from a3po_megatron.actor.megatron_folder import MegatronFolder  # torch

    return MegatronFolder(Path(folder), shape)
