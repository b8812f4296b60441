"""The device of the actor: CUDA with NCCL, or CPU with gloo. The only place, with the shim, that knows which."""

import logging
import os
from datetime import timedelta

import torch
import torch.distributed as dist

from a3po_megatron.config.actor import ActorConfig
from a3po_megatron.errors import UserError

# They warn once a rank about what is chosen on purpose here: no CUDA, GPTModel, the synchronous save.
NOISY_LOGGERS = (
    "torch.utils.cpp_extension",
    "megatron.core.models.gpt.gpt_model",
    "megatron.core.dist_checkpointing.strategies.torch",
)


def start(actor: ActorConfig) -> torch.device:
    """Choose this rank's device, prepare megatron for it and join the default process group.

    Expects torchrun's environment (RANK, LOCAL_RANK, WORLD_SIZE, MASTER_ADDR, MASTER_PORT). Returns the device.
    Raises UserError when the device is not there or the number of ranks is not the layout's.
    """
    device = choose_device(actor)
    world_size = int(os.environ["WORLD_SIZE"])
    if world_size != actor.world_size:
        raise UserError(
            f"{world_size} ranks were started, but actor.tensor_parallel={actor.tensor_parallel} x pipeline_parallel="
            f"{actor.pipeline_parallel} x context_parallel={actor.context_parallel} x data_parallel={actor.data_parallel} "
            f"needs {actor.world_size}"
        )
    prepare_megatron(device)
    if not dist.is_initialized():
        dist.init_process_group(backend_of(device), timeout=timedelta(seconds=actor.timeout_s))
    return device


def stop() -> None:
    """Leave the default process group."""
    dist.destroy_process_group()


def choose_device(actor: ActorConfig) -> torch.device:
    """Return this rank's device for `actor.device`. Raises UserError when a setting needs a GPU that is not there."""
    gpus = torch.cuda.device_count()
    if actor.device == "cpu" or (actor.device == "auto" and gpus == 0):
        if actor.optimizer_cpu_offload:
            raise UserError(
                "actor.optimizer_cpu_offload=true on a CPU rank: the optimizer is in host memory already, and megatron-core's "
                "offloading copies from a GPU; use false"
            )
        return torch.device("cpu")
    local_rank = int(os.environ.get("LOCAL_RANK", "0"))
    if local_rank >= gpus:
        raise UserError(
            f"actor.device={actor.device}: local rank {local_rank} has no GPU, torch finds {gpus} on this machine"
        )
    return torch.device("cuda", local_rank)


def prepare_megatron(device: torch.device) -> None:
    """Make megatron-core usable on `device`; must run before any megatron model or optimizer is built."""
    for name in NOISY_LOGGERS:
        logging.getLogger(name).setLevel(logging.ERROR)
    # Sequence parallelism relies on kernels starting in the order in which they were queued.
    os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "1")
    if device.type == "cuda":
        torch.cuda.set_device(device)
        torch.set_float32_matmul_precision("highest")  # some images' environment asks for TF32
    else:
        from a3po_megatron.actor import cpu_shim

        cpu_shim.install()
        # megatron decorates small functions (the router's, for one) with torch.compile, which needs a C++ compiler at run time
        # and does not bear the shim. The variable is read when dynamo is imported; the stance is for one that already is.
        os.environ.setdefault("TORCHDYNAMO_DISABLE", "1")
        torch.compiler.set_stance("force_eager")
    from a3po_megatron.actor import optimizer_checkpoint_fix

    optimizer_checkpoint_fix.install()


def backend_of(device: torch.device) -> str:
    """Return the process group backend; CUDA ranks also get gloo for tensors in host memory."""
    return "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
