"""The settings of the Megatron-core actor and its optimizer, `actor.*` and `optimizer.*`. Imports no torch."""

from dataclasses import dataclass, field
from typing import Literal


@dataclass(frozen=True)
class ActorConfig:
    """The Megatron-core actor: device, layout, microbatches."""

    device: Literal["auto", "cpu", "cuda"] = "auto"  # auto: cuda where torch finds a GPU, else cpu
    dtype: Literal["float32", "bfloat16"] = "float32"  # of the parameters; bfloat16 keeps float32 main parameters
    tensor_parallel: int = 1
    pipeline_parallel: int = 1
    virtual_pipeline_parallel: int = 1  # model chunks a pipeline stage; above 1 the schedule is interleaved
    # of a pipeline whose stages differ, all chunks of the stage together; the others share the rest evenly. 0: as the others
    num_layers_in_first_pipeline_stage: int = 0
    num_layers_in_last_pipeline_stage: int = 0
    # ranks that share each sequence, two chunks of it each; parameters are the same on all of them
    context_parallel: int = 1
    data_parallel: int = 1
    # Of a mixture of experts: ranks that share the experts, and those that share each expert. They are taken from the
    # tensor, context and data parallel ranks, and do not add to the world size.
    expert_parallel: int = 1
    expert_tensor_parallel: int = 1
    sequence_parallel: bool = False
    # auto: overlapped with virtual stages, else batched (what Megatron's two schedules each support)
    p2p_communication: Literal["auto", "batched", "overlapped"] = "auto"
    distributed_optimizer: bool = False
    overlap_grad_reduce: bool = False
    overlap_param_gather: bool = False
    optimizer_cpu_offload: bool = False  # optimizer state and its step in host memory; bfloat16 on a GPU only
    optimizer_offload_fraction: float = 1.0  # share of the parameters whose state is there
    # Activations that are computed again in the backward pass instead of kept. selective: those of `recompute_modules`;
    # full: those of whole layers
    recompute_granularity: Literal["none", "selective", "full"] = "none"
    # Of `selective`, which must name some. mlp of a dense model, moe of a mixture of experts; core_attn saves memory in the
    # local layers only: Transformer Engine's attention keeps no scores
    recompute_modules: list[str] = field(default_factory=list)
    # Of `full`. uniform: every layer, kept at each `recompute_num_layers`-th; block: the first `recompute_num_layers` of a chunk
    recompute_method: Literal["uniform", "block"] = "uniform"
    recompute_num_layers: int = 1
    # Of a mixture of experts: precision of the router's logits under bfloat16 (none: that of the parameters), and
    # what is added to the objective: coefficients of the load-balancing loss and of the z-loss. See docs/models.md
    moe_router_dtype: Literal["fp32", "fp64", "none"] = "fp32"
    moe_aux_loss_coeff: float = 0.0
    moe_z_loss_coeff: float = 0.0
    packed: bool = True  # True: sequences end to end (thd); False: one padded row a sequence (bshd)
    # padding counted, over all context-parallel ranks; a longer sequence is refused
    max_tokens_per_microbatch: int = 4096
    # Logits of bfloat16 hidden states and weights in float32, not rounded to bfloat16; `rollout.float32_head` must agree.
    float32_head: bool = False
    logprob_chunk_tokens: int = 0  # tokens whose logits exist at a time; 0: 384 on a CPU, 2048 on a GPU
    # Of the log-probabilities, once the logits are multiplied out. auto: compiled (torch.compile) on a GPU, plain on a CPU
    logprob_kernel: Literal["auto", "plain", "compiled"] = "auto"
    timeout_s: float = 300.0  # deadline of every collective
    host: str = "127.0.0.1"  # address of rank 0's node on the private interface over which weights leave it

    @property
    def world_size(self) -> int:
        """Ranks of the actor: tensor x context x pipeline x data."""
        return self.tensor_parallel * self.context_parallel * self.pipeline_parallel * self.data_parallel

    @property
    def token_multiple(self) -> int:
        """What a microbatch is padded to: each context-parallel rank holds two chunks, sequence parallelism splits them on."""
        chunks = 2 * self.context_parallel if self.context_parallel > 1 else 1
        return chunks * (self.tensor_parallel if self.sequence_parallel else 1)


@dataclass(frozen=True)
class OptimizerConfig:
    """AdamW through Megatron, and its learning rate schedule (in optimizer steps)."""

    lr: float = 1e-6
    min_lr: float = 0.0
    lr_decay: Literal["constant", "cosine", "linear"] = "constant"
    lr_warmup_steps: int = 0
    lr_decay_steps: int = 0  # step at which `min_lr` is reached; needed unless lr_decay is constant
    weight_decay: float = 0.0
    beta1: float = 0.9
    beta2: float = 0.95
    eps: float = 1e-8
    clip_grad: float = 1.0  # largest global gradient norm; 0 switches clipping off
