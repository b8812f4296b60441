"""Which kernels are used where, and the line that says so."""

import sys
from importlib.machinery import ModuleSpec
from pathlib import Path

import pytest
import torch

from a3po_megatron.actor import device, kernels
from a3po_megatron.actor.kernels import choose_kernels
from a3po_megatron.config.actor import ActorConfig
from a3po_megatron.errors import UserError

CPU, CUDA = torch.device("cpu"), torch.device("cuda", 0)


@pytest.mark.parametrize("usable", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("where", [CPU, CUDA], ids=str)
def test_transformer_engine_is_used_for_bfloat16_on_a_gpu_where_megatron_has_it(
    where: torch.device, dtype: torch.dtype, usable: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Float32 stays float32: Transformer Engine would multiply it as TF32."""
    monkeypatch.setattr(kernels.megatron_engine, "HAVE_TE", usable)
    monkeypatch.setattr(kernels, "find_spec", lambda name: ModuleSpec(name, None) if usable else None)
    chosen = choose_kernels(where, dtype)
    engine = usable and where.type == "cuda" and dtype == torch.bfloat16
    assert (chosen.layers == "Transformer Engine") == chosen.fused == engine
    assert (chosen.attention == "Transformer Engine") == chosen.grouped_experts == engine


def test_a_transformer_engine_that_cannot_be_imported_is_named_and_not_passed_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in [name for name in sys.modules if name.partition(".")[0] == "transformer_engine"]:
        monkeypatch.delitem(sys.modules, name)
    package = tmp_path / "transformer_engine"
    package.mkdir()
    (package / "__init__.py").write_text("raise OSError('libcudnn.so.9: cannot open\\nshared object file')")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(kernels.megatron_engine, "HAVE_TE", False)
    with pytest.raises(UserError, match=r"cannot be used: OSError: libcudnn\.so\.9: cannot open shared object file;"):
        choose_kernels(CUDA, torch.bfloat16)
    assert choose_kernels(CUDA, torch.float32).layers == "local"


@pytest.mark.parametrize("name", kernels.ATTENTION_VARIABLES)
def test_a_choice_of_attention_that_megatron_asserts_against_is_one_line(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(name, "0")
    with pytest.raises(UserError, match=rf"{name}=0 in the environment: .*; unset it"):
        choose_kernels(CPU, torch.float32)
    monkeypatch.setenv(name, "1")
    choose_kernels(CPU, torch.float32)


def test_one_line_says_what_is_used() -> None:
    line = choose_kernels(CPU, torch.float32).describe()
    assert line.startswith("megatron-core 0.19.2 on cpu: layers local, attention torch, experts one by one, Adam ")
    assert "\n" not in line


def test_float32_is_not_multiplied_as_tf32_where_the_environment_asks_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "set_device", lambda where: None)
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high")
    try:
        device.prepare_megatron(CUDA)
        assert torch.get_float32_matmul_precision() == "highest"
    finally:
        torch.set_float32_matmul_precision(before)


def test_an_offloaded_optimizer_is_refused_where_there_is_no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    assert device.choose_device(ActorConfig()) == CPU
    with pytest.raises(UserError, match="optimizer_cpu_offload=true on a CPU rank"):
        device.choose_device(ActorConfig(optimizer_cpu_offload=True, distributed_optimizer=True))
