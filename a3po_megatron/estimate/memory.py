"""Bytes of GPU memory: of one rank of the actor and of one GPU of a vLLM server, item by item.

Exact are parameters, gradients and optimizer, but for the padding of Megatron's buffers (at most 64 elements a parameter): a
test measures them on real ranks. What the layers keep for backward is in activations.py.
"""

from dataclasses import dataclass, fields

from a3po_megatron.config.actor import ActorConfig
from a3po_megatron.config.model_shape import ModelShape
from a3po_megatron.config.rollout import RolloutConfig
from a3po_megatron.estimate.activations import layer_bytes_per_token, stage_bytes_per_token
from a3po_megatron.estimate.parameters import (
    DTYPE_BYTES,
    STATE_BYTES,
    Split,
    embedding_parameters,
    layer_parameters,
    ranks_of_a_copy,
    stage_parameters,
)

GPU_CHUNK_TOKENS, WEIGHT_ROWS_AT_ONCE = 2048, 16384  # of actor/token_head.py; a test holds the two together
SERVER_BATCHED_TOKENS = 8192  # vLLM's own default of a server on an 80 GB GPU (vllm/engine/arg_utils.py)
# Assumptions, not measured: CUDA context, NCCL's buffers and what the allocator loses; of a server also CUDA graphs.
ACTOR_OVERHEAD_BYTES = 5e9
SERVER_OVERHEAD_BYTES = 4e9


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
    1910.02054). What is offloaded to host memory does not count.
    """
    held = stage_parameters(shape, actor, stage)
    width, state = DTYPE_BYTES[actor.dtype], STATE_BYTES[actor.dtype]
    on_gpu = 1 - actor.optimizer_offload_fraction if actor.optimizer_cpu_offload else 1
    dense_ranks, expert_ranks = ranks_of_a_copy(actor) if actor.distributed_optimizer else (1, 1)
    tokens = -(-actor.max_tokens_per_microbatch // actor.context_parallel)
    return ActorMemory(
        parameters=held.total * width,
        gradients=held.total * 4,
        optimizer=on_gpu * state * (held.dense / dense_ranks + held.expert / expert_ranks),
        activations=tokens * stage_bytes_per_token(shape, actor, stage),
        backward=tokens * layer_bytes_per_token(shape, actor).total,
        logprob_chunk=logprob_chunk_bytes(shape, actor, tokens) if stage == actor.pipeline_parallel - 1 else 0.0,
        overhead=ACTOR_OVERHEAD_BYTES,
    )


def largest_stage(shape: ModelShape, actor: ActorConfig) -> tuple[int, ActorMemory]:
    """Return the pipeline stage whose ranks need the most memory, and that memory."""
    stages = [(stage, actor_memory(shape, actor, stage)) for stage in range(actor.pipeline_parallel)]
    return max(stages, key=lambda found: found[1].total)


def logprob_chunk_bytes(shape: ModelShape, actor: ActorConfig, tokens: int) -> float:
    """Return what actor/token_head.py needs beside its inputs while a chunk is worked on.

    Logits, a float32 copy where they are not, and their gradient [chunk, v]; the gradient of the output weight [v, h] in float32;
    of a bfloat16 weight also as it is returned, and float32 products of some rows before they are added. Not what an entropy bonus
    takes: with plain kernels the chunk's probabilities in float32.
    """
    width = DTYPE_BYTES[actor.dtype]
    columns = shape.padded_vocab_size(actor.tensor_parallel) / actor.tensor_parallel
    chunk = min(actor.logprob_chunk_tokens or GPU_CHUNK_TOKENS, tokens)
    logits = 4 if actor.float32_head else width
    rows = chunk * columns * (logits + (0 if logits == 4 else 4) + width)
    if actor.dtype == "float32":
        return rows + 4 * embedding_parameters(shape, actor.tensor_parallel)
    products = 4 * min(WEIGHT_ROWS_AT_ONCE, columns) * shape.hidden_size
    return rows + products + (4 + width) * embedding_parameters(shape, actor.tensor_parallel)


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
