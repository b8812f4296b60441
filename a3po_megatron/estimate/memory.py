"""Bytes of GPU memory: of one rank of the actor and of one GPU of a vLLM server, item by item.

Exact are parameters, gradients and optimizer, but for the padding of Megatron's buffers (at most 64 elements a parameter): a
test measures them on real ranks. Activations follow the tensors that the layers keep for the backward pass, in the manner of
Korthikanti et al., "Reducing Activation Recomputation in Large Transformer Models" (arXiv 2205.05198, section 4), for the
gated MLP and grouped heads of these families and attention that keeps no scores (FlashAttention, arXiv 2205.14135).
"""

from dataclasses import dataclass, fields

from a3po_megatron.config.model_shape import ModelShape
from a3po_megatron.config.schema import ActorConfig, RolloutConfig
from a3po_megatron.estimate.parameters import (
    Split,
    embedding_parameters,
    layer_parameters,
    layers_of_stage,
    stage_parameters,
)

DTYPE_BYTES = {"float32": 4, "bfloat16": 2}
STATE_BYTES = {"float32": 8, "bfloat16": 12}  # of the optimizer, a parameter
GPU_CHUNK_TOKENS = 2048  # of actor/token_head.py; a test holds the two together
SERVER_BATCHED_TOKENS = 8192  # vLLM's own default of a server on an 80 GB GPU (vllm/engine/arg_utils.py)
# Assumptions, not measured: CUDA context, NCCL's buffers and what the allocator loses; of a server also CUDA graphs.
ACTOR_OVERHEAD_BYTES = 5e9
SERVER_OVERHEAD_BYTES = 4e9
EXPERT_IMBALANCE = 1.5  # tokens of the busiest expert-parallel rank over the mean


@dataclass(frozen=True)
class ActorMemory:
    """Bytes on each rank of one pipeline stage."""

    parameters: float
    gradients: float
    optimizer: float  # main parameters and Adam's two moments
    activations: float  # of all microbatches in flight
    backward: float  # gradients of one layer's activations while it is worked on
    logprob_chunk: float  # logits of a chunk and the gradient of the output weight, on the last stage
    overhead: float

    @property
    def total(self) -> float:
        """All items."""
        return float(sum(getattr(self, item.name) for item in fields(self)))


@dataclass(frozen=True)
class ServerMemory:
    """Bytes on each GPU of one vLLM server, within its share of the GPU."""

    weights: float
    working: float  # of the largest forward pass, and logits
    overhead: float
    kv_cache: float  # what is left of the share, or `kv_cache_bytes`
    kv_bytes_per_token: float

    @property
    def kv_tokens(self) -> int:
        """Tokens that the KV cache holds, over all sequences of the server."""
        return int(self.kv_cache // self.kv_bytes_per_token)


def actor_memory(shape: ModelShape, actor: ActorConfig, stage: int) -> ActorMemory:
    """Return the memory of a rank of pipeline stage `stage`, its microbatch as full as the settings allow.

    Gradients are float32 in DDP's buffers. Optimizer state, per parameter: 8 bytes of moments and, of bfloat16 parameters, 4 of
    the main one; the distributed optimizer spreads it over the ranks that hold the same parameters (ZeRO stage 1, arXiv
    1910.02054).
    """
    held = stage_parameters(shape, actor, stage)
    width, state = DTYPE_BYTES[actor.dtype], STATE_BYTES[actor.dtype]
    dense_ranks, expert_ranks = _ranks_of_a_copy(actor) if actor.distributed_optimizer else (1, 1)
    tokens = -(-actor.max_tokens_per_microbatch // actor.context_parallel)
    return ActorMemory(
        parameters=held.total * width,
        gradients=held.total * 4,
        optimizer=state * (held.dense / dense_ranks + held.expert / expert_ranks),
        activations=tokens * activation_bytes_per_token(shape, actor, stage),
        backward=tokens * layer_bytes_per_token(shape, actor),
        logprob_chunk=logprob_chunk_bytes(shape, actor, tokens) if stage == actor.pipeline_parallel - 1 else 0.0,
        overhead=ACTOR_OVERHEAD_BYTES,
    )


def largest_stage(shape: ModelShape, actor: ActorConfig) -> tuple[int, ActorMemory]:
    """Return the pipeline stage whose ranks need the most memory, and that memory."""
    stages = [(stage, actor_memory(shape, actor, stage)) for stage in range(actor.pipeline_parallel)]
    return max(stages, key=lambda found: found[1].total)


def layer_bytes_per_token(shape: ModelShape, actor: ActorConfig) -> float:
    """Return what one layer keeps for backward, a token of one context-parallel rank, without recomputation.

    Two norms keep input and output, which sequence parallelism splits; attention keeps fused qkv, rotated query and key, its
    output and one float32 a head; the MLP keeps gate and up, and their product. Of experts the same counts for every choice of a
    token, with the dispatched hidden states.
    """
    width, tp = DTYPE_BYTES[actor.dtype], actor.tensor_parallel
    query, key_value = shape.num_attention_heads * shape.head_dim, shape.num_key_value_heads * shape.head_dim
    norms = 4 * shape.hidden_size * width / _sequence_split(actor)
    attention = (width * (3 * query + 3 * key_value) + 4 * shape.num_attention_heads) / tp
    if not shape.num_experts:
        return norms + attention + width * 3 * shape.intermediate_size / tp
    choices = shape.num_experts_per_tok * EXPERT_IMBALANCE / _sequence_split(actor)
    columns = 3 * shape.moe_intermediate_size  # splits over expert-tensor ranks, which gather as many times the tokens
    experts = choices * width * (shape.hidden_size * actor.expert_tensor_parallel + columns)
    router = 3 * 4 * shape.num_experts / _sequence_split(actor)  # float32 logits and probabilities, and the choice
    return norms + attention + experts + router


def activation_bytes_per_token(shape: ModelShape, actor: ActorConfig, stage: int) -> float:
    """Return what a stage keeps for backward, a token of one context-parallel rank, over the microbatches in flight.

    One forward, one backward keeps pp - stage microbatches of a stage in flight; the interleaved schedule of v chunks adds up to
    (pp - 1) / v more (Narayanan et al., arXiv 2104.04473, section 2.2). The last stage keeps final norm and gathered hidden states.
    """
    pp, vpp = actor.pipeline_parallel, actor.virtual_pipeline_parallel
    in_flight = pp - stage + ((pp - 1) / vpp if vpp > 1 else 0)
    kept = in_flight * layers_of_stage(shape, actor, stage) * layer_bytes_per_token(shape, actor)
    hidden = shape.hidden_size * DTYPE_BYTES[actor.dtype]
    if stage == 0:
        kept += in_flight * hidden / _sequence_split(actor)
    if stage == pp - 1:
        kept += 2 * hidden / _sequence_split(actor) + hidden
    return kept


def logprob_chunk_bytes(shape: ModelShape, actor: ActorConfig, tokens: int) -> float:
    """Return what actor/token_head.py needs beside its inputs while a chunk is worked on.

    Logits, a float32 copy and their gradient [chunk, v]; the gradient of the output weight [v, h] in float32 and as it is returned.
    """
    width = DTYPE_BYTES[actor.dtype]
    columns = shape.padded_vocab_size(actor.tensor_parallel) / actor.tensor_parallel
    chunk = min(actor.logprob_chunk_tokens or GPU_CHUNK_TOKENS, tokens)
    logits = chunk * columns * ((4 if actor.float32_head else width) + 4 + width)
    return logits + embedding_parameters(shape, actor.tensor_parallel) * (4 + width)


def server_memory(shape: ModelShape, rollout: RolloutConfig, gpu_bytes: float) -> ServerMemory:
    """Return the memory of each GPU of a server. What its share leaves beside weights and work is the KV cache.

    A token's key and value take 2 x layers x heads of this GPU x head size (Kwon et al., PagedAttention, arXiv 2309.06180).
    """
    tp, width = rollout.tensor_parallel, DTYPE_BYTES[rollout.dtype]
    layers = layer_parameters(shape, Split(tensor=tp, expert_tensor=tp)).times(shape.num_layers).total
    embedding = embedding_parameters(shape, tp)
    ends = embedding * (1 if shape.tie_word_embeddings else 2) + shape.hidden_size
    weights = (layers + ends) * width + (embedding * 4 if rollout.float32_head else 0)
    per_token = 3 * shape.hidden_size + 3 * max(shape.intermediate_size, shape.moe_intermediate_size) / tp
    working = SERVER_BATCHED_TOKENS * width * per_token + rollout.max_num_seqs * shape.vocab_size * 8
    heads = -(-shape.num_key_value_heads // tp)
    left = rollout.gpu_memory_utilization * gpu_bytes - weights - working - SERVER_OVERHEAD_BYTES
    return ServerMemory(
        weights=weights,
        working=working,
        overhead=SERVER_OVERHEAD_BYTES,
        kv_cache=float(rollout.kv_cache_bytes or max(left, 0.0)),
        kv_bytes_per_token=2 * shape.num_layers * heads * shape.head_dim * width,
    )


def _ranks_of_a_copy(actor: ActorConfig) -> tuple[int, int]:
    """Return how many ranks hold the same dense parameters, and how many the same experts."""
    stage_ranks = actor.world_size // actor.pipeline_parallel
    return stage_ranks // actor.tensor_parallel, stage_ranks // (actor.expert_parallel * actor.expert_tensor_parallel)


def _sequence_split(actor: ActorConfig) -> int:
    return actor.tensor_parallel if actor.sequence_parallel else 1
