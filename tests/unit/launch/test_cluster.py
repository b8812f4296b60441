"""The split of a job over nodes."""

from dataclasses import replace
from pathlib import Path

import pytest

from a3po_megatron.config.actor import ActorConfig
from a3po_megatron.config.rollout import RolloutConfig
from a3po_megatron.config.schema import TrainConfig
from a3po_megatron.errors import UserError
from a3po_megatron.launch.cluster import PORTS_BESIDE_SERVERS, JobNodes, check_cluster, num_ports
from a3po_megatron.launch.ranks import Nodes

FOUR = JobNodes(("n1", "n2"), ("n3", "n4"), actor_ranks_per_node=8, gpus_per_node=8)
SHARED = JobNodes(("n1",), ("n1",), actor_ranks_per_node=4, gpus_per_node=8)


def settings(ranks: dict[str, int], servers: int, tensor_parallel: int = 1, device: str = "cuda") -> TrainConfig:
    actor = ActorConfig(device=device, **ranks)
    return TrainConfig(
        actor=actor, rollout=RolloutConfig(device=device, num_servers=servers, tensor_parallel=tensor_parallel)
    )


def test_a_split_that_adds_up_passes() -> None:
    check_cluster(FOUR, settings({"tensor_parallel": 4, "data_parallel": 4}, servers=4, tensor_parallel=2))
    check_cluster(SHARED, settings({"data_parallel": 4}, servers=4))
    check_cluster(replace(FOUR, gpus_per_node=0), settings({"data_parallel": 16}, servers=9, device="cpu"))


@pytest.mark.parametrize(
    ("cluster", "config", "says"),
    [
        (FOUR, settings({"tensor_parallel": 4}, 8), "make 16 ranks, but TP=4 x PP=1 x CP=1 x DP=1 need 4; set DP=4"),
        (FOUR, settings({"tensor_parallel": 3}, 8), "TP x PP x CP = 3 must divide 16"),
        (FOUR, settings({"data_parallel": 16}, 3, 4), "REPLICAS_PER_NODE=3 x ROLLOUT_TP=4 need 12 GPUs of a node"),
        (
            SHARED,
            settings({"data_parallel": 4}, 5),
            "ACTOR_RANKS_PER_NODE=4 + REPLICAS_PER_NODE=5 x ROLLOUT_TP=1 need 9 GPUs",
        ),
        (replace(FOUR, gpus_per_node=0), settings({"data_parallel": 16}, 1), "GPUS_PER_NODE=0, but actor.device=cuda"),
        (FOUR, settings({"data_parallel": 16}, 1, device="cpu"), "GPUS_PER_NODE=8, but actor.device=cpu"),
        (replace(FOUR, rollout_nodes=()), settings({"data_parallel": 16}, 1), "each needs at least one node"),
    ],
)
def test_a_split_that_does_not_add_up_is_one_line(cluster: JobNodes, config: TrainConfig, says: str) -> None:
    with pytest.raises(UserError) as error:
        check_cluster(cluster, config)
    assert says in str(error.value)
    assert "\n" not in str(error.value)


def test_a_job_needs_a_port_a_server_and_two_more() -> None:
    assert num_ports(settings({}, servers=8)) == 10


def test_shared_nodes_count_once() -> None:
    assert FOUR.nodes == ("n1", "n2", "n3", "n4")
    assert SHARED.nodes == ("n1",)


@pytest.mark.parametrize(
    ("nodes", "says"),
    [
        (Nodes(3, 0, "n1:1"), "--nodes 3 does not divide the 4 ranks"),
        (Nodes(2, 2, "n1:1"), "--node-rank 2: the 2 nodes are 0 to 1"),
        (Nodes(2, 0), "--master (empty): with --nodes above 1, name host:port"),
        (Nodes(2, 0, "n1"), "--master n1: with --nodes above 1, name host:port"),
    ],
)
def test_ranks_over_nodes_are_checked(nodes: Nodes, says: str) -> None:
    with pytest.raises(UserError, match=says.replace("(", r"\(").replace(")", r"\)")):
        nodes.check(4)


def test_the_job_scripts_give_the_servers_the_ports_behind_those_that_are_counted_beside_them() -> None:
    library = (Path(__file__).parents[3] / "slurm" / "lib.sh").read_text()
    assert f"rollout.base_port=$((PORT + {PORTS_BESIDE_SERVERS}))" in library
