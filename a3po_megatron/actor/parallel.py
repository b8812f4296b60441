"""Megatron's process groups for our layout, and this rank's place in them.

Megatron keeps them in module globals (megatron/core/parallel_state.py); this is the only global state of the project.
"""

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.models.common.embeddings.rotary_pos_embedding import RotaryEmbedding
from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed
from torch import Tensor
from torch.distributed import distributed_c10d

from a3po_megatron.config.actor import ActorConfig


@dataclass(frozen=True)
class Place:
    """Where this rank stands. Ranks count from 0 within each group."""

    tp_rank: int
    tp_size: int
    pp_rank: int
    pp_size: int
    cp_rank: int
    cp_size: int
    dp_rank: int
    dp_size: int
    ep_rank: int
    ep_size: int
    etp_rank: int
    etp_size: int

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
        context_parallel_size=actor.context_parallel,
        expert_model_parallel_size=actor.expert_parallel,
        expert_tensor_parallel_size=actor.expert_tensor_parallel,
        distributed_timeout_minutes=actor.timeout_s / 60,
    )
    model_parallel_cuda_manual_seed(seed, force_reset_rng=True)
    return Place(
        tp_rank=parallel_state.get_tensor_model_parallel_rank(),
        tp_size=parallel_state.get_tensor_model_parallel_world_size(),
        pp_rank=parallel_state.get_pipeline_model_parallel_rank(),
        pp_size=parallel_state.get_pipeline_model_parallel_world_size(),
        cp_rank=parallel_state.get_context_parallel_rank(),
        cp_size=parallel_state.get_context_parallel_world_size(),
        dp_rank=parallel_state.get_data_parallel_rank(),
        dp_size=parallel_state.get_data_parallel_world_size(),
        ep_rank=parallel_state.get_expert_model_parallel_rank(),
        ep_size=parallel_state.get_expert_model_parallel_world_size(),
        etp_rank=parallel_state.get_expert_tensor_parallel_rank(),
        etp_size=parallel_state.get_expert_tensor_parallel_world_size(),
    )


def destroy() -> None:
    """Take every process group but the default one down, so that another layout can follow.

    megatron only forgets its groups. Each holds threads and sockets, about thirty groups a layout, so they are ended here.
    So is what still refers to one: the cache of rotary embeddings keeps the modules that filled it, and they their group.
    """
    parallel_state.destroy_model_parallel()
    RotaryEmbedding.forward.cache_clear()  # megatron/core/models/common/embeddings/rotary_pos_embedding.py
    for group in list(distributed_c10d._world.pg_map):
        if group is not dist.group.WORLD:
            dist.destroy_process_group(group)


def tp_group() -> dist.ProcessGroup:
    """Ranks that hold the other shards of this rank's layers."""
    return parallel_state.get_tensor_model_parallel_group()


def pp_group() -> dist.ProcessGroup:
    """Ranks that hold the other layers, first stage first."""
    return parallel_state.get_pipeline_model_parallel_group()


def cp_group() -> dist.ProcessGroup:
    """Ranks that hold the same parameters and the other parts of the same sequences."""
    return parallel_state.get_context_parallel_group()


def dp_group() -> dist.ProcessGroup:
    """Ranks that hold the same parameters and see other sequences."""
    return parallel_state.get_data_parallel_group()


def dp_cp_group() -> dist.ProcessGroup:
    """Ranks that hold the same parameters and see other tokens."""
    return parallel_state.get_data_parallel_group(with_context_parallel=True)


def ep_group() -> dist.ProcessGroup:
    """Ranks of this pipeline stage that hold the other experts."""
    return parallel_state.get_expert_model_parallel_group()


def etp_group() -> dist.ProcessGroup:
    """Ranks that hold the other shards of this rank's experts."""
    return parallel_state.get_expert_tensor_parallel_group()


def sum_over_cp(values: Tensor) -> Tensor:
    """Return the sum of `values` over the context-parallel ranks, on each of them. Collective, forward and backward.

    The loss is the sum of the ranks' losses, and each of these may depend on the returned sum, so its gradient is summed too.
    """
    return values if cp_group().size() == 1 else _SumOverContext.apply(values)


def gather_over_cp(values: Tensor) -> list[Tensor]:
    """Return the `values` of every context-parallel rank, in rank order; without gradient. Collective."""
    gathered = [torch.empty_like(values) for _ in range(cp_group().size())]
    dist.all_gather(gathered, values.contiguous(), group=cp_group())
    return gathered


class _SumOverContext(torch.autograd.Function):
    """All-reduce forward and backward."""

    @staticmethod
    def forward(ctx: Any, values: Tensor) -> Tensor:
        total = values.clone()
        dist.all_reduce(total, group=cp_group())
        return total

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        total = gradient.clone()
        dist.all_reduce(total, group=cp_group())
        return total
