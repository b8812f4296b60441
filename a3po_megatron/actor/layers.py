"""The transformer layer: Transformer Engine's spec where `kernels.py` says so, else local layers with the same parameter names.

Same names mean that checkpoints and the Hugging Face mapping are the same on CPU and GPU. The norms that precede a
column-parallel projection belong to it (`linear_qkv.layer_norm_weight`), as in Transformer Engine; the norm before experts
stands alone (`pre_mlp_layernorm`).
"""

from functools import partial
from typing import Any

import torch
from megatron.core.fusions.fused_bias_dropout import get_bias_dropout_add
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_with_transformer_engine_spec
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from megatron.core.transformer import ModuleSpec, TransformerConfig
from megatron.core.transformer.attention import SelfAttention, SelfAttentionSubmodules
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.mlp import MLP, MLPSubmodules
from megatron.core.transformer.moe.experts import SequentialMLP
from megatron.core.transformer.moe.moe_layer import MoELayer, MoESubmodules
from megatron.core.transformer.transformer_layer import TransformerLayer, TransformerLayerSubmodules
from megatron.core.transformer.utils import make_sharded_tensors_for_checkpoint
from torch import Tensor
from torch.nn.functional import rms_norm

from a3po_megatron.actor.attention import CoreAttention
from a3po_megatron.actor.kernels import Kernels


def layer_spec(config: TransformerConfig, kernels: Kernels) -> ModuleSpec:
    """Return the spec of one transformer layer."""
    if kernels.layers == "local":
        return local_layer_spec(config)
    return get_gpt_layer_with_transformer_engine_spec(
        num_experts=config.num_moe_experts,
        moe_grouped_gemm=config.moe_grouped_gemm,
        qk_layernorm=config.qk_layernorm,
    )


def norm_class(kernels: Kernels) -> type[torch.nn.Module]:
    """Return the class of the final norm."""
    if kernels.layers == "local":
        return RMSNorm
    from megatron.core.extensions.transformer_engine import TENorm

    return TENorm


def local_layer_spec(config: TransformerConfig) -> ModuleSpec:
    """Return the spec of a layer made of the modules below and megatron's own parallel linears."""
    head_norm = RMSNorm if config.qk_layernorm else None
    attention = ModuleSpec(
        module=SelfAttention,
        params={"attn_mask_type": AttnMaskType.causal},
        submodules=SelfAttentionSubmodules(
            linear_qkv=LayerNormColumnParallelLinear,
            core_attention=CoreAttention,
            linear_proj=RowParallelLinear,
            q_layernorm=head_norm,
            k_layernorm=head_norm,
        ),
    )
    has_experts = config.num_moe_experts is not None
    return ModuleSpec(
        module=TransformerLayer,
        submodules=TransformerLayerSubmodules(
            input_layernorm=IdentityOp,
            self_attention=attention,
            self_attn_bda=get_bias_dropout_add,
            pre_mlp_layernorm=RMSNorm if has_experts else IdentityOp,
            mlp=_experts() if has_experts else _dense_mlp(),
            mlp_bda=get_bias_dropout_add,
        ),
    )


def _dense_mlp() -> Any:
    """Return a builder of the MLP, which begins with the norm before it."""
    submodules = MLPSubmodules(linear_fc1=LayerNormColumnParallelLinear, linear_fc2=RowParallelLinear)
    return partial(MLP.as_mlp_submodule, submodules=submodules)


def _experts() -> Any:
    """Return a builder of megatron's mixture of experts, one expert after another."""
    expert = MLPSubmodules(linear_fc1=ColumnParallelLinear, linear_fc2=RowParallelLinear)
    return partial(MoELayer, submodules=MoESubmodules(experts=partial(SequentialMLP, submodules=expert)))


class RMSNorm(torch.nn.Module):
    """Root-mean-square norm over the last dimension; unlike megatron's local norm it may stand under sequence parallelism."""

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float = 1e-6, **unused: Any) -> None:
        super().__init__()
        self.eps = eps
        self.weight = _norm_weight(config, hidden_size)

    def forward(self, hidden: Tensor) -> Tensor:
        """Return the normalised [..., hidden_size]."""
        return rms_norm(hidden, (hidden.shape[-1],), self.weight, self.eps)


class LayerNormColumnParallelLinear(ColumnParallelLinear):
    """RMS norm, then a column-parallel linear; parameter names of TELayerNormColumnParallelLinear."""

    def __init__(self, input_size: int, output_size: int, *, config: TransformerConfig, **kwargs: Any) -> None:
        super().__init__(input_size, output_size, config=config, **kwargs)
        self.eps = config.layernorm_epsilon
        self.layer_norm_weight = _norm_weight(config, input_size)

    def forward(self, hidden: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor | None]:
        """Return the projection [s, b, output_size/tp] and the bias, of hidden [s (or s/tp), b, input_size]."""
        normed = rms_norm(hidden, (hidden.shape[-1],), self.layer_norm_weight, self.eps)
        return super().forward(normed, *args, **kwargs)

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: tuple[Any, ...] = (), metadata: dict[str, Any] | None = None
    ) -> dict[str, Any]:
        """Return the checkpoint entries: weight and bias split over TP, the norm replicated."""
        assert metadata is not None, "the checkpoint names its process groups"
        return make_sharded_tensors_for_checkpoint(
            self.state_dict(prefix="", keep_vars=True),
            prefix,
            {"weight": 0, "bias": 0},
            sharded_offsets,
            tp_group=self.tp_group,
            dp_cp_group=metadata["dp_cp_group"],
        )


def _norm_weight(config: TransformerConfig, size: int) -> torch.nn.Parameter:
    device = "cpu" if config.use_cpu_initialization else torch.cuda.current_device()
    weight = torch.nn.Parameter(torch.ones(size, dtype=config.params_dtype, device=device))
    # Under sequence parallelism every rank sees other tokens: megatron sums the gradient of parameters marked so.
    weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]
    return weight
