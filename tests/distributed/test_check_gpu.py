"""The GPU check's parity, on a CPU rank: a model that is right passes, one that is a little wrong does not."""

import importlib
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from safetensors.torch import load_file, save_file

TOOLS = Path(__file__).parents[2] / "tools"
Fault = Callable[
    [dict[str, Any], dict[str, torch.Tensor]], None
]  # done to config.json and tensors of the actor's folder
LAYER = "model.layers.1."


def norm_left_out(tensors: dict[str, torch.Tensor]) -> None:
    tensors[LAYER + "post_attention_layernorm.weight"].fill_(1)


def key_norm_left_out(tensors: dict[str, torch.Tensor]) -> None:
    tensors[LAYER + "self_attn.k_norm.weight"].fill_(1)


def bias_left_out(tensors: dict[str, torch.Tensor]) -> None:
    tensors[LAYER + "self_attn.v_proj.bias"].zero_()


def heads_swapped(tensors: dict[str, torch.Tensor]) -> None:
    weight = tensors[LAYER + "self_attn.q_proj.weight"]
    weight.copy_(weight.view(2, -1, weight.shape[1]).flip(0).reshape(weight.shape))


def gate_and_up_swapped(tensors: dict[str, torch.Tensor]) -> None:
    gate, up = (tensors[f"{LAYER}mlp.{name}_proj.weight"] for name in ("gate", "up"))
    gate_before = gate.clone()
    gate.copy_(up)
    up.copy_(gate_before)


def experts_swapped(tensors: dict[str, torch.Tensor]) -> None:
    first, second = (tensors[f"{LAYER}mlp.experts.{n}.down_proj.weight"] for n in (0, 1))
    first_before = first.clone()
    first.copy_(second)
    second.copy_(first_before)


def check(model: str, fault: Fault | None, dtype: str = "float32") -> dict[str, Any]:
    """Return what the tool finds where the actor's folder, and not the reference's weights, has the fault."""
    sys.path.insert(0, str(TOOLS))
    try:
        tool: Any = importlib.import_module("check_gpu")
        importlib.import_module("plain_model")
    finally:
        sys.path.remove(str(TOOLS))
    write_model = tool.write_model

    def write_faulty(folder: Path, fields: dict[str, Any], dtype: str) -> Any:
        written = write_model(folder, fields, dtype)
        if fault is not None:
            tensors = load_file(folder / "model.safetensors")
            fault(tensors)
            save_file(tensors, folder / "model.safetensors")
        return written

    with mock.patch.object(tool, "write_model", write_faulty):
        return dict(tool.check_parity("cpu", tool.TOY_SIZES.parity[model], dtype, (9, 5, 12)))


@pytest.mark.ranks(1)
@pytest.mark.parametrize(
    ("model", "fault"),
    [
        ("dense", norm_left_out),
        ("dense", key_norm_left_out),
        ("dense", heads_swapped),
        ("dense", gate_and_up_swapped),
        ("biases", bias_left_out),
        ("experts", experts_swapped),
    ],
)
def test_parity_sees_a_model_that_is_a_little_wrong(model: str, fault: Fault) -> None:
    """By ten times the bound at least, of the log-probabilities or of the gradient norm."""
    found = check(model, fault)
    assert not found["ok"]
    of_bounds = (
        found["logprob_mean_abs"] / found["bound_logprob_mean"],
        found["grad_norm_rel"] / found["bound_grad_norm"],
    )
    assert max(of_bounds) > 10


@pytest.mark.ranks(1)
def test_parity_in_bfloat16_sees_what_rounding_does_not_do() -> None:
    assert check("dense", None, "bfloat16")["ok"]
    assert not check("dense", gate_and_up_swapped, "bfloat16")["ok"]
