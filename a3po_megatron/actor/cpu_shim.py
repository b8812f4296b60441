"""Lets megatron-core run on CPU ranks over gloo: redirects the calls that assume a GPU, and nothing else.

megatron-core has no CPU path upstream. `install` must run before any megatron model or optimizer is built, and refuses
another version than the one that this list was made for. Every redirected call is named with the reason it is made.
"""

import contextlib
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.tensor_parallel import mappings
from megatron.core.tensor_parallel import random as megatron_random
from megatron.core.transformer.moe import moe_utils, token_dispatcher
from torch.overrides import TorchFunctionMode

from a3po_megatron.actor.megatron_version import require_megatron_version

CPU = torch.device("cpu")
# Optimizers compare `Tensor.type()` with these strings to sort parameters by precision.
CUDA_TYPE_STRINGS = {
    torch.float32: "torch.cuda.FloatTensor",
    torch.bfloat16: "torch.cuda.BFloat16Tensor",
    torch.float16: "torch.cuda.HalfTensor",
}
_installed: list[TorchFunctionMode] = []


def install() -> None:
    """Redirect the calls. Idempotent. Raises RuntimeError for another megatron-core version."""
    if _installed:
        return
    require_megatron_version(__name__)
    _redirect_torch_cuda()
    _redirect_random_state()
    _redirect_moe_dispatcher()
    _redirect_uneven_gather()
    mode = _CudaArgumentsToCpu()
    mode.__enter__()
    _installed.append(mode)


def _redirect_torch_cuda() -> None:
    cuda: Any = torch.cuda
    cuda.current_device = lambda: CPU  # parameters and buffers are allocated on it
    cuda.set_device = _nothing  # initialisation
    cuda.synchronize = _nothing  # schedules, DDP and timers
    cuda.empty_cache = _nothing  # checkpoint loading
    cuda.current_stream = cuda.default_stream = lambda *args: _Stream()  # DDP overlap, p2p
    cuda.stream = lambda stream: contextlib.nullcontext()  # DDP overlap
    cuda.Stream, cuda.Event = _Stream, _Event  # DDP overlap, checkpoint writers
    cuda.manual_seed = torch.manual_seed  # model_parallel_cuda_manual_seed
    cuda.get_rng_state = lambda *args, **kwargs: torch.get_rng_state()  # activation recompute
    cuda.set_rng_state = lambda state, *args, **kwargs: torch.set_rng_state(state)  # activation recompute
    cuda.get_device_capability = lambda *args: (0, 0)  # feature tests
    cuda.nvtx.range_push = cuda.nvtx.range_pop = _nothing  # profiling ranges


def _redirect_random_state() -> None:
    """The tensor-parallel RNG tracker switches between CUDA generator states; here between CPU ones."""

    def get_state(device: Any = None, clone: bool = False, graph_safe: bool = False) -> torch.Tensor:
        return torch.get_rng_state()

    def set_state(new_state: torch.Tensor, device: Any = None, graph_safe: bool = False) -> None:
        torch.set_rng_state(new_state)

    megatron_random._get_cuda_rng_state = get_state
    megatron_random._set_cuda_rng_state = set_state


def _redirect_moe_dispatcher() -> None:
    """The MoE dispatcher turns split sizes into numpy only where they are CUDA tensors."""

    def maybe_move_tensor_to_cpu(tensor: Any, as_numpy: bool = False, record_stream: bool = False) -> Any:
        return tensor.numpy() if torch.is_tensor(tensor) and as_numpy else tensor

    token_dispatcher.maybe_move_tensor_to_cpu = maybe_move_tensor_to_cpu
    moe_utils.maybe_move_tensor_to_cpu = maybe_move_tensor_to_cpu


def _redirect_uneven_gather() -> None:
    """Shards of an expert gather unequal numbers of tokens, which gloo refuses: here each part is added in its place."""
    gather, scatter = mappings._gather_along_first_dim, mappings._reduce_scatter_along_first_dim

    def gather_uneven(part: Any, group: Any, sizes: list[int] | None = None, use_global_buffer: bool = False) -> Any:
        if sizes is None or group.size() == 1:
            return gather(part, group, sizes, use_global_buffer)
        parts = [part.new_zeros((size, *part.shape[1:])) for size in sizes]
        parts[group.rank()] = part
        whole = torch.cat(parts)
        dist.all_reduce(whole, group=group)
        return whole

    def scatter_uneven(whole: Any, group: Any, sizes: list[int] | None = None, use_global_buffer: bool = False) -> Any:
        if sizes is None or group.size() == 1:
            return scatter(whole, group, sizes, use_global_buffer)
        total = whole.clone()
        dist.all_reduce(total, group=group)
        return total.split(sizes)[group.rank()]

    mappings._gather_along_first_dim = gather_uneven
    mappings._reduce_scatter_along_first_dim = scatter_uneven


class _CudaArgumentsToCpu(TorchFunctionMode):
    """Literal `device='cuda'`, `pin_memory=True`, `Tensor.cuda()` and the type strings of optimizers."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if _is_cuda(kwargs.get("device")):
            kwargs = {**kwargs, "device": CPU}
        if kwargs.get("pin_memory"):
            kwargs = {**kwargs, "pin_memory": False}
        if func is torch.Tensor.cuda:
            return args[0]
        if func is torch.Tensor.type and len(args) == 1 and not kwargs and args[0].dtype in CUDA_TYPE_STRINGS:
            return CUDA_TYPE_STRINGS[args[0].dtype]
        return func(*args, **kwargs)


class _Stream:
    """A stream on which everything has already happened."""

    def __init__(self, *args: Any, **kwargs: Any) -> None: ...

    wait_stream = wait_event = synchronize = lambda self, *args: None

    def record_event(self, *args: Any) -> "_Event":
        return _Event()

    def query(self) -> bool:
        return True


class _Event:
    """An event that has already happened."""

    def __init__(self, *args: Any, **kwargs: Any) -> None: ...

    record = wait = synchronize = lambda self, *args: None

    def query(self) -> bool:
        return True

    def elapsed_time(self, other: Any) -> float:
        return 0.0


def _is_cuda(device: Any) -> bool:
    if isinstance(device, torch.device):
        return device.type == "cuda"
    return isinstance(device, str) and device.startswith("cuda")


def _nothing(*args: Any, **kwargs: Any) -> None:
    """Stand in for a call that has nothing to do on a CPU."""
