"""The command line and the environment of a server, as far as they can be judged without starting one."""

import json
import socket

import pytest

from a3po_megatron.config.rollout import RolloutConfig
from a3po_megatron.errors import UserError
from a3po_megatron.rollout.server import choose_port
from a3po_megatron.rollout.server_args import server_command, server_environment


@pytest.fixture
def model(tmp_path) -> str:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "qwen3"}))
    return str(tmp_path)


def value_of(command: list[str], option: str) -> str:
    return command[command.index(option) + 1]


def test_the_server_is_private_and_reports_the_right_logprobs(model):
    command = server_command(RolloutConfig(), model, "cpu", 8123, seed=4)
    assert value_of(command, "--host") == "127.0.0.1"
    assert value_of(command, "--port") == "8123"
    assert value_of(command, "--logprobs-mode") == "processed_logprobs"
    assert value_of(command, "--middleware") == "a3po_megatron.rollout.middleware.RequireTokenOfRun"
    assert json.loads(value_of(command, "--weight-transfer-config")) == {"backend": "a3po_buckets"}
    assert "--trust-remote-code" not in command


def test_a_float32_head_is_asked_of_vllm(model):
    """vllm/config/model.py reads `head_dtype` from the model's configuration; LogitsProcessor multiplies in it."""
    command = server_command(RolloutConfig(dtype="bfloat16", float32_head=True), model, "cpu", 1, 0)
    assert json.loads(value_of(command, "--hf-overrides")) == {"head_dtype": "float32"}
    assert "--hf-overrides" not in server_command(RolloutConfig(dtype="bfloat16"), model, "cpu", 1, 0)


def test_the_token_travels_by_environment_only(model):
    config = RolloutConfig()
    assert "secret" not in " ".join(server_command(config, model, "cpu", 1, 0))
    assert server_environment(config, "secret", "cpu", base={})["A3PO_TOKEN"] == "secret"


def test_servers_of_a_gpu_node_share_no_gpu(model):
    config = RolloutConfig(tensor_parallel=2, kv_cache_bytes=0)
    first = server_environment(config, "s", "cuda", (0, 1), base={"CUDA_VISIBLE_DEVICES": "4,5,6,7"})
    second = server_environment(config, "s", "cuda", (2, 3), base={"CUDA_VISIBLE_DEVICES": "4,5,6,7"})
    assert (first["CUDA_VISIBLE_DEVICES"], second["CUDA_VISIBLE_DEVICES"]) == ("4,5", "6,7")
    assert "TORCH_COMPILE_DISABLE" not in first
    command = server_command(config, model, "cuda", 1, 0)
    assert "--kv-cache-memory-bytes" not in command
    assert value_of(command, "--gpu-memory-utilization") == "0.85"


@pytest.mark.parametrize("max_model_len", [16, 9000])
def test_a_cpu_server_never_reads_a_prompt_in_pieces(model, max_model_len):
    """vLLM 0.32 dies of a seeded request whose prompt is cut: a CPU's random generator cannot be rewound."""
    command = server_command(RolloutConfig(max_model_len=max_model_len), model, "cpu", 1, 0)
    assert "--no-enable-chunked-prefill" in command
    assert int(value_of(command, "--max-num-batched-tokens")) >= max_model_len
    assert "--no-enable-chunked-prefill" not in server_command(RolloutConfig(), model, "cuda", 1, 0)


@pytest.mark.parametrize(("workers", "executor"), [(1, "UniProcExecutor"), (2, "mp")])
def test_a_single_cpu_worker_lives_in_the_engines_process(model, workers, executor):
    """Given as a class: vllm/platforms/cpu.py turns the name "uni" into "mp", a process that imports vLLM once more."""
    command = server_command(RolloutConfig(tensor_parallel=workers), model, "cpu", 1, 0)
    assert value_of(command, "--distributed-executor-backend").rpartition(".")[2] == executor
    on_a_gpu = server_command(RolloutConfig(tensor_parallel=workers), model, "cuda", 1, 0)
    assert "--distributed-executor-backend" not in on_a_gpu  # vLLM's own choice


def test_a_folder_without_a_model_is_named(tmp_path):
    with pytest.raises(UserError, match=r"model.path=.*no config.json"):
        server_command(RolloutConfig(), str(tmp_path), "cpu", 1, 0)


def test_a_port_in_use_is_named_before_anything_starts():
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(UserError, match=rf"rollout.base_port={port}: .* cannot be used for server 0"):
            choose_port(RolloutConfig(base_port=port), 0)
    assert choose_port(RolloutConfig(), 0) > 0
