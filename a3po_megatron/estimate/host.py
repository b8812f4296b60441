"""Bytes of host memory that checkpoints take on a node of the actor, beside what its processes take anyway.

The distributed optimizer's state is written whole (actor/checkpoint.py): the rank that writes a copy of parameters gathers their
main parameters and moments through gloo in its host memory, and megatron-core then clones each parameter's part out of what was
gathered (`get_parameter_state_dp_zero` in distrib_optimizer.py, `prepare_write_data` in filesystem_async.py). Reading makes room
for a whole copy on every rank, and joins gate and up of an MLP from two tensors of the file into a third.
"""

from dataclasses import dataclass

from a3po_megatron.config.actor import ActorConfig
from a3po_megatron.config.model_shape import ModelShape
from a3po_megatron.estimate.parameters import (
    DTYPE_BYTES,
    STATE_BYTES,
    Parameters,
    layers_of_stage,
    ranks_of_a_copy,
    stage_parameters,
)

GATHERED_BYTES = 12  # a parameter: float32 main parameter and two moments, also of float32 parameters


@dataclass(frozen=True)
class HostMemory:
    """Bytes on the node of the actor that needs the most of each."""

    offloaded: float  # optimizer state that `optimizer_cpu_offload` keeps there
    saving: float  # at the peak of a save
    resuming: float  # at the peak of loading a checkpoint

    @property
    def total(self) -> float:
        """All that is needed at once: a run does not save while it loads."""
        return self.offloaded + max(self.saving, self.resuming)


def node_host_memory(shape: ModelShape, actor: ActorConfig, ranks_per_node: int) -> HostMemory:
    """Return the host memory of a node of `ranks_per_node` consecutive ranks (of fewer where the actor has fewer)."""
    ranks = range(actor.world_size)
    nodes = [ranks[first : first + ranks_per_node] for first in range(0, actor.world_size, ranks_per_node)]
    return HostMemory(
        offloaded=max(sum(_offloaded_bytes(shape, actor, rank) for rank in node) for node in nodes),
        saving=max(sum(saving_bytes(shape, actor, rank) for rank in node) for node in nodes),
        resuming=max(sum(resuming_bytes(shape, actor, rank) for rank in node) for node in nodes),
    )


def saving_bytes(shape: ModelShape, actor: ActorConfig, rank: int) -> float:
    """Return what a save takes on `rank` at its peak: twice what is gathered, where this rank writes; and its own shards.

    A rank's shards are copied a bucket at a time: with `overlap_grad_reduce` that is little (40 million elements). Without a
    distributed optimizer what is written is copied once, after the planning.
    """
    held, written = _held(shape, actor, rank), _written(shape, actor, rank)
    if not actor.distributed_optimizer:
        return written.total * (STATE_BYTES[actor.dtype] + DTYPE_BYTES[actor.dtype])
    dense_ranks, expert_ranks = ranks_of_a_copy(actor)
    shards = 0.0 if actor.overlap_grad_reduce else held.dense / dense_ranks + held.expert / expert_ranks
    return GATHERED_BYTES * (2 * written.total + shards)


def resuming_bytes(shape: ModelShape, actor: ActorConfig, rank: int) -> float:
    """Return what loading takes on `rank` at its peak: a whole copy of its state, and that of gate and up joined."""
    if not actor.distributed_optimizer:
        return _held(shape, actor, rank).total * (STATE_BYTES[actor.dtype] + DTYPE_BYTES[actor.dtype])
    layers = layers_of_stage(shape, actor, _stage(actor, rank))
    columns = shape.intermediate_size / actor.tensor_parallel
    if shape.num_experts:
        experts = shape.num_experts / actor.expert_parallel
        columns = experts * shape.moe_intermediate_size / actor.expert_tensor_parallel
    joined = layers * 2 * columns * shape.hidden_size
    return GATHERED_BYTES * _held(shape, actor, rank).total + joined * (GATHERED_BYTES + DTYPE_BYTES[actor.dtype])


def _offloaded_bytes(shape: ModelShape, actor: ActorConfig, rank: int) -> float:
    if not actor.optimizer_cpu_offload:
        return 0.0
    held, (dense_ranks, expert_ranks) = _held(shape, actor, rank), ranks_of_a_copy(actor)
    shards = held.dense / dense_ranks + held.expert / expert_ranks
    return actor.optimizer_offload_fraction * STATE_BYTES[actor.dtype] * shards


def _held(shape: ModelShape, actor: ActorConfig, rank: int) -> Parameters:
    return stage_parameters(shape, actor, _stage(actor, rank))


def _written(shape: ModelShape, actor: ActorConfig, rank: int) -> Parameters:
    """Return the parameters that `rank` writes: of each copy the first rank does.

    megatron-core counts tensor-parallel ranks first, then context and data; of experts expert-tensor ranks, then expert ranks.
    """
    held = _held(shape, actor, rank)
    place = rank % (actor.world_size // actor.pipeline_parallel)
    writes_experts = place < actor.expert_parallel * actor.expert_tensor_parallel
    return Parameters(held.dense if place < actor.tensor_parallel else 0, held.expert if writes_experts else 0)


def _stage(actor: ActorConfig, rank: int) -> int:
    return rank // (actor.world_size // actor.pipeline_parallel)
