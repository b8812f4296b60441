"""What a run needs on a cluster, put together: nodes, memory of each side, tokens, time; and whether it fits."""

from dataclasses import dataclass, fields

from a3po_megatron.config.model_shape import ModelShape
from a3po_megatron.config.schema import TrainConfig
from a3po_megatron.errors import UserError
from a3po_megatron.estimate.flops import training_flops
from a3po_megatron.estimate.host import HostMemory, node_host_memory
from a3po_megatron.estimate.memory import ActorMemory, ServerMemory, largest_stage, server_memory
from a3po_megatron.estimate.parameters import active_parameters, model_parameters, stage_parameters
from a3po_megatron.estimate.step_time import Rates, StepTime, StepTokens, Workload, step_time, step_tokens

GB = 1e9
# What to change when an item of the actor is the largest of those that do not fit.
SPLIT_MODEL = "raise actor.tensor_parallel, actor.pipeline_parallel or, of experts, actor.expert_parallel"
ACTOR_HINTS = {
    "parameters": SPLIT_MODEL,
    "gradients": SPLIT_MODEL,
    "optimizer": "set actor.distributed_optimizer=true where it is not and raise actor.data_parallel, or "
    + SPLIT_MODEL,
    "activations": "lower actor.max_tokens_per_microbatch to no less than rollout.max_model_len, set "
    "actor.recompute_granularity=full, or raise actor.tensor_parallel (with actor.sequence_parallel=true) or "
    "actor.context_parallel",
    "backward": "lower actor.max_tokens_per_microbatch or raise actor.tensor_parallel",
    "logprob_chunk": "lower actor.logprob_chunk_tokens or raise actor.tensor_parallel",
    "overhead": "take GPUs of more memory",
}


@dataclass(frozen=True)
class Cluster:
    """Nodes of equal GPUs, as many as the job has."""

    nodes: int
    gpus_per_node: int
    gpu_bytes: float


@dataclass(frozen=True)
class RoleNodes:
    """Which part of the cluster each side takes."""

    actor_ranks: int
    actor_nodes: int
    rollout_nodes: int
    shared: bool  # both sides on one node
    servers: int  # over all nodes
    rollout_gpus: int


@dataclass(frozen=True)
class Plan:
    """Everything that `tools/plan_cluster.py` prints."""

    roles: RoleNodes
    parameters: int
    active_parameters: int  # of the layers, that a token is multiplied with
    parameters_of_rank: int  # of stage `stage`
    flops_per_token: float  # of training, forward and backward
    has_experts: bool
    stage: int  # the pipeline stage with the most memory
    actor: ActorMemory
    host: HostMemory  # of a node of the actor
    server: ServerMemory
    sequences_of_longest: int  # that fit a server's cache, each `rollout.max_model_len` long
    sequences_of_mean: int
    tokens: StepTokens
    time: StepTime


def make_plan(config: TrainConfig, shape: ModelShape, cluster: Cluster, work: Workload, rates: Rates) -> Plan:
    """Return the plan. Raises UserError when the roles do not fit the nodes, or a rank or server its GPU."""
    roles = nodes_of_roles(config, cluster)
    stage, actor = largest_stage(shape, config.actor)
    check_actor_fits(actor, stage, cluster.gpu_bytes)
    server = server_memory(shape, config.rollout, cluster.gpu_bytes)
    check_server_fits(config, server, cluster.gpu_bytes)
    return Plan(
        roles=roles,
        parameters=model_parameters(shape),
        active_parameters=active_parameters(shape),
        parameters_of_rank=stage_parameters(shape, config.actor, stage).total,
        flops_per_token=training_flops(shape, config.algorithm, config.actor, work.sequence_tokens / 2),
        has_experts=shape.num_experts > 0,
        stage=stage,
        actor=actor,
        host=node_host_memory(shape, config.actor, cluster.gpus_per_node),
        server=server,
        sequences_of_longest=server.kv_tokens // config.rollout.max_model_len,
        sequences_of_mean=int(server.kv_tokens / work.sequence_tokens),
        tokens=step_tokens(config, work),
        time=step_time(shape, config, server, roles.servers, work, rates),
    )


def nodes_of_roles(config: TrainConfig, cluster: Cluster) -> RoleNodes:
    """Give the actor whole nodes and the servers the rest; on a single node both share it. Raises UserError."""
    ranks, a_node = config.actor.world_size, cluster.gpus_per_node
    a_server_node = config.rollout.num_servers * config.rollout.tensor_parallel
    shared = cluster.nodes == 1
    if not shared and ranks % a_node:
        raise UserError(
            f"actor: its layout needs {ranks} GPUs, which are not whole nodes of {a_node} (--gpus-per-node); change "
            "actor.data_parallel, or plan for one node"
        )
    actor_nodes = 1 if shared else ranks // a_node
    rollout_nodes = 1 if shared else cluster.nodes - actor_nodes
    if rollout_nodes < 1:
        raise UserError(
            f"actor: its layout needs {ranks} GPUs on {actor_nodes} nodes, of {cluster.nodes} (--nodes), and leaves none for "
            "rollout; lower actor.data_parallel or take more nodes"
        )
    free = a_node - ranks if shared else a_node
    if a_server_node > free:
        raise UserError(
            f"rollout.num_servers={config.rollout.num_servers} x rollout.tensor_parallel={config.rollout.tensor_parallel} "
            f"need {a_server_node} GPUs a node, of which {max(free, 0)} are free for them; lower one of the two"
        )
    servers = rollout_nodes * config.rollout.num_servers
    return RoleNodes(ranks, actor_nodes, rollout_nodes, shared, servers, servers * config.rollout.tensor_parallel)


def check_actor_fits(memory: ActorMemory, stage: int, gpu_bytes: float) -> None:
    """Raise UserError, naming the largest item and what to change, when a rank needs more than a GPU has."""
    if memory.total <= gpu_bytes:
        return
    largest = max(fields(memory), key=lambda item: getattr(memory, item.name)).name
    raise UserError(
        f"actor: a rank of pipeline stage {stage} needs {memory.total / GB:.1f} GB, of {gpu_bytes / GB:.0f} "
        f"(--gpu-memory-gb); most of it {largest}, {getattr(memory, largest) / GB:.1f} GB: {ACTOR_HINTS[largest]}"
    )


def check_server_fits(config: TrainConfig, server: ServerMemory, gpu_bytes: float) -> None:
    """Raise UserError when a server's share of a GPU does not hold its weights, or no longest sequence beside them."""
    rollout = config.rollout
    share = rollout.gpu_memory_utilization * gpu_bytes
    fixed = server.weights + server.working + server.overhead
    if server.kv_tokens < rollout.max_model_len or fixed + server.kv_cache > share * (1 + 1e-9):
        raise UserError(
            f"rollout: weights and work of a server take {fixed / GB:.1f} of its {share / GB:.1f} GB of each GPU, and the cache "
            f"of {server.kv_cache / GB:.1f} GB holds {server.kv_tokens} tokens, at least rollout.max_model_len="
            f"{rollout.max_model_len} are needed; raise rollout.tensor_parallel, or correct rollout.kv_cache_bytes"
        )
