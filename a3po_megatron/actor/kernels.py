"""Which optional kernels the actor uses. The one place that decides it.

Transformer Engine's layers, attention, fused norms and rotary embedding stand on a GPU for bfloat16 where the package is
installed; elsewhere the local layers of `layers.py` run, on CPU and GPU alike. Its attention chooses flash attention or cuDNN
itself: megatron-core sets NVTE_FLASH_ATTN and the like to 1 and bears no other value.
"""

import os
from dataclasses import dataclass
from importlib import import_module
from importlib.util import find_spec
from typing import Literal

import torch
from megatron.core import optimizer as megatron_optimizer
from megatron.core.extensions import transformer_engine as megatron_engine

from a3po_megatron.actor.megatron_version import MEGATRON_VERSION
from a3po_megatron.errors import UserError

ATTENTION_VARIABLES = ("NVTE_FLASH_ATTN", "NVTE_FUSED_ATTN", "NVTE_UNFUSED_ATTN")


@dataclass(frozen=True)
class Kernels:
    """What is used on this rank's device for parameters of this dtype."""

    device: str
    layers: Literal["Transformer Engine", "local"]
    attention: Literal["Transformer Engine", "torch"]  # torch: scaled_dot_product_attention
    grouped_experts: bool  # all experts of a rank in one kernel, else one after another
    adam: Literal["Transformer Engine", "Apex", "torch"]
    # Gradients of a projection added up inside its kernel. It needs Apex's extension, which only some images have: never used,
    # so that a run is the same with and without.
    gradient_accumulation_fusion: bool = False

    @property
    def fused(self) -> bool:
        """Whether megatron's fused bias, softmax and rotary kernels are used: with Transformer Engine only."""
        return self.layers == "Transformer Engine"

    def describe(self) -> str:
        """Return one line for the start of a run."""
        experts = "grouped" if self.grouped_experts else "one by one"
        return (
            f"megatron-core {MEGATRON_VERSION} on {self.device}: layers {self.layers}, attention {self.attention}, "
            f"experts {experts}, Adam {self.adam}, gradient accumulation not fused"
        )


def choose_kernels(device: torch.device, dtype: torch.dtype) -> Kernels:
    """Return the kernels for a device and the dtype of the parameters. Raises UserError for what megatron-core breaks at.

    Float32 goes without Transformer Engine, which multiplies it as TF32 and whose attention takes 16 bits only.
    """
    for name in ATTENTION_VARIABLES:
        if os.environ.get(name, "1") != "1":
            raise UserError(
                f"{name}={os.environ[name]} in the environment: megatron-core leaves the choice of attention to "
                "Transformer Engine; unset it"
            )
    engine = device.type == "cuda" and dtype == torch.bfloat16 and _have_engine()
    return Kernels(
        device=device.type,
        layers="Transformer Engine" if engine else "local",
        attention="Transformer Engine" if engine else "torch",
        grouped_experts=engine,
        adam=_adam(),
    )


def _have_engine() -> bool:
    """Return whether megatron-core found Transformer Engine. Raises UserError where it is installed and cannot be imported."""
    if megatron_engine.HAVE_TE or find_spec("transformer_engine") is None:
        return bool(megatron_engine.HAVE_TE)
    try:
        import_module("transformer_engine.pytorch")
        reason = "megatron-core needs its module transformer_engine.pytorch.fp8"
    except Exception as error:  # its extensions fail in ways of their own
        reason = " ".join(f"{type(error).__name__}: {error}".split())
    raise UserError(
        f"transformer_engine is installed but cannot be used: {reason}; install the build that fits torch and CUDA "
        "(requirements/gpu.txt), or remove it to run the local layers"
    )


def _adam() -> Literal["Transformer Engine", "Apex", "torch"]:
    """Return whose Adam megatron took when it was imported (megatron/core/optimizer/__init__.py)."""
    package = megatron_optimizer.Adam.__module__.partition(".")[0]
    names: dict[str, Literal["Transformer Engine", "Apex"]] = {
        "transformer_engine": "Transformer Engine",
        "apex": "Apex",
    }
    return names.get(package, "torch")
