"""Time by hand numbers, what does not fit, and the tool; the shipped configurations and the docs state what it prints."""

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from a3po_megatron.config.actor import ActorConfig
from a3po_megatron.config.algorithm import AlgorithmConfig
from a3po_megatron.config.load import load_config
from a3po_megatron.config.schema import TrainConfig
from a3po_megatron.errors import UserError
from a3po_megatron.estimate import report
from a3po_megatron.estimate.flops import forward_flops, head_flops, model_flops, recomputed_flops, training_flops
from a3po_megatron.estimate.memory import server_memory
from a3po_megatron.estimate.plan import Cluster, Plan, make_plan
from a3po_megatron.estimate.step_time import Rates, Workload, assumed_workload, step_time, step_tokens
from tests.unit.config.test_check import CLUSTER, QWEN3_8B

ROOT = Path(__file__).parents[3]
NODES = {"qwen2_5_1p5b_gsm8k": 1, "qwen3_32b_dapo": 8}  # the others take 4


def cluster(name: str, gpu_gb: float = 80) -> Cluster:
    return Cluster(NODES.get(name, 4), 8, gpu_gb * 1e9)


def shipped(name: str, *overrides: str) -> TrainConfig:
    return load_config(TrainConfig, ROOT / f"configs/{name}.yaml", overrides)


def plan_of(name: str, *overrides: str, gpu_gb: float = 80) -> Plan:
    config = shipped(name, *overrides)
    return make_plan(config, CLUSTER[name], cluster(name, gpu_gb), assumed_workload(config), Rates())


@pytest.mark.parametrize("name", CLUSTER)
def test_a_shipped_configuration_fits_with_room_and_states_its_plan(name: str) -> None:
    config, plan = shipped(name), plan_of(name)
    assert plan.actor.total < 0.85 * 80e9
    assert plan.sequences_of_longest >= 8
    text = (ROOT / f"configs/{name}.yaml").read_text()
    assert report.comment(config, plan, cluster(name), assumed_workload(config), Rates()) in text
    assert f"configs/{name}.yaml --nodes {cluster(name).nodes} " in text


@pytest.mark.parametrize("name", CLUSTER)
def test_the_docs_state_the_plan_of_each_configuration(name: str) -> None:
    text = (ROOT / "docs/parallelism.md").read_text()
    assert report.ROW_HEAD in text
    assert report.row(name, shipped(name), plan_of(name), cluster(name)) in text


def test_flops_of_a_token_by_hand() -> None:
    """Qwen3-8B: layers of 6.946 billion parameters, 151936 x 4096 logits, 36 layers of 32 heads of 128."""
    attention = 4 * 36 * 32 * 128 * 1000
    assert forward_flops(QWEN3_8B, 1000) == pytest.approx(2 * 6.946e9 + 2 * 151936 * 4096 + attention, rel=1e-4)
    assert model_flops(QWEN3_8B, 0) == pytest.approx(6 * 7.568e9, rel=1e-3)


def test_extra_passes_cost_a_forward_each_and_the_logits_are_made_twice() -> None:
    forward, head = forward_flops(QWEN3_8B, 500), head_flops(QWEN3_8B)
    assert training_flops(QWEN3_8B, AlgorithmConfig(), ActorConfig(), 500) == 3 * forward + head
    recompute = AlgorithmConfig(method="recompute")
    assert training_flops(QWEN3_8B, recompute, ActorConfig(), 500) == 4 * forward + head
    reused = replace(recompute, reuse_first_forward=True, num_minibatches=4)
    assert training_flops(QWEN3_8B, reused, ActorConfig(), 500) == 3.75 * forward + head


def test_what_backward_computes_again_costs_its_forward_pass() -> None:
    forward, head = forward_flops(QWEN3_8B, 500), head_flops(QWEN3_8B)
    full = ActorConfig(recompute_granularity="full")
    assert recomputed_flops(QWEN3_8B, full, 500) == forward - head
    block = replace(
        full, recompute_method="block", recompute_num_layers=3, pipeline_parallel=2, virtual_pipeline_parallel=3
    )
    assert recomputed_flops(QWEN3_8B, block, 500) == pytest.approx((forward - head) * 18 / 36)
    mlp = ActorConfig(recompute_granularity="selective", recompute_modules=["mlp"])
    assert recomputed_flops(QWEN3_8B, mlp, 500) == 2 * 36 * 3 * 4096 * 12288
    moe = replace(mlp, recompute_modules=["moe"])
    of_experts = 2 * 48 * 2048 * (8 * 3 * 768 + 128)
    assert recomputed_flops(CLUSTER["qwen3_30b_a3b_dapo"], moe, 500) == of_experts
    assert recomputed_flops(QWEN3_8B, replace(mlp, recompute_modules=["core_attn"]), 500) == 0


def test_the_time_of_a_step_by_hand() -> None:
    """256 samples of 100 + 400 tokens; one server of 64 sequences; rates that make every number round."""
    config = shipped(
        "qwen3_8b_dapo",
        "controller.prompts_per_batch=16",
        "controller.max_concurrent_groups=4",
        "rollout.num_servers=1",
    )
    work = Workload(100, 400, 2.0)
    rates = Rates(training_utilisation=0.5, decode_utilisation=0.5, decode_overhead_s=0.001, weight_bytes_per_s=1e9)
    tokens = step_tokens(config, work)
    assert (tokens.samples, tokens.trained, tokens.generated, tokens.microbatches) == (256, 128_000, 204_800, 1)
    server = server_memory(QWEN3_8B, config.rollout, 80e9)
    time = step_time(QWEN3_8B, config, server, 1, work, rates)
    assert time.sequences_per_server == 64
    iteration = (16.381e9 + 64 * 250 * 147456) / (3.35e12 * 0.5) + 0.001
    assert time.decode_iteration_s == pytest.approx(iteration, rel=1e-3)
    assert time.rollout_s == pytest.approx(204_800 / 64 * iteration, rel=1e-3)
    flops = 128_000 * training_flops(QWEN3_8B, config.algorithm, config.actor, 250)
    assert time.actor_s == pytest.approx(flops / (16 * 989e12 * 0.5))
    assert time.step_s == time.rollout_s + time.publication_s
    assert time.publication_s == pytest.approx(16.381 + time.rebuild_s, rel=1e-3)
    kept = replace(config, rollout=replace(config.rollout, kv_on_update="keep"))
    assert step_time(QWEN3_8B, kept, server, 1, work, rates).publication_s == pytest.approx(16.381, rel=1e-3)


def test_a_pipeline_is_idle_for_its_share() -> None:
    """Two stages and one microbatch: half of the time, so twice as long on twice the ranks."""
    work = Workload(10, 10, 1.0)
    one, two = (
        plan_of_layout(
            f"actor.tensor_parallel={tp}", f"actor.pipeline_parallel={pp}", "actor.data_parallel=2", work=work
        )
        for tp, pp in ((8, 1), (4, 2))
    )
    assert two.tokens.microbatches == 1
    assert two.time.actor_s == pytest.approx(2 * one.time.actor_s)


def plan_of_layout(*overrides: str, work: Workload) -> Plan:
    return make_plan(shipped("qwen3_8b_dapo", *overrides), QWEN3_8B, cluster("qwen3_8b_dapo"), work, Rates())


@pytest.mark.parametrize(
    ("overrides", "gpu_gb", "message"),
    [
        ((), 40, "stage 0 needs 54.2 GB, of 40 (--gpu-memory-gb); most of it activations, 28.1 GB: lower"),
        (
            ("actor.distributed_optimizer=false", "actor.overlap_param_gather=false"),
            60,
            "(with actor.sequence_parallel=true)",
        ),
        (
            ("actor.max_tokens_per_microbatch=1000", "actor.data_parallel=2", "actor.tensor_parallel=8"),
            9,
            "optimizer, 6.1",
        ),
        (("actor.data_parallel=3",), 80, "needs 12 GPUs, which are not whole nodes of 8"),
        (("actor.data_parallel=8",), 80, "needs 32 GPUs on 4 nodes, of 4 (--nodes), and leaves none for rollout"),
        (("rollout.num_servers=9",), 80, "need 9 GPUs a node, of which 8 are free"),
        (
            ("rollout.gpu_memory_utilization=0.25",),
            80,
            "holds 0 tokens, at least rollout.max_model_len=22528 are needed",
        ),
        (("rollout.kv_cache_bytes=64000000000",), 80, "correct rollout.kv_cache_bytes"),
    ],
)
def test_what_does_not_fit_is_named_with_what_to_change(
    overrides: tuple[str, ...], gpu_gb: float, message: str
) -> None:
    with pytest.raises(UserError) as caught:
        plan_of("qwen3_8b_dapo", *overrides, gpu_gb=gpu_gb)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def test_the_docs_state_the_host_memory_of_each_configuration() -> None:
    text = (ROOT / "docs/parallelism.md").read_text()
    hosts = [plan_of(name).host for name in CLUSTER]
    for needs in ([host.saving for host in hosts], [host.resuming for host in hosts]):
        assert ", ".join(f"{bytes_ / 1e9:.0f}" for bytes_ in needs) in text


def test_on_one_node_both_sides_share_its_gpus() -> None:
    assert plan_of("qwen2_5_1p5b_gsm8k").roles.shared
    with pytest.raises(UserError, match="need 4 GPUs a node, of which 0 are free"):
        plan_of("qwen2_5_1p5b_gsm8k", "actor.data_parallel=8")


HF_CONFIG = {
    "model_type": "qwen3", "num_hidden_layers": 36, "hidden_size": 4096, "intermediate_size": 12288, "num_attention_heads": 32,
    "num_key_value_heads": 8, "head_dim": 128, "vocab_size": 151936, "max_position_embeddings": 40960, "rms_norm_eps": 1e-6,
    "rope_theta": 1e6, "hidden_act": "silu",
}  # fmt: skip


def run_tool(tmp_path: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    (tmp_path / "Qwen3-8B.json").write_text(json.dumps(HF_CONFIG))  # a file of any name, not only config.json
    command = [
        sys.executable,
        str(ROOT / "tools/plan_cluster.py"),
        str(ROOT / "configs/qwen3_8b_dapo.yaml"),
        *arguments,
    ]
    command += ["--nodes", "4", "--hf-config", str(tmp_path / "Qwen3-8B.json")]
    return subprocess.run(command, capture_output=True, text=True, timeout=60)


def test_the_tool_prints_a_table_or_one_json_object(tmp_path: Path) -> None:
    run = run_tool(tmp_path, "rollout.num_servers=4", "--mean-response-tokens", "1000")
    assert run.returncode == 0, run.stderr
    assert "8 servers of TP1, 4 a node" in run.stdout
    assert "GB of host memory that checkpoints take on a node of the actor" in run.stdout
    assert "2048 samples of 160 + 1000 tokens on average" in run.stdout
    found = json.loads(run_tool(tmp_path, "--json").stdout)
    plan = plan_of("qwen3_8b_dapo")
    assert (found["parameters"], found["actor_total_bytes"], found["step_s"]) == (
        plan.parameters,
        plan.actor.total,
        plan.time.step_s,
    )


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--gpu-memory-gb", "40"], "error: actor: a rank of pipeline stage 0 needs 54.2 GB"),
        (["actor.tensor_parallel=3"], "error: actor.tensor_parallel=3 does not divide the model's 32 query heads"),
        (["--peak-flops", "0"], "error: --peak-flops=0.0: a number above 0"),
    ],
)
def test_the_tool_ends_with_2_and_one_line(tmp_path: Path, arguments: list[str], message: str) -> None:
    run = run_tool(tmp_path, *arguments)
    assert (run.returncode, run.stdout) == (2, "")
    assert run.stderr.startswith(message)
    assert run.stderr.count("\n") == 1
