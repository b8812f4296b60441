"""Validation of the actor's layout against itself and the model. Changes nothing."""

from a3po_megatron.config.actor import ActorConfig
from a3po_megatron.config.model_shape import ModelShape
from a3po_megatron.errors import UserError


def check_actor(actor: ActorConfig, shape: ModelShape) -> None:
    """Check that the layout fits the model and that Megatron trains it right."""
    for name in ("tensor", "pipeline", "virtual_pipeline", "context", "data", "expert", "expert_tensor"):
        at_least(f"actor.{name}_parallel", getattr(actor, f"{name}_parallel"), 1)
    at_least("actor.max_tokens_per_microbatch", actor.max_tokens_per_microbatch, 1)
    at_least("actor.logprob_chunk_tokens", actor.logprob_chunk_tokens, 0)
    if not actor.timeout_s > 0:
        raise UserError(f"actor.timeout_s={actor.timeout_s}: a deadline in seconds above 0")
    if actor.host in ("", "0.0.0.0", "::"):
        raise UserError(
            f"actor.host={actor.host or '(empty)'}: name one address of the first actor node, on a private network"
        )
    check_split(actor, shape)
    _check_pipeline(actor, shape)
    _check_router(actor, shape)
    _check_recompute(actor, shape)
    _check_optimizer_offload(actor)
    if actor.overlap_param_gather and not (actor.distributed_optimizer and actor.overlap_grad_reduce):
        raise UserError(
            "actor.overlap_param_gather=true needs actor.distributed_optimizer=true and actor.overlap_grad_reduce=true: "
            "it gathers the parameters that the distributed optimizer scattered, behind the reduction of their gradients"
        )


def check_split(actor: ActorConfig, shape: ModelShape) -> None:
    """Check that single tensors, and the experts, can be cut as the layout says."""
    _check_tensor_parallel(actor, shape)
    _check_experts(actor, shape)


def _check_tensor_parallel(actor: ActorConfig, shape: ModelShape) -> None:
    tp = actor.tensor_parallel
    for what, size in _tensor_parallel_sizes(shape).items():
        if size % tp:
            raise UserError(
                f"actor.tensor_parallel={tp} does not divide the model's {size} {what}; "
                f"use {_divisors_hint(tp, shape)} and more actor.pipeline_parallel or actor.data_parallel"
            )
    if actor.sequence_parallel and tp == 1:
        raise UserError(
            "actor.sequence_parallel=true needs actor.tensor_parallel above 1: it splits what that leaves whole"
        )


def _tensor_parallel_sizes(shape: ModelShape) -> dict[str, int]:
    """Return what tensor parallelism splits. Experts are split by expert_tensor_parallel instead."""
    sizes = {"query heads": shape.num_attention_heads, "key/value heads": shape.num_key_value_heads}
    if not shape.num_experts:
        sizes["MLP columns (intermediate_size)"] = shape.intermediate_size
    return sizes


def _divisors_hint(tp: int, shape: ModelShape) -> str:
    sizes = _tensor_parallel_sizes(shape).values()
    fits = [str(n) for n in range(1, shape.num_key_value_heads + 1) if all(size % n == 0 for size in sizes)]
    return " or ".join(fits)


def _check_experts(actor: ActorConfig, shape: ModelShape) -> None:
    ep, etp = actor.expert_parallel, actor.expert_tensor_parallel
    if not shape.num_experts:
        if ep * etp > 1:
            raise UserError(
                f"actor.expert_parallel={ep}, actor.expert_tensor_parallel={etp}: the model has no experts; use 1 for both"
            )
        return
    if shape.num_experts % ep:
        raise UserError(f"actor.expert_parallel={ep} does not divide the model's {shape.num_experts} experts")
    if shape.moe_intermediate_size % etp:
        raise UserError(
            f"actor.expert_tensor_parallel={etp} does not divide the {shape.moe_intermediate_size} columns of an expert "
            "(moe_intermediate_size)"
        )
    ranks = actor.world_size // actor.pipeline_parallel
    if ranks % (ep * etp):
        raise UserError(
            f"actor.expert_parallel={ep} x actor.expert_tensor_parallel={etp} does not divide the {ranks} ranks of a "
            "pipeline stage (tensor x context x data parallel) that share the experts"
        )
    if actor.tensor_parallel > 1 and not actor.sequence_parallel:
        raise UserError(
            f"actor.tensor_parallel={actor.tensor_parallel} with a mixture of experts needs actor.sequence_parallel=true: "
            "each tensor-parallel rank routes tokens of its own"
        )


def _check_pipeline(actor: ActorConfig, shape: ModelShape) -> None:
    pp, vpp = actor.pipeline_parallel, actor.virtual_pipeline_parallel
    if vpp > 1 and pp == 1:
        raise UserError(f"actor.virtual_pipeline_parallel={vpp} needs actor.pipeline_parallel above 1")
    chunks = pp * vpp
    if chunks > shape.num_layers:
        raise UserError(
            f"actor.pipeline_parallel={pp} x actor.virtual_pipeline_parallel={vpp} makes {chunks} chunks, "
            f"more than the model's {shape.num_layers} layers; use at most {shape.num_layers}"
        )
    if actor.num_layers_in_first_pipeline_stage or actor.num_layers_in_last_pipeline_stage:
        _check_uneven_pipeline(actor, shape)
    elif shape.num_layers % chunks:
        raise UserError(
            f"actor.pipeline_parallel={pp} x actor.virtual_pipeline_parallel={vpp} makes {chunks} chunks, which do not "
            f"divide the model's {shape.num_layers} layers evenly; {_uneven_hint(actor, shape)}"
        )
    if vpp > 1 and actor.p2p_communication == "batched":
        raise UserError(
            "actor.p2p_communication=batched with virtual pipeline stages trains silently wrong on megatron-core "
            f"(actor.virtual_pipeline_parallel={vpp}, actor.pipeline_parallel={pp}); use overlapped or auto"
        )
    if vpp == 1 and actor.p2p_communication == "overlapped":
        raise UserError(
            "actor.p2p_communication=overlapped needs actor.virtual_pipeline_parallel above 1: "
            "Megatron's plain schedule has no overlapped form; use batched or auto"
        )


def _check_uneven_pipeline(actor: ActorConfig, shape: ModelShape) -> None:
    first, last = actor.num_layers_in_first_pipeline_stage, actor.num_layers_in_last_pipeline_stage
    pp, vpp = actor.pipeline_parallel, actor.virtual_pipeline_parallel
    at_least("actor.num_layers_in_first_pipeline_stage", first, 0)
    at_least("actor.num_layers_in_last_pipeline_stage", last, 0)
    given = f"actor.num_layers_in_first_pipeline_stage={first}, actor.num_layers_in_last_pipeline_stage={last}"
    if pp == 1:
        raise UserError(f"{given}: the one stage of actor.pipeline_parallel=1 has every layer; leave both at 0")
    others, rest = pp - bool(first) - bool(last), shape.num_layers - first - last
    if (others == 0 and rest != 0) or (others and (rest < others or rest % others)):
        raise UserError(
            f"{given}: leave {rest} of the model's {shape.num_layers} layers for the other {others} of "
            f"{pp} pipeline stages, which must share them evenly, at least one each; {_uneven_hint(actor, shape)}"
        )
    for size in {first, last, rest // others if others else 0}:
        if size % vpp:
            raise UserError(
                f"{given}: a stage of {size} layers cannot be cut into actor.virtual_pipeline_parallel={vpp} equal chunks"
            )


def _uneven_hint(actor: ActorConfig, shape: ModelShape) -> str:
    """Name a last stage that fits, nearest to the others and rather smaller: it also has the output layer."""
    pp, vpp = actor.pipeline_parallel, actor.virtual_pipeline_parallel
    fits = [(others, shape.num_layers - others * (pp - 1)) for others in range(shape.num_layers, 0, -1)]
    fits = [(others, last) for others, last in fits if last > 0 and others % vpp == last % vpp == 0]
    if not fits:
        return "use another actor.virtual_pipeline_parallel"
    others, last = min(fits, key=lambda sizes: abs(sizes[0] - sizes[1]))
    return f"actor.num_layers_in_last_pipeline_stage={last} would leave {others} to each other stage"


def _check_router(actor: ActorConfig, shape: ModelShape) -> None:
    for name in ("moe_aux_loss_coeff", "moe_z_loss_coeff"):
        at_least(f"actor.{name}", getattr(actor, name), 0)
        if getattr(actor, name) and not shape.num_experts:
            raise UserError(f"actor.{name}={getattr(actor, name)}: the model has no experts; use 0")


def _check_recompute(actor: ActorConfig, shape: ModelShape) -> None:
    at_least("actor.recompute_num_layers", actor.recompute_num_layers, 1)
    _check_recompute_is_used(actor)
    most = _layers_of_largest_chunk(actor, shape)
    if actor.recompute_num_layers > most:
        raise UserError(
            f"actor.recompute_num_layers={actor.recompute_num_layers}: at most {most}, the layers of a stage's chunk"
        )
    known = ("core_attn", "moe" if shape.num_experts else "mlp")
    unknown = [name for name in actor.recompute_modules if name not in known]
    if actor.recompute_granularity == "selective" and (unknown or not actor.recompute_modules):
        raise UserError(
            f"actor.recompute_modules={actor.recompute_modules}: of this model {' and '.join(known)} can be recomputed; "
            "name at least one"
        )


def _check_recompute_is_used(actor: ActorConfig) -> None:
    """Refuse settings of one granularity under another, where they would do nothing."""
    belongs = {"recompute_modules": "selective", "recompute_method": "full", "recompute_num_layers": "full"}
    for name, granularity in belongs.items():
        value = getattr(actor, name)
        if value != getattr(ActorConfig(), name) and actor.recompute_granularity != granularity:
            raise UserError(
                f"actor.{name}={value} does nothing with actor.recompute_granularity={actor.recompute_granularity}; "
                f"set actor.recompute_granularity={granularity}, or leave it out"
            )


def _layers_of_largest_chunk(actor: ActorConfig, shape: ModelShape) -> int:
    given = (actor.num_layers_in_first_pipeline_stage, actor.num_layers_in_last_pipeline_stage)
    others = actor.pipeline_parallel - sum(map(bool, given))
    of_others = (shape.num_layers - sum(given)) // others if others else 0
    return max(*given, of_others) // actor.virtual_pipeline_parallel


def _check_optimizer_offload(actor: ActorConfig) -> None:
    if not actor.optimizer_cpu_offload:
        if actor.optimizer_offload_fraction != ActorConfig().optimizer_offload_fraction:
            raise UserError(
                f"actor.optimizer_offload_fraction={actor.optimizer_offload_fraction} does nothing without "
                "actor.optimizer_cpu_offload=true; set that, or leave it out"
            )
        return
    if actor.dtype == "float32":
        raise UserError(
            "actor.optimizer_cpu_offload=true with actor.dtype=float32: megatron-core cannot load such an optimizer's "
            "checkpoint, which has no main parameters beside the model's; use bfloat16"
        )
    if not actor.distributed_optimizer:
        raise UserError(
            "actor.optimizer_cpu_offload=true needs actor.distributed_optimizer=true, whose shards megatron-core offloads"
        )
    if not 0 < actor.optimizer_offload_fraction <= 1:
        raise UserError(f"actor.optimizer_offload_fraction={actor.optimizer_offload_fraction}: above 0 and at most 1")


def at_least(name: str, value: float, minimum: float) -> None:
    """Refuse a value below `minimum`, and NaN."""
    if not value >= minimum:
        raise UserError(f"{name}={value}: must be at least {minimum}")
