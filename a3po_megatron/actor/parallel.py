"""Megatron's process groups for our layout, and this rank's place in them.

Megatron keeps them in module globals (megatron/core/parallel_state.py); this is the only global state of the project.
"""

from dataclasses import dataclass

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed
from torch.distributed import distributed_c10d

from a3po_megatron.config.schema import ActorConfig


@dataclass(frozen=True)
class Place:
    """Where this rank stands. Ranks count from 0 within each group."""

    tp_rank: int
    tp_size: int
    pp_rank: int
    pp_size: int
    dp_rank: int
    dp_size: int

    @property
    def is_last_stage(self) -> bool:
        """Whether this rank's pipeline stage ends with the output layer."""
        return self.pp_rank == self.pp_size - 1


def initialize(actor: ActorConfig, seed: int) -> Place:
    """Make megatron's process groups over the default group, seed the random trackers, and return this rank's place."""
    vpp = actor.virtual_pipeline_parallel
    torch.manual_seed(seed)
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=actor.tensor_parallel,
        pipeline_model_parallel_size=actor.pipeline_parallel,
        virtual_pipeline_model_parallel_size=vpp if vpp > 1 else None,
        distributed_timeout_minutes=actor.timeout_s / 60,
    )
    model_parallel_cuda_manual_seed(seed, force_reset_rng=True)
    return Place(
        tp_rank=parallel_state.get_tensor_model_parallel_rank(),
        tp_size=parallel_state.get_tensor_model_parallel_world_size(),
        pp_rank=parallel_state.get_pipeline_model_parallel_rank(),
        pp_size=parallel_state.get_pipeline_model_parallel_world_size(),
        dp_rank=parallel_state.get_data_parallel_rank(),
        dp_size=parallel_state.get_data_parallel_world_size(),
    )


def destroy() -> None:
    """Take every process group but the default one down, so that another layout can follow.

    megatron only forgets its groups. Each holds threads and sockets, about thirty groups a layout, so they are ended here.
    """
    parallel_state.destroy_model_parallel()
    for group in list(distributed_c10d._world.pg_map):
        if group is not dist.group.WORLD:
            dist.destroy_process_group(group)


def tp_group() -> dist.ProcessGroup:
    """Ranks that hold the other shards of this rank's layers."""
    return parallel_state.get_tensor_model_parallel_group()


def pp_group() -> dist.ProcessGroup:
    """Ranks that hold the other layers, first stage first."""
    return parallel_state.get_pipeline_model_parallel_group()


def dp_group() -> dist.ProcessGroup:
    """Ranks that hold the same parameters and see other data."""
    return parallel_state.get_data_parallel_group(with_context_parallel=True)
