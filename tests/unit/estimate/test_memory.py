"""Memory by hand numbers. The ranks of tests/distributed/test_estimate.py measure what can be measured without a GPU."""

from dataclasses import replace
from types import SimpleNamespace

import pytest
from megatron.core.pipeline_parallel.schedules import get_pp_rank_microbatches

from a3po_megatron.actor import token_head
from a3po_megatron.config.actor import ActorConfig
from a3po_megatron.config.rollout import RolloutConfig
from a3po_megatron.estimate import memory
from a3po_megatron.estimate.activations import (
    EXPERT_IMBALANCE,
    layer_bytes_per_token,
    microbatches_in_flight,
    stage_bytes_per_token,
)
from a3po_megatron.estimate.memory import actor_memory, largest_stage, logprob_chunk_bytes, server_memory
from a3po_megatron.estimate.parameters import layer_parameters, model_parameters
from tests.unit.config.test_check import CLUSTER, MOE, QWEN, QWEN3_8B

BF16 = ActorConfig(dtype="bfloat16")


def test_a_float32_rank_takes_16_bytes_a_parameter_and_a_bfloat16_one_18() -> None:
    for actor, each in ((ActorConfig(), 16), (BF16, 18)):
        found = actor_memory(QWEN, actor, 0)
        assert found.parameters + found.gradients + found.optimizer == each * model_parameters(QWEN)


def test_the_distributed_optimizer_is_spread_over_data_and_context_ranks_and_experts_over_theirs() -> None:
    actor = replace(BF16, distributed_optimizer=True, data_parallel=3, context_parallel=2)
    assert actor_memory(QWEN, actor, 0).optimizer == 12 * model_parameters(QWEN) / 6
    experts = replace(actor, expert_parallel=3)
    held = MOE.num_layers * layer_parameters(MOE).expert / 3
    dense = model_parameters(MOE) - 3 * held
    assert actor_memory(MOE, experts, 0).optimizer == pytest.approx(12 * (dense / 6 + held / 2))


def test_activations_of_a_dense_layer_by_hand() -> None:
    """Hidden 4096, 32 query and 8 key/value heads of 128, MLP 12288: 2 norms x 2, 3 x (4096 + 1024), 3 x 12288, 4 bytes a head."""
    whole = 2 * (4 * 4096 + 3 * 5120 + 3 * 12288) + 4 * 32
    assert layer_bytes_per_token(QWEN3_8B, BF16).total == whole
    tensor = replace(BF16, tensor_parallel=4)
    assert layer_bytes_per_token(QWEN3_8B, tensor).total == 2 * 4 * 4096 + (whole - 2 * 4 * 4096) / 4
    assert layer_bytes_per_token(QWEN3_8B, replace(tensor, sequence_parallel=True)).total == whole / 4


def test_activations_of_experts_count_every_choice_of_a_token() -> None:
    """The busiest of several ranks gets more than its share; one alone has them all."""
    one = replace(MOE, num_experts_per_tok=1)
    for actor, share in ((BF16, 1.0), (replace(BF16, expert_parallel=3), EXPERT_IMBALANCE)):
        more = layer_bytes_per_token(MOE, actor).total - layer_bytes_per_token(one, actor).total
        assert more == pytest.approx(2 * share * (MOE.hidden_size + 3 * MOE.moe_intermediate_size))


def test_the_first_stage_keeps_as_many_microbatches_as_there_are_stages() -> None:
    layer = layer_bytes_per_token(QWEN, BF16).total
    hidden = 2 * QWEN.hidden_size
    stages = replace(BF16, pipeline_parallel=4)
    assert stage_bytes_per_token(QWEN, stages, 0) == 4 * layer
    assert stage_bytes_per_token(QWEN, stages, 1) == 3 * layer
    assert stage_bytes_per_token(QWEN, stages, 3) == layer + 3 * hidden
    interleaved = replace(BF16, pipeline_parallel=2, virtual_pipeline_parallel=2)
    assert stage_bytes_per_token(QWEN, interleaved, 0) == 2.5 * 2 * layer
    assert largest_stage(QWEN, stages)[0] == 0


def test_recomputation_keeps_inputs_and_one_group_of_layers() -> None:
    layer, hidden = layer_bytes_per_token(QWEN, BF16), 2 * QWEN.hidden_size
    ends = 3 * hidden  # final norm and gathered hidden states: gone before anything is computed again
    full = replace(BF16, recompute_granularity="full")  # the input of a group is kept, and not made again
    assert stage_bytes_per_token(QWEN, full, 0) == 4 * hidden + layer.total - hidden
    groups = replace(full, recompute_num_layers=2)
    assert stage_bytes_per_token(QWEN, groups, 0) == 2 * hidden + 2 * layer.total - hidden
    block = replace(full, recompute_method="block", recompute_num_layers=3)
    assert stage_bytes_per_token(QWEN, block, 0) == 3 * hidden + 2 * layer.total - hidden
    mlp = replace(BF16, recompute_granularity="selective", recompute_modules=["mlp"])
    saved = layer.mlp + hidden
    assert stage_bytes_per_token(QWEN, mlp, 0) == 4 * (layer.total - saved) + max(saved, ends)
    moe, experts = replace(mlp, recompute_modules=["moe"]), layer_bytes_per_token(MOE, BF16)
    assert stage_bytes_per_token(MOE, moe, 0) == 4 * (experts.total - experts.mlp) + max(experts.mlp, ends)
    stages = replace(full, pipeline_parallel=2)  # two microbatches in flight, one group computed again at a time
    assert stage_bytes_per_token(QWEN, stages, 0) == 2 * 2 * hidden + layer.total - hidden


def test_local_layers_of_float32_by_hand() -> None:
    """Norms keep three tensors, attention six of the query's size and five of the key's, the MLP five, and cosines and sines."""
    whole = 4 * (6 * 4096 + 6 * 4096 + 5 * 1024 + 5 * 12288 + 4 * 128) + 4 * 32
    assert layer_bytes_per_token(QWEN3_8B, ActorConfig()).total == whole


def test_an_offloaded_optimizer_leaves_the_gpu() -> None:
    actor = replace(BF16, distributed_optimizer=True, optimizer_cpu_offload=True, optimizer_offload_fraction=0.75)
    assert actor_memory(QWEN, actor, 0).optimizer == 0.25 * 12 * model_parameters(QWEN)


def test_context_parallel_ranks_share_the_tokens_of_a_microbatch() -> None:
    one, two = (actor_memory(QWEN, replace(BF16, context_parallel=cp), 0).activations for cp in (1, 2))
    assert one == 2 * two


@pytest.mark.parametrize("vpp", [1, 2, 3, 4])
@pytest.mark.parametrize("pp", [2, 4, 8])
def test_what_is_in_flight_is_what_megatron_warms_up_with_and_one(pp: int, vpp: int) -> None:
    """Megatron counts chunks: v of them are one microbatch of a stage. 100 microbatches are more than any warm-up."""
    actor = replace(BF16, pipeline_parallel=pp, virtual_pipeline_parallel=vpp)
    for stage in range(pp):
        group = SimpleNamespace(size=lambda: pp, rank=lambda stage=stage: stage)
        place = SimpleNamespace(pp_group=group, virtual_pipeline_model_parallel_size=vpp if vpp > 1 else None)
        warmup = get_pp_rank_microbatches(100, vpp, pp, p2p_communicator=place)[2]
        assert microbatches_in_flight(actor, stage) == (warmup + 1) / vpp


def test_the_last_stage_of_an_interleaved_pipeline_by_hand() -> None:
    """Four stages of four chunks of one layer: 3 x 4 chunks to warm up and one, of 16 layers."""
    model = replace(QWEN, num_layers=16)
    actor = replace(BF16, pipeline_parallel=4, virtual_pipeline_parallel=4)
    ends = 3 * 2 * model.hidden_size
    assert stage_bytes_per_token(model, actor, 3) == 13 * layer_bytes_per_token(model, BF16).total + ends


def test_the_sizes_of_the_head_are_those_of_the_actor() -> None:
    assert memory.GPU_CHUNK_TOKENS == token_head.GPU_CHUNK_TOKENS
    assert memory.WEIGHT_ROWS_AT_ONCE == token_head.WEIGHT_ROWS_AT_ONCE


def test_the_logits_of_a_chunk_by_hand() -> None:
    weight = 151936 // 4 * 4096 * 6 + 16384 * 4096 * 4
    actor = replace(BF16, tensor_parallel=4)
    assert logprob_chunk_bytes(QWEN3_8B, actor, 22528) == 2048 * 151936 / 4 * 8 + weight
    exact = replace(actor, float32_head=True, logprob_chunk_tokens=100)
    assert logprob_chunk_bytes(QWEN3_8B, exact, 22528) == 100 * 151936 / 4 * 6 + weight
    small = replace(QWEN3_8B, vocab_size=1000)  # all rows at once
    assert logprob_chunk_bytes(small, BF16, 1) == 1000 * 8 + 1000 * 4096 * (6 + 4)
    assert logprob_chunk_bytes(small, ActorConfig(), 1) == 1000 * 8 + 1000 * 4096 * 4


def test_a_token_of_the_cache_by_hand_and_the_cache_is_what_the_share_leaves() -> None:
    rollout = RolloutConfig(dtype="bfloat16", kv_cache_bytes=0, gpu_memory_utilization=0.9)
    found = server_memory(QWEN3_8B, rollout, 80e9)
    assert found.kv_bytes_per_token == 2 * 36 * 8 * 128 * 2  # 147 kB, as measured of Qwen3-8B
    assert found.weights == 2 * model_parameters(QWEN3_8B)
    assert found.weights + found.working + found.overhead + found.kv_cache == pytest.approx(0.9 * 80e9)
    named = server_memory(QWEN3_8B, replace(rollout, kv_cache_bytes=1 << 30, tensor_parallel=2), 80e9)
    assert named.kv_tokens == (1 << 30) // (2 * 36 * 4 * 128 * 2)
    moe = CLUSTER["qwen3_30b_a3b_dapo"]  # of 4 key/value heads each of 8 GPUs holds one
    assert server_memory(moe, replace(rollout, tensor_parallel=8), 80e9).kv_bytes_per_token == 2 * 48 * 128 * 2
