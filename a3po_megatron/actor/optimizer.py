"""Megatron's DDP wrapper, AdamW and learning rate schedule from our settings; the gradients' norm and clipping."""

import math
from collections.abc import Sequence

import torch
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
from megatron.core.models.gpt import GPTModel
from megatron.core.optimizer import ChainedOptimizer, get_megatron_optimizer
from megatron.core.optimizer import OptimizerConfig as MegatronOptimizerConfig
from megatron.core.optimizer.clip_grads import clip_grad_by_total_norm_fp32
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
from megatron.core.transformer import TransformerConfig

from a3po_megatron.config.actor import ActorConfig, OptimizerConfig


def wrap_chunks(
    chunks: Sequence[GPTModel], config: TransformerConfig, actor: ActorConfig
) -> list[DistributedDataParallel]:
    """Wrap each chunk in Megatron's DDP, with float32 gradient buffers, and tell `config` how gradients are finished."""
    ddp_config = DistributedDataParallelConfig(
        grad_reduce_in_fp32=True,
        use_distributed_optimizer=actor.distributed_optimizer,
        overlap_grad_reduce=actor.overlap_grad_reduce,
        overlap_param_gather=actor.overlap_param_gather,
    )
    # Buckets overlap communication with the backward pass of the first chunk only, as in Megatron-LM's training loop.
    wrapped = [
        DistributedDataParallel(config, ddp_config, chunk, disable_bucketing=index > 0)
        for index, chunk in enumerate(chunks)
    ]
    config.finalize_model_grads_func = finalize_model_grads
    if actor.overlap_grad_reduce:
        no_sync = [chunk.no_sync for chunk in wrapped]
        config.no_sync_func = no_sync if len(no_sync) > 1 else no_sync[0]
    return wrapped


def build_optimizer(
    chunks: list[DistributedDataParallel], settings: OptimizerConfig, actor: ActorConfig, dtype: torch.dtype
) -> ChainedOptimizer:
    """Return Megatron's AdamW over the chunks; with bfloat16 parameters it keeps float32 main parameters."""
    return get_megatron_optimizer(
        MegatronOptimizerConfig(
            optimizer="adam",
            lr=settings.lr,
            min_lr=settings.min_lr,
            weight_decay=settings.weight_decay,
            adam_beta1=settings.beta1,
            adam_beta2=settings.beta2,
            adam_eps=settings.eps,
            clip_grad=settings.clip_grad,
            params_dtype=dtype,
            bf16=dtype == torch.bfloat16,
            use_distributed_optimizer=actor.distributed_optimizer,
            overlap_param_gather=actor.overlap_param_gather,
            optimizer_cpu_offload=actor.optimizer_cpu_offload,
            optimizer_offload_fraction=actor.optimizer_offload_fraction,
            overlap_cpu_optimizer_d2h_h2d=actor.optimizer_cpu_offload,
            use_precision_aware_optimizer=actor.optimizer_cpu_offload,  # offloading takes its code path
        ),
        chunks,
    )


def build_scheduler(optimizer: ChainedOptimizer, settings: OptimizerConfig) -> OptimizerParamScheduler:
    """Return the schedule of learning rate and weight decay; `step(1)` is called before each optimizer step."""
    return OptimizerParamScheduler(
        optimizer,
        init_lr=0.0,
        max_lr=settings.lr,
        min_lr=settings.min_lr,
        lr_warmup_steps=settings.lr_warmup_steps,
        lr_decay_steps=max(settings.lr_decay_steps, settings.lr_warmup_steps + 1),
        lr_decay_style=settings.lr_decay,
        start_wd=settings.weight_decay,
        end_wd=settings.weight_decay,
        wd_incr_steps=0,
        wd_incr_style="constant",
    )


def gradient_norm(optimizer: ChainedOptimizer) -> float:
    """Return the global norm of the gradients, before clipping; infinite or NaN when one of them is."""
    found_inf = optimizer.prepare_grads()
    return math.inf if found_inf else float(optimizer.get_grad_norm())


def clip_gradients(optimizer: ChainedOptimizer, max_norm: float, norm: float) -> None:
    """Scale gradients of the global norm `norm` down to `max_norm` (0: leave them)."""
    if max_norm > 0:
        for part in optimizer.chained_optimizers:
            if parameters := part.get_parameters():
                decoupled = part.config.use_precision_aware_optimizer_no_fp8_or_ds_fp8
                clip_grad_by_total_norm_fp32(parameters, max_norm, norm, use_decoupled_grad=decoupled)
