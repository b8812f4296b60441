"""Bytes that the layers keep for the backward pass, a token of one context-parallel rank.

They follow the tensors, in the manner of Korthikanti et al., "Reducing Activation Recomputation in Large Transformer Models"
(arXiv 2205.05198, section 4), for the gated MLP and grouped heads of these families, and attention that keeps no scores
(FlashAttention, arXiv 2205.14135): in bfloat16 those of Transformer Engine's fused kernels, in float32, for which
actor/kernels.py takes none of them, those of actor/layers.py.
"""

from dataclasses import dataclass

from a3po_megatron.config.actor import ActorConfig
from a3po_megatron.config.model_shape import ModelShape
from a3po_megatron.estimate.parameters import DTYPE_BYTES, layers_of_stage

EXPERT_IMBALANCE = 1.5  # tokens of the busiest expert-parallel rank over the mean: an assumption


@dataclass(frozen=True)
class LayerBytes:
    """What one layer keeps, a token, by part."""

    norms: float  # both
    attention: float
    mlp: float  # of a mixture: experts and router

    @property
    def total(self) -> float:
        """All parts."""
        return self.norms + self.attention + self.mlp


def layer_bytes_per_token(shape: ModelShape, actor: ActorConfig) -> LayerBytes:
    """Return what one layer keeps without recomputation.

    Two norms keep input and output, which sequence parallelism splits; attention keeps fused qkv, rotated query and key, its
    output and one float32 a head; the MLP keeps gate and up, and their product. Of experts the same counts for every choice of a
    token, with the dispatched hidden states. Local layers also keep each norm before its weight (of query and key: input and
    output too), the attention's output as a copy in the order of the tokens, cosines and sines that no parallelism splits, and of
    the MLP the projection from which gate and up are copied; of an expert the product before the router's probability too.
    """
    width, tp = DTYPE_BYTES[actor.dtype], actor.tensor_parallel
    query, key_value = shape.num_attention_heads * shape.head_dim, shape.num_key_value_heads * shape.head_dim
    norms = 2 * _norm_bytes(shape, actor)
    heads = 4 * shape.num_attention_heads
    if _is_fused(actor):
        attention = (width * (3 * query + 3 * key_value) + heads) / tp
        dense_columns, expert_columns = 3, 3
    else:
        elements = 6 * query + 5 * key_value if shape.has_qk_norm else 3 * query + 2 * key_value
        attention = (width * elements + heads) / tp + width * 4 * shape.head_dim
        dense_columns, expert_columns = 5, 6
    if not shape.num_experts:
        return LayerBytes(norms, attention, width * dense_columns * shape.intermediate_size / tp)
    imbalance = EXPERT_IMBALANCE if actor.expert_parallel > 1 else 1.0  # one rank alone has every choice
    choices = shape.num_experts_per_tok * imbalance / _sequence_split(actor)
    # These split over expert-tensor ranks, which gather as many times the tokens.
    columns = expert_columns * shape.moe_intermediate_size
    experts = choices * width * (shape.hidden_size * actor.expert_tensor_parallel + columns)
    router = 3 * 4 * shape.num_experts / _sequence_split(actor)  # float32 logits and probabilities, and the choice
    return LayerBytes(norms, attention, experts + router)


def stage_bytes_per_token(shape: ModelShape, actor: ActorConfig, stage: int) -> float:
    """Return what a pipeline stage keeps over the microbatches in flight, and what it computes again at a time.

    The embedding's output is the first layer's input, and counts there. The last stage keeps final norm and gathered hidden
    states, until it begins to compute again; of the logits nothing but a few numbers a token (actor/token_head.py).
    """
    in_layers, again = _kept_in_layers(shape, actor, layers_of_stage(shape, actor, stage))
    is_last = stage == actor.pipeline_parallel - 1
    ends = 2 * _hidden_bytes(shape, actor) + shape.hidden_size * DTYPE_BYTES[actor.dtype] if is_last else 0.0
    return microbatches_in_flight(actor, stage) * in_layers + max(again, ends)


def microbatches_in_flight(actor: ActorConfig, stage: int) -> float:
    """Return how many microbatches a stage has gone forward with and not yet back, where a step has enough of them.

    One forward, one backward keeps pp - stage. The interleaved schedule of v chunks (Narayanan et al., arXiv 2104.04473, section
    2.2) goes forward with pp microbatches in each chunk but the last, two more a stage to come, and one: of a chunk, 1 / v.
    """
    pp, vpp = actor.pipeline_parallel, actor.virtual_pipeline_parallel
    if vpp == 1:
        return pp - stage
    return (2 * (pp - stage - 1) + (vpp - 1) * pp + 1) / vpp


def recomputes_mlp(actor: ActorConfig) -> bool:
    """Whether each layer's MLP, dense or of experts, is computed again by itself."""
    return actor.recompute_granularity == "selective" and bool({"mlp", "moe"} & set(actor.recompute_modules))


def recomputed_layers(shape: ModelShape, actor: ActorConfig, layers: int) -> int:
    """Return how many of a stage's `layers` are computed again as a whole."""
    if actor.recompute_granularity != "full":
        return 0
    if actor.recompute_method == "uniform":
        return layers
    return min(layers, actor.recompute_num_layers * actor.virtual_pipeline_parallel)  # the first ones of each chunk


def _kept_in_layers(shape: ModelShape, actor: ActorConfig, layers: int) -> tuple[float, float]:
    """Return what a stage's layers keep of one microbatch, and what is computed again at a time, whatever is in flight.

    A recomputed layer keeps its input only, or of `uniform` each group of `recompute_num_layers` its first one's: the group that is
    computed again has it already. Recomputing the MLP saves its inner tensors and, of a dense one, all but the input of the norm
    inside it.
    """
    layer, hidden = layer_bytes_per_token(shape, actor), _hidden_bytes(shape, actor)
    if actor.recompute_granularity == "full":
        whole = recomputed_layers(shape, actor, layers)
        group = actor.recompute_num_layers if actor.recompute_method == "uniform" else 1
        chunks = actor.virtual_pipeline_parallel  # each is grouped by itself
        kept = chunks * -(-whole // (chunks * group))
        return kept * hidden + (layers - whole) * layer.total, group * layer.total - hidden
    if recomputes_mlp(actor):
        saved = layer.mlp + (0 if shape.num_experts else _norm_bytes(shape, actor) - hidden)
        return layers * (layer.total - saved), saved
    return layers * layer.total, 0.0


def _norm_bytes(shape: ModelShape, actor: ActorConfig) -> float:
    """Return what a norm keeps, a token: input and output, and of local layers what lies between them."""
    return (2 if _is_fused(actor) else 3) * _hidden_bytes(shape, actor)


def _hidden_bytes(shape: ModelShape, actor: ActorConfig) -> float:
    """Return the hidden state of a token on one rank."""
    return shape.hidden_size * DTYPE_BYTES[actor.dtype] / _sequence_split(actor)


def _sequence_split(actor: ActorConfig) -> int:
    return actor.tensor_parallel if actor.sequence_parallel else 1


def _is_fused(actor: ActorConfig) -> bool:
    return actor.dtype == "bfloat16"
