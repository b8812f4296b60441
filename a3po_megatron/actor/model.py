"""A megatron GPTModel from a model's shape and a layout: one chunk a (virtual) pipeline stage of this rank."""

from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.models.gpt import GPTModel
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules, get_num_layers_to_build
from torch.nn.functional import silu

from a3po_megatron.actor.kernels import Kernels
from a3po_megatron.actor.layers import layer_spec, norm_class
from a3po_megatron.config.actor import ActorConfig
from a3po_megatron.config.model_shape import Llama3Rope, ModelShape

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


def transformer_config(shape: ModelShape, actor: ActorConfig, kernels: Kernels) -> TransformerConfig:
    """Translate our settings into megatron's."""
    fused = kernels.fused
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
        add_qkv_bias=shape.has_qkv_bias,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        attention_softmax_in_fp32=True,
        params_dtype=dtype,
        pipeline_dtype=dtype,
        bf16=dtype == torch.bfloat16,
        perform_initialization=False,  # every weight is loaded or drawn in hf_weights.py, or loading fails
        use_cpu_initialization=kernels.device == "cpu",
        bias_activation_fusion=fused,
        bias_dropout_fusion=fused,
        masked_softmax_fusion=fused,
        apply_rope_fusion=fused,
        gradient_accumulation_fusion=kernels.gradient_accumulation_fusion,
        persist_layer_norm=False,
        tensor_model_parallel_size=actor.tensor_parallel,
        pipeline_model_parallel_size=actor.pipeline_parallel,
        virtual_pipeline_model_parallel_size=vpp if vpp > 1 else None,
        num_layers_in_first_pipeline_stage=actor.num_layers_in_first_pipeline_stage or None,
        num_layers_in_last_pipeline_stage=actor.num_layers_in_last_pipeline_stage or None,
        context_parallel_size=actor.context_parallel,
        sequence_parallel=actor.sequence_parallel,
        overlap_p2p_comm=overlapped,
        batch_p2p_comm=not overlapped,
        variable_seq_lengths=True,  # microbatches have their own lengths; stages tell each other the shape
        moe_token_dispatcher_type="alltoall",  # asked for by variable_seq_lengths, also without experts
        **(_expert_settings(shape, actor, kernels) if shape.num_experts else {}),
        **_recompute_settings(actor),
        calculate_per_token_loss=True,  # the loss is a sum; megatron divides once by the global token count
        deallocate_pipeline_outputs=True,
    )


def _expert_settings(shape: ModelShape, actor: ActorConfig, kernels: Kernels) -> dict[str, Any]:
    """Settings of a mixture of experts. No token is dropped."""
    return {
        "num_moe_experts": shape.num_experts,
        "moe_router_topk": shape.num_experts_per_tok,
        "moe_ffn_hidden_size": shape.moe_intermediate_size,
        "moe_router_pre_softmax": not shape.norm_topk_prob,  # softmax over the chosen ones only is the normalised form
        "moe_router_dtype": None if actor.moe_router_dtype == "none" else actor.moe_router_dtype,
        "moe_router_load_balancing_type": "aux_loss" if actor.moe_aux_loss_coeff else "none",
        "moe_aux_loss_coeff": actor.moe_aux_loss_coeff,
        "moe_z_loss_coeff": actor.moe_z_loss_coeff or None,
        "moe_grouped_gemm": kernels.grouped_experts,
        "expert_model_parallel_size": actor.expert_parallel,
        "expert_tensor_parallel_size": actor.expert_tensor_parallel,
    }


def _recompute_settings(actor: ActorConfig) -> dict[str, Any]:
    match actor.recompute_granularity:
        case "none":
            return {}
        case "selective":
            return {"recompute_granularity": "selective", "recompute_modules": list(actor.recompute_modules)}
        case "full":
            return {
                "recompute_granularity": "full",
                "recompute_method": actor.recompute_method,
                "recompute_num_layers": actor.recompute_num_layers,
            }


def stage_of_each_layer(config: TransformerConfig) -> list[int]:
    """Return the (virtual) stage that holds each layer, in layer order; stages count through the chunks of all ranks."""
    pp, vpp = config.pipeline_model_parallel_size, config.virtual_pipeline_model_parallel_size
    stages: list[int] = []
    for vp_stage in range(vpp) if vpp else [None]:
        for pp_rank in range(pp):
            stage = (vp_stage or 0) * pp + pp_rank
            stages += [stage] * get_num_layers_to_build(config, vp_stage=vp_stage, pp_rank=pp_rank)
    return stages


def build_chunks(
    config: TransformerConfig, shape: ModelShape, kernels: Kernels, device: torch.device
) -> list[GPTModel]:
    """Return this rank's model chunks, weights uninitialised, on `device`."""
    vpp = config.virtual_pipeline_model_parallel_size
    return [_build_chunk(config, shape, kernels, vp_stage).to(device) for vp_stage in (range(vpp) if vpp else [None])]


def _build_chunk(config: TransformerConfig, shape: ModelShape, kernels: Kernels, vp_stage: int | None) -> GPTModel:
    block = TransformerBlockSubmodules(
        layer_specs=[layer_spec(config, kernels)] * get_num_layers_to_build(config, vp_stage=vp_stage),
        layer_norm=norm_class(kernels),
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
    if shape.rope_scaling:
        _scale_rotary_frequencies(chunk, shape.rope_scaling)
    return chunk


def _scale_rotary_frequencies(chunk: GPTModel, scaling: Llama3Rope) -> None:
    """Apply Llama 3's scaling, all of it: GPTModel's own argument takes the factor only.

    The formula is megatron's (megatron/core/models/common/embeddings/rotary_pos_embedding.py); a test compares with
    transformers.
    """
    rotary = chunk.rotary_pos_emb
    rotary.inv_freq = rotary._apply_scaling(
        rotary.inv_freq,
        factor=scaling.factor,
        low_freq_factor=scaling.low_freq_factor,
        high_freq_factor=scaling.high_freq_factor,
        original_max_position_embeddings=scaling.original_max_position_embeddings,
    )
