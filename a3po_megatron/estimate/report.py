"""A plan as text: a table for a terminal, the head comment of a configuration, a row of docs/parallelism.md."""

from collections.abc import Sequence
from dataclasses import fields

from a3po_megatron.config.actor import ActorConfig
from a3po_megatron.config.schema import TrainConfig
from a3po_megatron.estimate.parameters import DTYPE_BYTES, STATE_BYTES
from a3po_megatron.estimate.plan import GB, Cluster, Plan
from a3po_megatron.estimate.step_time import Rates, Workload

SERVER_ITEMS = ("weights", "working", "overhead", "kv_cache")
ROW_HEAD = (
    "| model, nodes | actor layout | GB a GPU: parameters, gradients, optimizer, activations, backward, logits, overhead = all | "
    "servers | GB: weights, KV | sequences: longest, mean | seconds: training, generation, publication, step |"
)


def layout(actor: ActorConfig) -> str:
    """Return the layout by the sizes that differ from 1."""
    sizes = {
        "TP": actor.tensor_parallel,
        "CP": actor.context_parallel,
        "PP": actor.pipeline_parallel,
        "VPP": actor.virtual_pipeline_parallel,
        "DP": actor.data_parallel,
        "EP": actor.expert_parallel,
        "ETP": actor.expert_tensor_parallel,
    }
    parts = [f"{name}{size}" for name, size in sizes.items() if size > 1]
    return " ".join([*parts, *(["SP"] if actor.sequence_parallel else [])]) or "TP1"


def table(config: TrainConfig, plan: Plan, cluster: Cluster, work: Workload) -> str:
    """Return the plan as lines for a reader."""
    actor, rollout, roles, server = config.actor, config.rollout, plan.roles, plan.server
    where = "share one node" if roles.shared else f"{roles.actor_nodes} nodes + {roles.rollout_nodes} nodes"
    lines = [
        f"model      {plan.parameters / 1e9:.3f} B parameters; in layers a token meets {plan.active_parameters / 1e9:.3f} B",
        f"nodes      actor {roles.actor_ranks} GPUs + rollout {roles.rollout_gpus} GPUs, {where}",
        f"actor      {layout(actor)}, {actor.max_tokens_per_microbatch} tokens a microbatch",
        f"rollout    {roles.servers} servers of TP{rollout.tensor_parallel}, {rollout.num_servers} a node",
        "",
        f"GB on a GPU of the actor (of {cluster.gpu_bytes / GB:.0f}), pipeline stage {plan.stage}",
        *_items(plan.actor, [item.name for item in fields(plan.actor)]),
        f"  {'total':<15}{plan.actor.total / GB:8.2f}",
        "",
        "GB of host memory that checkpoints take on a node of the actor",
        *_items(plan.host, [item.name for item in fields(plan.host)]),
        f"  {'needed':<15}{plan.host.total / GB:8.2f}",
        "",
        f"GB on a GPU of rollout (share {rollout.gpu_memory_utilization:g} of {cluster.gpu_bytes / GB:.0f})",
        *_items(server, SERVER_ITEMS),
        f"  {server.kv_bytes_per_token / 1e3:.1f} kB a token: {server.kv_tokens} tokens a server, "
        f"{plan.sequences_of_longest} sequences of {rollout.max_model_len} or {plan.sequences_of_mean} of the mean length",
        "",
        *_time_lines(config, plan, work),
    ]
    return "\n".join(lines)


def comment(config: TrainConfig, plan: Plan, cluster: Cluster, work: Workload, rates: Rates) -> str:
    """Return the plan with its arithmetic as the comment at the head of a configuration."""
    actor, rollout, server, tokens, time = config.actor, config.rollout, plan.server, plan.tokens, plan.time
    memory, a_token = plan.actor, plan.actor.activations / actor.max_tokens_per_microbatch
    trained, generated, flops = tokens.trained / 1e6, tokens.generated / 1e6, plan.flops_per_token / 1e9
    share = rates.expert_training_utilisation if plan.has_experts else rates.training_utilisation
    lines = [
        f"Actor GPU, {memory.total / GB:.1f} of {cluster.gpu_bytes / GB:.0f} GB ({layout(actor)}): parameters "
        f"{memory.parameters / GB:.1f} = {plan.parameters_of_rank / 1e9:.3f} B x {DTYPE_BYTES[actor.dtype]} bytes,",
        f"  gradients {memory.gradients / GB:.1f} (x 4), optimizer {memory.optimizer / GB:.1f} (x {STATE_BYTES[actor.dtype]}, over "
        f"the ranks of each copy), activations {memory.activations / GB:.1f} =",
        f"  {actor.max_tokens_per_microbatch} tokens x {a_token / 1e6:.2f} MB, backward of a layer {memory.backward / GB:.1f}, "
        f"logits chunk {memory.logprob_chunk / GB:.1f}, overhead {memory.overhead / GB:.1f}.",
        f"Rollout GPU, {rollout.gpu_memory_utilization:g} of {cluster.gpu_bytes / GB:.0f} GB: weights {server.weights / GB:.1f}, "
        f"working {server.working / GB:.1f}, overhead {server.overhead / GB:.1f}, KV cache {server.kv_cache / GB:.1f}; at",
        f"  {server.kv_bytes_per_token / 1e3:.1f} kB a token a server holds {plan.sequences_of_longest} sequences of "
        f"{rollout.max_model_len} tokens, or {plan.sequences_of_mean} of the mean {work.sequence_tokens:g}.",
        f"A batch of {tokens.samples} samples x ({work.prompt_tokens:g} + {work.response_tokens:g}) tokens on average (assumed): "
        f"{trained:.2f} M trained, {generated:.2f} M generated (x {work.generated_per_trained:g}).",
        f"Step {time.step_s:.1f} s = the longer of training {time.actor_s:.1f} s and generation {time.rollout_s:.1f} s, plus "
        f"publication {time.publication_s:.1f} s ({time.rebuild_s:.1f} s of it to",
        f"  read again what is in flight). Training: {trained:.2f} M x {flops:.1f} GFLOP / ({plan.roles.actor_ranks} GPUs x "
        f"{rates.peak_flops / 1e12:.0f} TFLOP/s x {share:g}), and the pipeline's idle share.",
        f"  Generation: {generated:.2f} M x {1e3 * time.decode_iteration_s:.1f} ms / ({plan.roles.servers} servers x "
        f"{time.sequences_per_server} sequences). Estimates: nothing of it has been measured on a GPU.",
    ]
    return "\n".join(f"# {line}" for line in lines)


def row(name: str, config: TrainConfig, plan: Plan, cluster: Cluster) -> str:
    """Return the plan as a row below `ROW_HEAD`."""
    roles, time, rollout = plan.roles, plan.time, config.rollout
    nodes = "1 shared" if roles.shared else f"{roles.actor_nodes} + {roles.rollout_nodes}"
    items = ", ".join(f"{getattr(plan.actor, item.name) / GB:.1f}" for item in fields(plan.actor))
    cells = [
        f"{name}, {nodes}",
        layout(config.actor),
        f"{items} = **{plan.actor.total / GB:.1f}**",
        f"{roles.servers} x TP{rollout.tensor_parallel}",
        f"{plan.server.weights / GB:.1f}, {plan.server.kv_cache / GB:.1f}",
        f"{plan.sequences_of_longest}, {plan.sequences_of_mean}",
        f"{time.actor_s:.1f}, {time.rollout_s:.1f}, {time.publication_s:.1f}, **{time.step_s:.1f}**",
    ]
    return f"| {' | '.join(cells)} |"


def _items(memory: object, names: Sequence[str]) -> list[str]:
    return [f"  {name:<15}{getattr(memory, name) / GB:8.2f}" for name in names]


def _time_lines(config: TrainConfig, plan: Plan, work: Workload) -> list[str]:
    tokens, time = plan.tokens, plan.time
    slower = "training" if time.actor_s >= time.rollout_s else "generation"
    return [
        f"a batch    {tokens.samples} samples of {work.prompt_tokens:g} + {work.response_tokens:g} tokens on average: "
        f"{tokens.trained / 1e6:.2f} M trained, {tokens.generated / 1e6:.2f} M generated (x {work.generated_per_trained:g})",
        f"           {config.algorithm.num_minibatches} optimizer steps of {tokens.microbatches} microbatches a rank",
        f"generation {time.sequences_per_server} sequences a server, a token of each in {1e3 * time.decode_iteration_s:.1f} ms",
        f"seconds    training {time.actor_s:.1f}, generation {time.rollout_s:.1f} (at once), publication "
        f"{time.publication_s:.1f} (to read again what is in flight takes {time.rebuild_s:.1f}): step {time.step_s:.1f}, "
        f"bounded by {slower}",
        f"           {config.run.num_steps} steps: {config.run.num_steps * time.step_s / 3600:.1f} hours, without evaluations",
    ]
