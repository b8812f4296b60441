"""Which nodes of a cluster do what: the split of a job, checked against the run's settings, and as a table for people.

actor nodes    first ... : ranks of the actor; beside the first one the controller
rollout nodes  ... last  : a supervisor each, with its vLLM servers
one node for both        : the actor has the first GPUs, the servers the next ones
"""

from dataclasses import dataclass

from a3po_megatron.config.model_shape import ModelShape
from a3po_megatron.config.schema import TrainConfig
from a3po_megatron.errors import UserError
from a3po_megatron.estimate.memory import largest_stage, server_memory
from a3po_megatron.estimate.plan import GB, check_actor_fits, check_server_fits

PORTS_BESIDE_SERVERS = 2  # on the first actor node: the controller's, and the one where the ranks meet


@dataclass(frozen=True)
class JobNodes:
    """The nodes of a job and how they are used. A name may stand in both lists: then that node is shared."""

    actor_nodes: tuple[str, ...]
    rollout_nodes: tuple[str, ...]
    actor_ranks_per_node: int
    gpus_per_node: int  # 0: a cluster without GPUs

    @property
    def nodes(self) -> tuple[str, ...]:
        """Every node once, in order."""
        return tuple(dict.fromkeys((*self.actor_nodes, *self.rollout_nodes)))

    @property
    def is_shared(self) -> bool:
        """Whether some node has both ranks and servers."""
        return bool(set(self.actor_nodes) & set(self.rollout_nodes))


def check_cluster(cluster: JobNodes, config: TrainConfig) -> None:
    """Raise UserError when the split does not add up. Names the variables of the job scripts, which users set."""
    actor, rollout = config.actor, config.rollout
    if not cluster.actor_nodes or not cluster.rollout_nodes:
        raise UserError("ACTOR_NODES and ROLLOUT_NODES: each needs at least one node")
    ranks = len(cluster.actor_nodes) * cluster.actor_ranks_per_node
    if ranks != actor.world_size:
        replica = actor.world_size // actor.data_parallel
        hint = f"set DP={ranks // replica}" if ranks % replica == 0 else f"TP x PP x CP = {replica} must divide {ranks}"
        raise UserError(
            f"ACTOR_NODES={len(cluster.actor_nodes)} x ACTOR_RANKS_PER_NODE={cluster.actor_ranks_per_node} make {ranks} ranks, "
            f"but TP={actor.tensor_parallel} x PP={actor.pipeline_parallel} x CP={actor.context_parallel} x "
            f"DP={actor.data_parallel} need {actor.world_size}; {hint}"
        )
    for section, device in (("actor", actor.device), ("rollout", rollout.device)):
        if device == "cuda" and not cluster.gpus_per_node:
            raise UserError(f"GPUS_PER_NODE=0, but {section}.device=cuda; use GPUs, or {section}.device=cpu")
        if device == "cpu" and cluster.gpus_per_node:
            raise UserError(f"GPUS_PER_NODE={cluster.gpus_per_node}, but {section}.device=cpu; set GPUS_PER_NODE=0")
    if cluster.gpus_per_node:
        _check_gpus(cluster, config)


def _check_gpus(cluster: JobNodes, config: TrainConfig) -> None:
    ranks, rollout, gpus = cluster.actor_ranks_per_node, config.rollout, cluster.gpus_per_node
    servers = rollout.num_servers * rollout.tensor_parallel
    needed = ranks + servers if cluster.is_shared else max(ranks, servers)
    if needed > gpus:
        between = "+" if cluster.is_shared else "and"
        raise UserError(
            f"ACTOR_RANKS_PER_NODE={ranks} {between} REPLICAS_PER_NODE={rollout.num_servers} x ROLLOUT_TP="
            f"{rollout.tensor_parallel} need {needed} GPUs of a node, but GPUS_PER_NODE={gpus}"
        )


def num_ports(config: TrainConfig) -> int:
    """Return how many neighbouring ports a job needs on its nodes."""
    return PORTS_BESIDE_SERVERS + config.rollout.num_servers


def memory_of(config: TrainConfig, shape: ModelShape, gpu_bytes: float) -> list[tuple[str, str]]:
    """Return (what, figure) of the memory of a GPU, as `tools/plan_cluster.py` computes it. Raises UserError if it is too small."""
    stage, actor = largest_stage(shape, config.actor)
    server = server_memory(shape, config.rollout, gpu_bytes)
    check_actor_fits(actor, stage, gpu_bytes)
    check_server_fits(config, server, gpu_bytes)
    longest = server.kv_tokens // config.rollout.max_model_len
    return [
        ("memory of an actor GPU", f"{actor.total / GB:.1f} of {gpu_bytes / GB:.0f} GB"),
        (
            "memory of a rollout GPU",
            f"weights {server.weights / GB:.1f} GB, cache {server.kv_cache / GB:.1f} GB for {longest} longest sequences",
        ),
    ]


def describe(cluster: JobNodes, config: TrainConfig) -> list[tuple[str, str]]:
    """Return (what, figure) of the job's plan, for a table."""
    actor, rollout, controller = config.actor, config.rollout, config.controller
    replicas = len(cluster.rollout_nodes) * rollout.num_servers
    return [
        ("actor nodes", " ".join(cluster.actor_nodes)),
        (
            "actor",
            f"{actor.world_size} ranks: tensor {actor.tensor_parallel} x pipeline {actor.pipeline_parallel} x context "
            f"{actor.context_parallel} x data {actor.data_parallel}, expert {actor.expert_parallel}; {actor.dtype}",
        ),
        ("rollout nodes", " ".join(cluster.rollout_nodes)),
        (
            "rollout",
            f"{replicas} vLLM servers of tensor parallel {rollout.tensor_parallel}, {rollout.num_servers} a node",
        ),
        ("controller", f"beside the actor on {cluster.actor_nodes[0]}, schedule {controller.schedule}"),
        ("GPUs a node", str(cluster.gpus_per_node or "none")),
        ("model", config.model.path),
        ("method", f"{config.algorithm.method}, staleness up to {controller.max_staleness} versions"),
        (
            "batch",
            f"{controller.prompts_per_batch} problems x {controller.samples_per_prompt} samples, up to "
            f"{rollout.max_response_tokens} tokens each",
        ),
        ("steps", str(config.run.num_steps)),
        ("run folder", config.run.dir),
    ]
