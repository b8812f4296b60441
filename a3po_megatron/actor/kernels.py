"""Which optional kernels the actor uses. The one place that decides it.

Transformer Engine's layers, fused norms and rotary embedding stand on a GPU where the package is installed; elsewhere the
local layers of `layers.py` run, on CPU and GPU alike. Attention with Transformer Engine is its own choice of flash
attention or cuDNN (its environment variables NVTE_FLASH_ATTN and NVTE_FUSED_ATTN), which take 16 bits only.
"""

from dataclasses import dataclass
from importlib.util import find_spec
from typing import Literal

import torch
from megatron.core import optimizer as megatron_optimizer

from a3po_megatron.actor.megatron_version import MEGATRON_VERSION


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
    """Return the kernels for a device and the dtype of the parameters."""
    engine = device.type == "cuda" and find_spec("transformer_engine") is not None
    sixteen_bits = engine and dtype == torch.bfloat16
    return Kernels(
        device=device.type,
        layers="Transformer Engine" if engine else "local",
        attention="Transformer Engine" if sixteen_bits else "torch",
        grouped_experts=sixteen_bits,
        adam=_adam(),
    )


def _adam() -> Literal["Transformer Engine", "Apex", "torch"]:
    """Return whose Adam megatron took when it was imported (megatron/core/optimizer/__init__.py)."""
    package = megatron_optimizer.Adam.__module__.partition(".")[0]
    names: dict[str, Literal["Transformer Engine", "Apex"]] = {
        "transformer_engine": "Transformer Engine",
        "apex": "Apex",
    }
    return names.get(package, "torch")
