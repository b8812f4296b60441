"""How many parameters a model has, how many of them one rank of a layout holds, and the bytes of one. Counts are exact.

The tensors are those of actor/hf_mapping.py and actor/model.py: attention and MLP are split over tensor-parallel ranks, experts
over expert-parallel (and expert-tensor-parallel) ones, norms and routers are whole on each.
"""

from dataclasses import dataclass

from a3po_megatron.config.actor import ActorConfig
from a3po_megatron.config.model_shape import ModelShape

DTYPE_BYTES = {"float32": 4, "bfloat16": 2}
# Of the optimizer: Adam's moments, and of bfloat16 a float32 main parameter.
STATE_BYTES = {"float32": 8, "bfloat16": 12}


@dataclass(frozen=True)
class Parameters:
    """Elements. The two kinds are told apart because other ranks hold the same ones."""

    dense: int = 0  # the same on all data- and context-parallel ranks
    expert: int = 0  # the same on all ranks of a stage that are left after expert and expert-tensor parallelism

    def __add__(self, other: "Parameters") -> "Parameters":
        return Parameters(self.dense + other.dense, self.expert + other.expert)

    def times(self, count: int) -> "Parameters":
        """Return those of `count` such parts."""
        return Parameters(count * self.dense, count * self.expert)

    @property
    def total(self) -> int:
        """Both kinds."""
        return self.dense + self.expert


@dataclass(frozen=True)
class Split:
    """By what one layer is divided."""

    tensor: int = 1
    expert: int = 1
    expert_tensor: int = 1


def model_parameters(shape: ModelShape) -> int:
    """Return the number of parameters of the whole model; tied embeddings count once."""
    ends = embedding_parameters(shape) * (1 if shape.tie_word_embeddings else 2) + shape.hidden_size
    return ends + shape.num_layers * layer_parameters(shape).total


def active_parameters(shape: ModelShape) -> int:
    """Return how many parameters of the layers a token is multiplied with: of the experts, the chosen ones."""
    layer = layer_parameters(shape)
    chosen = layer.expert * shape.num_experts_per_tok // shape.num_experts if shape.num_experts else 0
    return shape.num_layers * (layer.dense + chosen)


def embedding_parameters(shape: ModelShape, tensor: int = 1) -> int:
    """Return the elements of one tensor-parallel rank's part of the embedding, or of the output layer."""
    return shape.padded_vocab_size(tensor) // tensor * shape.hidden_size


def layer_parameters(shape: ModelShape, split: Split | None = None) -> Parameters:
    """Return the elements of one layer on one rank; of the whole layer without `split`."""
    split = split or Split()
    hidden, tp = shape.hidden_size, split.tensor
    query, key_value = shape.num_attention_heads * shape.head_dim, shape.num_key_value_heads * shape.head_dim
    qkv = query // tp + 2 * (key_value // min(tp, shape.num_key_value_heads))  # vLLM repeats heads that do not split on
    dense = qkv * hidden + query // tp * hidden
    dense += qkv if shape.has_qkv_bias else 0
    dense += 2 * hidden + (2 * shape.head_dim if shape.has_qk_norm else 0)
    if not shape.num_experts:
        return Parameters(dense + 3 * hidden * shape.intermediate_size // tp)
    expert = 3 * hidden * shape.moe_intermediate_size // split.expert_tensor
    return Parameters(dense + shape.num_experts * hidden, shape.num_experts // split.expert * expert)


def layers_of_stage(shape: ModelShape, actor: ActorConfig, stage: int) -> int:
    """Return the layers of a pipeline stage, over its virtual stages."""
    given = (actor.num_layers_in_first_pipeline_stage, actor.num_layers_in_last_pipeline_stage)
    if stage == 0 and given[0]:
        return given[0]
    if stage == actor.pipeline_parallel - 1 and given[1]:
        return given[1]
    return (shape.num_layers - sum(given)) // (actor.pipeline_parallel - sum(map(bool, given)))


def stage_parameters(shape: ModelShape, actor: ActorConfig, stage: int) -> Parameters:
    """Return what one rank of pipeline stage `stage` holds. A tied output layer on another stage is a copy of its own."""
    split = Split(actor.tensor_parallel, actor.expert_parallel, actor.expert_tensor_parallel)
    embedding = embedding_parameters(shape, actor.tensor_parallel)
    first, last = stage == 0, stage == actor.pipeline_parallel - 1
    ends = embedding if first else 0
    if last:
        ends += shape.hidden_size + (0 if first and shape.tie_word_embeddings else embedding)
    return Parameters(ends) + layer_parameters(shape, split).times(layers_of_stage(shape, actor, stage))


def ranks_of_a_copy(actor: ActorConfig) -> tuple[int, int]:
    """Return how many ranks hold the same dense parameters, and how many the same experts."""
    stage_ranks = actor.world_size // actor.pipeline_parallel
    return stage_ranks // actor.tensor_parallel, stage_ranks // (actor.expert_parallel * actor.expert_tensor_parallel)
