"""Which kernels are used where, and the line that says so."""

from importlib.machinery import ModuleSpec

import pytest
import torch

from a3po_megatron.actor import device, kernels
from a3po_megatron.actor.kernels import choose_kernels
from a3po_megatron.config.schema import ActorConfig
from a3po_megatron.errors import UserError

CPU, CUDA = torch.device("cpu"), torch.device("cuda", 0)


@pytest.mark.parametrize("installed", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("where", [CPU, CUDA], ids=str)
def test_transformer_engine_is_used_on_a_gpu_where_it_is_installed(
    where: torch.device, dtype: torch.dtype, installed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kernels, "find_spec", lambda name: ModuleSpec(name, None) if installed else None)
    chosen = choose_kernels(where, dtype)
    engine = installed and where.type == "cuda"
    assert (chosen.layers == "Transformer Engine") == chosen.fused == engine
    # its attention on packed sequences and its grouped linear take 16 bits only
    assert (chosen.attention == "Transformer Engine") == chosen.grouped_experts == (engine and dtype == torch.bfloat16)


def test_one_line_says_what_is_used() -> None:
    line = choose_kernels(CPU, torch.float32).describe()
    assert line.startswith("megatron-core 0.19.2 on cpu: layers local, attention torch, experts one by one, Adam ")
    assert "\n" not in line


def test_an_offloaded_optimizer_is_refused_where_there_is_no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    assert device.choose_device(ActorConfig()) == CPU
    with pytest.raises(UserError, match="optimizer_cpu_offload=true on a CPU rank"):
        device.choose_device(ActorConfig(optimizer_cpu_offload=True, distributed_optimizer=True))
