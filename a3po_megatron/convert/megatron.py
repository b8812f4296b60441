"""Hugging Face folder <-> megatron checkpoint. One process, one parameter at a time; the layout is only how bytes are cut."""

import math
from pathlib import Path

from a3po_megatron.actor.hf_folder import HFFolder, write_hf_folder
from a3po_megatron.actor.megatron_folder import MegatronFolder
from a3po_megatron.actor.safetensors_writer import MAX_SHARD_BYTES
from a3po_megatron.config.actor import ActorConfig
from a3po_megatron.config.check_actor import check_split
from a3po_megatron.config.model_shape import ModelShape, read_model_shape
from a3po_megatron.convert.destination import writing
from a3po_megatron.convert.megatron_writer import write_megatron_folder
from a3po_megatron.convert.weights import Cast, Summary, Watch, Weights, stream, summarise, unwatched
from a3po_megatron.errors import UserError


def hf_to_megatron(
    source: Path, destination: Path, layout: ActorConfig, dtype: str | None = None, watch: Watch = unwatched
) -> Summary:
    """Write `source` as the new megatron checkpoint `destination`. `dtype` None keeps the type of every tensor.

    Raises UserError: source damaged or of another model than its config.json says, layout that does not divide the model.
    """
    shape = read_model_shape(source)
    check_layout(layout, shape)
    weights = _cast(HFFolder(source, shape), dtype)
    with writing(destination):
        return write_megatron_folder(weights, layout, source, destination, watch)


def megatron_to_hf(
    source: Path,
    config: Path,
    destination: Path,
    dtype: str | None = None,
    watch: Watch = unwatched,
    max_shard_bytes: int = MAX_SHARD_BYTES,
) -> tuple[Summary, dict[str, int]]:
    """Write the weights of checkpoint `source` as the new Hugging Face folder `destination`.

    `config`: the folder whose config.json describes the model and whose tokenizer goes along. Returns also what else the
    checkpoint holds, which is left out, with the number of its keys. Raises UserError for a checkpoint damaged or of another model.
    """
    folder = MegatronFolder(source, read_model_shape(config))
    weights = _cast(folder, dtype)
    with writing(destination):
        write_hf_folder(stream(weights, watch), weights.specs(), config, destination, max_shard_bytes)
    return summarise(weights), dict(folder.ignored)


def layout_of(tensor_parallel: int, pipeline_parallel: int, expert_parallel: int = 1) -> ActorConfig:
    """Return the actor's settings of a layout, with as much data parallelism as its experts need."""
    return ActorConfig(
        tensor_parallel=tensor_parallel,
        pipeline_parallel=pipeline_parallel,
        expert_parallel=expert_parallel,
        sequence_parallel=tensor_parallel > 1,  # experts ask for it; it cuts no parameter
        data_parallel=max(1, expert_parallel // max(1, math.gcd(expert_parallel, tensor_parallel))),
    )


def check_layout(layout: ActorConfig, shape: ModelShape) -> None:
    """Check that the weights can be cut so; stages need not be even, each reads its layers from whichever files have them."""
    check_split(layout, shape)
    if layout.pipeline_parallel > shape.num_layers:
        raise UserError(
            f"--pipeline-parallel {layout.pipeline_parallel}: more stages than the model's {shape.num_layers} layers"
        )


def _cast(weights: Weights, dtype: str | None) -> Weights:
    return weights if dtype is None else Cast(weights, dtype)
