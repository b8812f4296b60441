"""Bytes that the layers keep for the backward pass, a token of one context-parallel rank.

They follow the tensors, in the manner of Korthikanti et al., "Reducing Activation Recomputation in Large Transformer Models"
(arXiv 2205.05198, section 4), for the gated MLP and grouped heads of these families, Transformer Engine's fused kernels, and
attention that keeps no scores (FlashAttention, arXiv 2205.14135).
"""

from dataclasses import dataclass

from a3po_megatron.config.actor import ActorConfig
from a3po_megatron.config.model_shape import ModelShape
from a3po_megatron.estimate.parameters import layers_of_stage

DTYPE_BYTES = {"float32": 4, "bfloat16": 2}
EXPERT_IMBALANCE = 1.5  # tokens of the busiest expert-parallel rank over the mean: an assumption


@dataclass(frozen=True)
class LayerBytes:
    """What one layer keeps, a token, by part."""

    norms: float  # input and output of both
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
    token, with the dispatched hidden states.
    """
    width, tp = DTYPE_BYTES[actor.dtype], actor.tensor_parallel
    query, key_value = shape.num_attention_heads * shape.head_dim, shape.num_key_value_heads * shape.head_dim
    norms = 4 * _hidden_bytes(shape, actor)
    attention = (width * (3 * query + 3 * key_value) + 4 * shape.num_attention_heads) / tp
    if not shape.num_experts:
        return LayerBytes(norms, attention, width * 3 * shape.intermediate_size / tp)
    choices = shape.num_experts_per_tok * EXPERT_IMBALANCE / _sequence_split(actor)
    columns = 3 * shape.moe_intermediate_size  # splits over expert-tensor ranks, which gather as many times the tokens
    experts = choices * width * (shape.hidden_size * actor.expert_tensor_parallel + columns)
    router = 3 * 4 * shape.num_experts / _sequence_split(actor)  # float32 logits and probabilities, and the choice
    return LayerBytes(norms, attention, experts + router)


def stage_bytes_per_token(shape: ModelShape, actor: ActorConfig, stage: int) -> float:
    """Return what a pipeline stage keeps over the microbatches in flight, and what it computes again at a time.

    The last stage keeps final norm and gathered hidden states.
    """
    pp, in_flight = actor.pipeline_parallel, microbatches_in_flight(actor, stage)
    in_layers, again = _kept_in_layers(shape, actor, layers_of_stage(shape, actor, stage))
    kept, hidden = in_flight * in_layers + again, _hidden_bytes(shape, actor)
    if stage == 0:
        kept += in_flight * hidden
    if stage == pp - 1:
        kept += 2 * hidden + shape.hidden_size * DTYPE_BYTES[actor.dtype]
    return kept


def microbatches_in_flight(actor: ActorConfig, stage: int) -> float:
    """Return how many microbatches a stage has gone forward with and not yet back, where a step has enough of them.

    One forward, one backward keeps pp - stage. The interleaved schedule of v chunks (Narayanan et al., arXiv 2104.04473, section
    2.2) goes forward with pp microbatches in each chunk but the last, two more a stage to come, and one: of a chunk, 1 / v.
    """
    pp, vpp = actor.pipeline_parallel, actor.virtual_pipeline_parallel
    if vpp == 1:
        return pp - stage
    return (2 * (pp - stage - 1) + (vpp - 1) * pp + 1) / vpp


def recomputed_layers(shape: ModelShape, actor: ActorConfig, layers: int) -> int:
    """Return how many of a stage's `layers` are computed again as a whole."""
    if actor.recompute_granularity != "full":
        return 0
    if actor.recompute_method == "uniform":
        return layers
    return min(layers, actor.recompute_num_layers * actor.virtual_pipeline_parallel)  # the first ones of each chunk


def _kept_in_layers(shape: ModelShape, actor: ActorConfig, layers: int) -> tuple[float, float]:
    """Return what a stage's layers keep of one microbatch, and what is computed again at a time, whatever is in flight.

    A recomputed layer keeps its input only, or of `uniform` each group of `recompute_num_layers` its first one's. Recomputing the
    MLP saves its inner tensors and, of a dense one, the norm's output that is made inside it.
    """
    layer, hidden = layer_bytes_per_token(shape, actor), _hidden_bytes(shape, actor)
    if actor.recompute_granularity == "full":
        whole = recomputed_layers(shape, actor, layers)
        group = actor.recompute_num_layers if actor.recompute_method == "uniform" else 1
        return -(-whole // group) * hidden + (layers - whole) * layer.total, group * layer.total
    if actor.recompute_granularity == "selective" and {"mlp", "moe"} & set(actor.recompute_modules):
        saved = layer.mlp + (0 if shape.num_experts else hidden)
        return layers * (layer.total - saved), saved
    return layers * layer.total, 0.0


def _hidden_bytes(shape: ModelShape, actor: ActorConfig) -> float:
    """Return the hidden state of a token on one rank."""
    return shape.hidden_size * DTYPE_BYTES[actor.dtype] / _sequence_split(actor)


def _sequence_split(actor: ActorConfig) -> int:
    return actor.tensor_parallel if actor.sequence_parallel else 1
