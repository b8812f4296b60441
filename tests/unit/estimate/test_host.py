"""Host memory by hand. tests/distributed/test_memory.py measures what saving and loading take on real ranks."""

from dataclasses import replace

import pytest

from a3po_megatron.config.actor import ActorConfig
from a3po_megatron.estimate.host import node_host_memory, saving_bytes
from a3po_megatron.estimate.parameters import model_parameters, stage_parameters
from tests.unit.config.test_check import MOE, QWEN

OVERLAPPED = ActorConfig(dtype="bfloat16", distributed_optimizer=True, overlap_grad_reduce=True, data_parallel=4)


def test_the_first_rank_of_each_copy_gathers_it_twice_over() -> None:
    parameters = model_parameters(QWEN)
    assert [saving_bytes(QWEN, OVERLAPPED, rank) for rank in range(4)] == [24 * parameters, 0, 0, 0]
    whole = replace(OVERLAPPED, overlap_grad_reduce=False)  # one bucket: each rank copies its shards at once
    assert [saving_bytes(QWEN, whole, rank) for rank in range(4)] == [27 * parameters, *[3 * parameters] * 3]


def test_a_node_adds_up_its_ranks_and_the_neediest_counts() -> None:
    """Two stages of two ranks: on nodes of two one writes each; a node of four holds both stages."""
    actor = replace(OVERLAPPED, data_parallel=2, pipeline_parallel=2)
    first, last = (stage_parameters(QWEN, actor, stage).total for stage in range(2))
    assert node_host_memory(QWEN, actor, 2).saving == 24 * max(first, last)
    assert node_host_memory(QWEN, actor, 8).saving == 24 * (first + last)
    joined = QWEN.num_layers // 2 * 2 * QWEN.intermediate_size * QWEN.hidden_size
    assert node_host_memory(QWEN, actor, 2).resuming == 2 * (12 * max(first, last) + 14 * joined)


def test_every_expert_rank_writes_its_experts() -> None:
    actor = replace(OVERLAPPED, expert_parallel=2)
    held = stage_parameters(MOE, actor, 0)
    expected = [24 * held.total, 24 * held.expert, 0, 0]
    assert [saving_bytes(MOE, actor, rank) for rank in range(4)] == pytest.approx(expected)


def test_without_a_distributed_optimizer_a_copy_is_written_as_it_is() -> None:
    actor = ActorConfig(dtype="bfloat16", data_parallel=2)
    assert [saving_bytes(QWEN, actor, rank) for rank in range(2)] == [14 * model_parameters(QWEN), 0]


def test_an_offloaded_optimizer_is_there_all_the_time() -> None:
    actor = replace(OVERLAPPED, optimizer_cpu_offload=True, optimizer_offload_fraction=0.5)
    host = node_host_memory(QWEN, actor, 4)
    assert host.offloaded == 4 * 0.5 * 12 * model_parameters(QWEN) / 4
    assert host.total == host.offloaded + max(host.saving, host.resuming)
