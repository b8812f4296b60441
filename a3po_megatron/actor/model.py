"""A megatron GPTModel from a model's shape and a layout: one chunk a (virtual) pipeline stage of this rank."""

from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.models.gpt import GPTModel
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules, get_num_layers_to_build
from torch.nn.functional import silu

from a3po_megatron.actor.layers import layer_spec, norm_class, uses_transformer_engine
from a3po_megatron.config.model_shape import ModelShape
from a3po_megatron.config.schema import ActorConfig

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


def transformer_config(shape: ModelShape, actor: ActorConfig, device: torch.device) -> TransformerConfig:
    """Translate our settings into megatron's. Fused kernels are used with Transformer Engine only: they need its GPU."""
    fused = uses_transformer_engine(device)
    vpp = actor.virtual_pipeline_parallel
    overlapped = actor.p2p_communication == "overlapped" or (actor.p2p_communication == "auto" and vpp > 1)
    dtype = DTYPES[actor.dtype]
    return TransformerConfig(
        num_layers=shape.num_layers,
        hidden_size=shape.hidden_size,
        ffn_hidden_size=shape.intermediate_size,
        num_attention_heads=shape.num_attention_heads,
        num_query_groups=shape.num_key_value_heads,
        kv_channels=shape.head_dim,
        normalization="RMSNorm",
        layernorm_epsilon=shape.rms_norm_eps,
        qk_layernorm=shape.has_qk_norm,
        gated_linear_unit=True,
        activation_func=silu,
        add_bias_linear=False,
        add_qkv_bias=False,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        attention_softmax_in_fp32=True,
        params_dtype=dtype,
        pipeline_dtype=dtype,
        bf16=dtype == torch.bfloat16,
        perform_initialization=False,  # every weight is loaded or drawn in hf_weights.py, or loading fails
        use_cpu_initialization=device.type == "cpu",
        bias_activation_fusion=fused,
        bias_dropout_fusion=fused,
        masked_softmax_fusion=fused,
        apply_rope_fusion=fused,
        gradient_accumulation_fusion=False,  # needs Apex
        persist_layer_norm=False,
        tensor_model_parallel_size=actor.tensor_parallel,
        pipeline_model_parallel_size=actor.pipeline_parallel,
        virtual_pipeline_model_parallel_size=vpp if vpp > 1 else None,
        context_parallel_size=actor.context_parallel,
        sequence_parallel=actor.sequence_parallel,
        overlap_p2p_comm=overlapped,
        batch_p2p_comm=not overlapped,
        variable_seq_lengths=True,  # microbatches have their own lengths; stages tell each other the shape
        moe_token_dispatcher_type="alltoall",  # asked for by variable_seq_lengths, also without experts
        **(_expert_settings(shape, actor, grouped=fused and dtype == torch.bfloat16) if shape.num_experts else {}),
        calculate_per_token_loss=True,  # the loss is a sum; megatron divides once by the global token count
        deallocate_pipeline_outputs=True,
    )


def _expert_settings(shape: ModelShape, actor: ActorConfig, grouped: bool) -> dict[str, Any]:
    """Settings of a mixture of experts. No token is dropped, and no auxiliary loss is added to the objective.

    `grouped`: all experts of a rank in one kernel, which Transformer Engine has for 16 bits.
    """
    return {
        "num_moe_experts": shape.num_experts,
        "moe_router_topk": shape.num_experts_per_tok,
        "moe_ffn_hidden_size": shape.moe_intermediate_size,
        "moe_router_pre_softmax": not shape.norm_topk_prob,  # softmax over the chosen ones only is the normalised form
        "moe_router_dtype": "fp32",  # also with bfloat16 parameters: which experts are chosen hangs on small differences
        "moe_router_load_balancing_type": "none",
        "moe_grouped_gemm": grouped,
        "expert_model_parallel_size": actor.expert_parallel,
        "expert_tensor_parallel_size": actor.expert_tensor_parallel,
    }


def build_chunks(config: TransformerConfig, shape: ModelShape, device: torch.device) -> list[GPTModel]:
    """Return this rank's model chunks, weights uninitialised, on `device`."""
    vpp = config.virtual_pipeline_model_parallel_size
    return [_build_chunk(config, shape, device, vp_stage) for vp_stage in (range(vpp) if vpp else [None])]


def _build_chunk(config: TransformerConfig, shape: ModelShape, device: torch.device, vp_stage: int | None) -> GPTModel:
    block = TransformerBlockSubmodules(
        layer_specs=[layer_spec(config, device)] * get_num_layers_to_build(config, vp_stage=vp_stage),
        layer_norm=norm_class(device),
    )
    chunk = GPTModel(
        config=config,
        transformer_layer_spec=block,
        vocab_size=shape.padded_vocab_size(config.tensor_model_parallel_size),
        max_sequence_length=shape.max_position_embeddings,
        pre_process=parallel_state.is_pipeline_first_stage(ignore_virtual=False, vp_stage=vp_stage),
        post_process=parallel_state.is_pipeline_last_stage(ignore_virtual=False, vp_stage=vp_stage),
        parallel_output=True,
        share_embeddings_and_output_weights=shape.tie_word_embeddings,
        position_embedding_type="rope",
        rotary_base=shape.rope_theta,
        vp_stage=vp_stage,
    )
    for name, parameter in chunk.named_parameters():
        # Experts have an optimizer of their own. megatron makes it only where their groups differ from the dense ones; with
        # it in every layout, checkpoints have the same parts.
        if ".experts." in name:
            parameter.allreduce = False
    return chunk.to(device)
