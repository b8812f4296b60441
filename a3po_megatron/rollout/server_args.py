"""RolloutConfig -> command line and environment of one real, unmodified vLLM server. Imports neither vllm nor torch."""

import json
import os
import sys
from collections.abc import Mapping
from pathlib import Path

import a3po_megatron
from a3po_megatron.config.rollout import RolloutConfig
from a3po_megatron.errors import UserError
from a3po_megatron.rollout.orphan_watch import SUPERVISOR_VARIABLE
from a3po_megatron.run_token import TOKEN_VARIABLE

MODEL_NAME = "policy"  # what requests call the served model
WEIGHT_BACKEND = "a3po_buckets"  # under which `weight_engine` registers itself
MIDDLEWARE = "a3po_megatron.rollout.middleware.RequireTokenOfRun"
CPU_BATCHED_TOKENS = 4096  # of one engine step, so that many short prompts are read at once
WORKER_EXTENSION = "a3po_megatron.rollout.weight_engine.WorkerExtension"
IN_ENGINE = "vllm.v1.executor.uniproc_executor.UniProcExecutor"  # the worker in the engine's own process


def server_command(config: RolloutConfig, model_path: str, device: str, port: int, seed: int) -> list[str]:
    """Return the command that serves the Hugging Face folder `model_path` on `config.host`:`port`.

    `device` is `cpu` or `cuda`. Raises UserError for a folder that holds no model.
    """
    if not (Path(model_path) / "config.json").is_file():
        raise UserError(f"model.path={model_path or '(empty)'}: no config.json there; name a Hugging Face model folder")
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server"]
    command += ["--model", model_path, "--served-model-name", MODEL_NAME, "--dtype", config.dtype, "--seed", str(seed)]
    command += ["--host", config.host, "--port", str(port)]
    command += ["--max-model-len", str(config.max_model_len), "--max-num-seqs", str(config.max_num_seqs)]
    command += ["--tensor-parallel-size", str(config.tensor_parallel)]
    # Token ids in, token ids out: the server needs no tokenizer, and no sampling defaults from the model's folder.
    command += ["--skip-tokenizer-init", "--generation-config", "vllm", "--enable-scale-out"]
    # The default reports log-probabilities before temperature: not those that the token was drawn with.
    command += ["--logprobs-mode", "processed_logprobs"]
    command += ["--middleware", MIDDLEWARE, "--worker-extension-cls", WORKER_EXTENSION]
    command += ["--weight-transfer-config", json.dumps({"backend": WEIGHT_BACKEND})]
    command += ["--disable-uvicorn-access-log"]
    command += ["--enable-prefix-caching" if config.prefix_caching else "--no-enable-prefix-caching"]
    if config.float32_head:  # vllm/config/model.py: head_dtype, for LogitsProcessor to multiply in
        command += ["--hf-overrides", json.dumps({"head_dtype": "float32"})]
    if config.enforce_eager:
        command += ["--enforce-eager"]
    if config.kv_cache_bytes:
        command += ["--kv-cache-memory-bytes", str(config.kv_cache_bytes)]
    elif device == "cpu":
        raise UserError("rollout.kv_cache_bytes=0 on a CPU: name a size in bytes, for example 67108864")
    if device == "cuda":
        command += ["--gpu-memory-utilization", str(config.gpu_memory_utilization)]
    else:
        command += _cpu_options(config)
    return command


def _cpu_options(config: RolloutConfig) -> list[str]:
    """Return the options of a server on a CPU."""
    # vLLM 0.32 rewinds a seeded request's generator when its prompt is read in pieces, which a CPU generator cannot:
    # its engine dies ("CPU Generator does not use offset"). So a prompt, or what is read again after new weights, is
    # always read whole, which needs room for the longest.
    tokens = max(CPU_BATCHED_TOKENS, config.max_model_len, config.max_num_seqs)
    options = ["--no-enable-chunked-prefill", "--max-num-batched-tokens", str(tokens)]
    # By its short name, vLLM 0.32 takes "mp" instead on a CPU: it binds OpenMP's threads in the environment of a worker's process.
    # `server_environment` binds none, so a single worker needs no process of its own, which would import everything once more.
    return [*options, "--distributed-executor-backend", "mp" if config.tensor_parallel > 1 else IN_ENGINE]


def server_environment(
    config: RolloutConfig, token: str, device: str, gpus: tuple[int, ...] = (), base: Mapping[str, str] = os.environ
) -> dict[str, str]:
    """Return the environment of a server: `base` plus what vLLM needs. The token travels here, never on a command line.

    `gpus` are the devices of this server among those that `base` shows; empty on a CPU.
    """
    environment = dict(base)
    package_root = str(Path(a3po_megatron.__file__).resolve().parent.parent)
    paths = [package_root, *environment.get("PYTHONPATH", "").split(os.pathsep)]
    environment |= {
        TOKEN_VARIABLE: token,
        SUPERVISOR_VARIABLE: str(os.getpid()),
        "PYTHONPATH": os.pathsep.join(dict.fromkeys(path for path in paths if path)),
        "VLLM_SERVER_DEV_MODE": "1",  # opens the routes that pause and take weights; MIDDLEWARE guards them
        "VLLM_PLUGINS": "",  # nothing else that happens to be installed runs inside the server
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_HOST_IP": config.host,
        "HF_HUB_OFFLINE": "1",
    }
    if device == "cpu":
        environment |= {
            "TORCH_COMPILE_DISABLE": "1",
            "OMP_NUM_THREADS": str(config.cpu_threads),
            # Left alone, every server binds itself to the same cores.
            "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        }
    else:
        visible = [name for name in environment.get("CUDA_VISIBLE_DEVICES", "").split(",") if name]
        environment["CUDA_VISIBLE_DEVICES"] = ",".join(visible[gpu] if visible else str(gpu) for gpu in gpus)
    return environment


def server_device(config: RolloutConfig) -> str:
    """Return `cpu` or `cuda` for this node, without importing torch. Raises UserError for a GPU that is not there."""
    has_gpu = Path("/dev/nvidiactl").exists()
    if config.device == "cuda" and not has_gpu:
        raise UserError("rollout.device=cuda: this node has no NVIDIA GPU; use rollout.device=cpu or auto")
    return "cuda" if has_gpu and config.device != "cpu" else "cpu"
