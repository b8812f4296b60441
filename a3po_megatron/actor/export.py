"""The current weights as a Hugging Face folder."""

from pathlib import Path

import torch.distributed as dist

from a3po_megatron.actor.actor import Actor
from a3po_megatron.actor.hf_folder import write_hf_folder
from a3po_megatron.actor.hf_mapping import hf_shapes
from a3po_megatron.actor.safetensors_writer import TensorType


def export_hf_folder(actor: Actor, source: Path, destination: Path) -> None:
    """Write the current weights with config and tokenizer from `source`. Collective; rank 0 writes."""
    stream = actor.export_weights()
    if dist.get_rank() == 0:
        specs = {name: TensorType(actor.settings.dtype, shape) for name, shape in hf_shapes(actor.shape).items()}
        write_hf_folder(stream, specs, source, destination)
    else:
        for _ in stream:
            pass
    dist.barrier()
