"""Parameter counts against the Hugging Face table of tensors and published numbers; shards add up to the whole."""

import math
from dataclasses import replace

import pytest

from a3po_megatron.actor.hf_mapping import hf_shapes
from a3po_megatron.config.actor import ActorConfig
from a3po_megatron.config.model_shape import ModelShape
from a3po_megatron.estimate.parameters import (
    Split,
    active_parameters,
    embedding_parameters,
    layer_parameters,
    layers_of_stage,
    model_parameters,
    stage_parameters,
)
from tests.unit.config.test_check import CLUSTER, MOE, QWEN, SMOLLM2

WITH_TABLE = [SMOLLM2, QWEN, replace(QWEN, tie_word_embeddings=True), MOE]
WITH_TABLE += CLUSTER.values()
PUBLISHED = {  # as counted on the models' pages
    "qwen2_5_1p5b_gsm8k": 1_543_714_304,
    "qwen3_8b_dapo": 8_190_735_360,
    "qwen3_14b_dapo": 14_768_307_200,
    "qwen3_32b_dapo": 32_762_123_264,
    "qwen3_30b_a3b_dapo": 30_532_122_624,
}


@pytest.mark.parametrize("shape", WITH_TABLE, ids=lambda shape: f"{shape.family}-{shape.hidden_size}")
def test_the_count_is_that_of_every_tensor_of_the_checkpoint(shape: ModelShape) -> None:
    assert model_parameters(shape) == sum(math.prod(size) for size in hf_shapes(shape).values())


@pytest.mark.parametrize("name", PUBLISHED)
def test_the_count_is_the_published_one(name: str) -> None:
    assert model_parameters(CLUSTER[name]) == PUBLISHED[name]


def test_of_a_mixture_a_token_meets_the_chosen_experts_only() -> None:
    """Published as 3.3 billion, embedding and output layer (0.62 billion) included."""
    shape = CLUSTER["qwen3_30b_a3b_dapo"]
    assert round((active_parameters(shape) + 2 * embedding_parameters(shape)) / 1e9, 2) == 3.35


def test_shards_of_a_layer_are_its_parts_and_what_each_rank_repeats() -> None:
    whole, shard = layer_parameters(QWEN), layer_parameters(QWEN, Split(tensor=4))
    repeated = 2 * QWEN.hidden_size + 2 * QWEN.head_dim  # norms
    assert 4 * (shard.dense - repeated) == whole.dense - repeated
    split = layer_parameters(MOE, Split(expert=3, expert_tensor=2))
    assert 6 * split.expert == layer_parameters(MOE).expert


def test_a_vllm_rank_beyond_the_key_value_heads_repeats_one() -> None:
    heads = QWEN.num_key_value_heads
    eight, four = (layer_parameters(QWEN, Split(tensor=tp)).dense for tp in (2 * heads, heads))
    a_head = 2 * QWEN.head_dim * QWEN.hidden_size  # key and value
    repeated = 2 * QWEN.hidden_size + 2 * QWEN.head_dim
    assert 2 * (eight - a_head - repeated) == four - a_head - repeated


def test_an_uneven_pipeline_has_the_layers_that_are_given_and_shares_the_rest() -> None:
    shape = replace(QWEN, num_layers=9)
    actor = ActorConfig(pipeline_parallel=4, num_layers_in_first_pipeline_stage=1, num_layers_in_last_pipeline_stage=2)
    assert [layers_of_stage(shape, actor, stage) for stage in range(4)] == [1, 3, 3, 2]


@pytest.mark.parametrize("tied", [False, True])
def test_stages_add_up_to_the_model_and_a_tied_output_layer_is_a_second_copy(tied: bool) -> None:
    shape = replace(QWEN, tie_word_embeddings=tied)
    one = stage_parameters(shape, ActorConfig(), 0).total
    assert one == model_parameters(shape)
    stages = ActorConfig(pipeline_parallel=2)
    several = sum(stage_parameters(shape, stages, stage).total for stage in range(2))
    assert several == one + (embedding_parameters(shape) if tied else 0)
