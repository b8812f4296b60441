"""Floating point operations of a token: a multiplication and an addition count as two.

Matrices: 2 a parameter and token forward, 4 backward (Kaplan et al., arXiv 2001.08361, section 2.1). Attention: scores and their
product with the values, 4 x heads x head size a layer and attended token (Chowdhery et al., PaLM, arXiv 2204.02311, appendix B).
"""

from a3po_megatron.config.actor import ActorConfig
from a3po_megatron.config.algorithm import AlgorithmConfig
from a3po_megatron.config.model_shape import ModelShape
from a3po_megatron.estimate.activations import recomputed_layers, recomputes_mlp
from a3po_megatron.estimate.parameters import active_parameters, layers_of_stage


def forward_flops(shape: ModelShape, context: float) -> float:
    """Return the FLOPs of a forward pass, a token that attends to `context` tokens: half its sequence's length on average."""
    attention = 4 * shape.num_layers * shape.num_attention_heads * shape.head_dim * context
    return 2 * active_parameters(shape) + head_flops(shape) + attention


def head_flops(shape: ModelShape) -> float:
    """Return the FLOPs of a token's logits, a part of the forward pass."""
    return 2 * shape.vocab_size * shape.hidden_size


def model_flops(shape: ModelShape, context: float) -> float:
    """Return what training on a token needs at least, forward and backward: what model FLOPs utilisation counts."""
    return 3 * forward_flops(shape, context)


def training_flops(shape: ModelShape, algorithm: AlgorithmConfig, actor: ActorConfig, context: float) -> float:
    """Return what the actor does a token of a batch: every epoch, what backward computes again, and extra passes."""
    again = head_flops(shape) + recomputed_flops(shape, actor, context)
    steps = algorithm.num_epochs * (model_flops(shape, context) + again)
    return steps + extra_passes(algorithm) * forward_flops(shape, context)


def recomputed_flops(shape: ModelShape, actor: ActorConfig, context: float) -> float:
    """Return what `actor.recompute_granularity` adds to the backward pass of a token; attention alone is not counted."""
    if actor.recompute_granularity == "full":
        stages = range(actor.pipeline_parallel)
        layers = sum(recomputed_layers(shape, actor, layers_of_stage(shape, actor, stage)) for stage in stages)
        return layers / shape.num_layers * (forward_flops(shape, context) - head_flops(shape))
    if recomputes_mlp(actor):
        chosen = shape.num_experts_per_tok * shape.moe_intermediate_size or shape.intermediate_size
        return 2 * shape.num_layers * shape.hidden_size * (3 * chosen + shape.num_experts)
    return 0.0


def extra_passes(algorithm: AlgorithmConfig) -> float:
    """Return the forward passes over a batch beside those of training: recompute's, metrics', the reference policy's."""
    passes = 1.0 if algorithm.method in ("recompute", "metrics") else 0.0
    if algorithm.reuse_first_forward:
        passes -= 1 / algorithm.num_minibatches
    return passes + (1.0 if algorithm.kl.reference_coefficient else 0.0)
