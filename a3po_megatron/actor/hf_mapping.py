"""Which megatron parameter is which Hugging Face tensor: the table of each family. Torch-free.

A rule names one megatron parameter, the Hugging Face tensors that make it up, and how it is split over tensor-parallel
ranks. Names of layer rules are relative to `decoder.layers.N.` on megatron's side and `model.layers.N.` on Hugging Face's.
Experts are numbered over the whole model on both sides; `model_name` translates a rank's own numbers.
docs/models.md says how to add a family.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Literal

from a3po_megatron.config.model_shape import ModelShape

# How a parameter lies on tensor-parallel ranks; the surgery of each is in hf_layout.py.
Split = Literal["replicated", "columns", "qkv", "gate_up", "vocab"]


@dataclass(frozen=True)
class Rule:
    """One megatron parameter and the Hugging Face tensors in it, in order."""

    megatron: str
    hf: tuple[str, ...]
    split: Split
    expert: int | None = None  # the expert that it belongs to; its shards are those of expert tensor parallelism


EMBEDDING = Rule("embedding.word_embeddings.weight", ("model.embed_tokens.weight",), "vocab")
FINAL_NORM = Rule("decoder.final_layernorm.weight", ("model.norm.weight",), "replicated")
OUTPUT = Rule("output_layer.weight", ("lm_head.weight",), "vocab")
TIED_OUTPUT = Rule("output_layer.weight", ("model.embed_tokens.weight",), "vocab")  # the last stage's copy

ATTENTION = (
    Rule("self_attention.linear_qkv.layer_norm_weight", ("input_layernorm.weight",), "replicated"),
    Rule(
        "self_attention.linear_qkv.weight",
        ("self_attn.q_proj.weight", "self_attn.k_proj.weight", "self_attn.v_proj.weight"),
        "qkv",
    ),
    Rule("self_attention.linear_proj.weight", ("self_attn.o_proj.weight",), "columns"),
)
QKV_BIAS = (
    Rule(
        "self_attention.linear_qkv.bias",
        ("self_attn.q_proj.bias", "self_attn.k_proj.bias", "self_attn.v_proj.bias"),
        "qkv",
    ),
)
QK_NORMS = (
    Rule("self_attention.q_layernorm.weight", ("self_attn.q_norm.weight",), "replicated"),
    Rule("self_attention.k_layernorm.weight", ("self_attn.k_norm.weight",), "replicated"),
)
DENSE_MLP = (
    Rule("mlp.linear_fc1.layer_norm_weight", ("post_attention_layernorm.weight",), "replicated"),
    Rule("mlp.linear_fc1.weight", ("mlp.gate_proj.weight", "mlp.up_proj.weight"), "gate_up"),
    Rule("mlp.linear_fc2.weight", ("mlp.down_proj.weight",), "columns"),
)
ROUTER = (
    Rule("pre_mlp_layernorm.weight", ("post_attention_layernorm.weight",), "replicated"),
    Rule("mlp.router.weight", ("mlp.gate.weight",), "replicated"),
)
# A rank's parameter of one expert: with a module each, and with Transformer Engine's grouped linear.
LOCAL_EXPERT = re.compile(
    r"mlp\.experts\.(?:local_experts\.(\d+)\.(linear_fc[12])\.weight|(linear_fc[12])\.weight(\d+))$"
)


def layer_rules(shape: ModelShape) -> tuple[Rule, ...]:
    """Return the rules of each layer."""
    match shape.family:
        case "llama":
            return (*ATTENTION, *DENSE_MLP)
        case "qwen2":
            return (*ATTENTION, *QKV_BIAS, *DENSE_MLP)
        case "qwen3":
            return (*ATTENTION, *DENSE_MLP, *QK_NORMS)
        case "qwen3_moe":
            experts = (rule for expert in range(shape.num_experts) for rule in expert_rules(expert))
            return (*ATTENTION, *QK_NORMS, *ROUTER, *experts)


def expert_rules(expert: int) -> tuple[Rule, Rule]:
    """Return the rules of one expert."""
    megatron, hf = f"mlp.experts.{expert}", f"mlp.experts.{expert}"
    return (
        Rule(f"{megatron}.linear_fc1.weight", (f"{hf}.gate_proj.weight", f"{hf}.up_proj.weight"), "gate_up", expert),
        Rule(f"{megatron}.linear_fc2.weight", (f"{hf}.down_proj.weight",), "columns", expert),
    )


def model_name(name: str, first_expert: int) -> str:
    """Return a rank's parameter name with experts numbered over the whole model; the rank's first is `first_expert`."""

    def number(found: re.Match[str]) -> str:
        index, linear = (found[1], found[2]) if found[2] else (found[4], found[3])
        return f"mlp.experts.{first_expert + int(index)}.{linear}.weight"

    return LOCAL_EXPERT.sub(number, name)


def output_rule(shape: ModelShape) -> Rule:
    """Return the rule of the output layer, where a stage holds one of its own."""
    return TIED_OUTPUT if shape.tie_word_embeddings else OUTPUT


def layer_rule(rule: Rule, layer: int) -> Rule:
    """Return `rule` with the Hugging Face names of layer number `layer`, counted from 0 over the whole model."""
    return replace(rule, hf=tuple(f"model.layers.{layer}.{name}" for name in rule.hf))


def hf_shapes(shape: ModelShape) -> dict[str, tuple[int, ...]]:
    """Return name -> shape of every tensor of the Hugging Face checkpoint, in model order."""
    return dict(_hf_shapes(shape))


def _hf_shapes(shape: ModelShape) -> Iterator[tuple[str, tuple[int, ...]]]:
    hidden, intermediate = shape.hidden_size, shape.intermediate_size
    query, key_value = shape.num_attention_heads * shape.head_dim, shape.num_key_value_heads * shape.head_dim
    in_layer = {
        "input_layernorm.weight": (hidden,),
        "self_attn.q_proj.weight": (query, hidden),
        "self_attn.k_proj.weight": (key_value, hidden),
        "self_attn.v_proj.weight": (key_value, hidden),
        "self_attn.o_proj.weight": (hidden, query),
        "self_attn.q_proj.bias": (query,),
        "self_attn.k_proj.bias": (key_value,),
        "self_attn.v_proj.bias": (key_value,),
        "self_attn.q_norm.weight": (shape.head_dim,),
        "self_attn.k_norm.weight": (shape.head_dim,),
        "post_attention_layernorm.weight": (hidden,),
        "mlp.gate_proj.weight": (intermediate, hidden),
        "mlp.up_proj.weight": (intermediate, hidden),
        "mlp.down_proj.weight": (hidden, intermediate),
        "mlp.gate.weight": (shape.num_experts, hidden),
        "gate_proj.weight": (shape.moe_intermediate_size, hidden),
        "up_proj.weight": (shape.moe_intermediate_size, hidden),
        "down_proj.weight": (hidden, shape.moe_intermediate_size),
    }
    yield EMBEDDING.hf[0], (shape.vocab_size, hidden)
    for layer in range(shape.num_layers):
        for rule in layer_rules(shape):
            for name in rule.hf:
                within = name if rule.expert is None else name.removeprefix(f"mlp.experts.{rule.expert}.")
                yield f"model.layers.{layer}.{name}", in_layer[within]
    yield FINAL_NORM.hf[0], (hidden,)
    if not shape.tie_word_embeddings:
        yield OUTPUT.hf[0], (shape.vocab_size, hidden)
