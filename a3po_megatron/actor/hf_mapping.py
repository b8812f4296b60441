"""Which megatron parameter is which Hugging Face tensor: the table of each family. Torch-free.

A rule names one megatron parameter, the Hugging Face tensors that make it up, and how it is split over tensor-parallel
ranks. Names of layer rules are relative to `decoder.layers.N.` on megatron's side and `model.layers.N.` on Hugging Face's.
To add a family: list its rules here, name it in `config/model_shape.py`, and add it to the parity tests.
"""

from collections.abc import Iterator
from dataclasses import dataclass
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


EMBEDDING = Rule("embedding.word_embeddings.weight", ("model.embed_tokens.weight",), "vocab")
FINAL_NORM = Rule("decoder.final_layernorm.weight", ("model.norm.weight",), "replicated")
OUTPUT = Rule("output_layer.weight", ("lm_head.weight",), "vocab")
TIED_OUTPUT = Rule("output_layer.weight", ("model.embed_tokens.weight",), "vocab")  # the last stage's copy

LLAMA_LAYER = (
    Rule("self_attention.linear_qkv.layer_norm_weight", ("input_layernorm.weight",), "replicated"),
    Rule(
        "self_attention.linear_qkv.weight",
        ("self_attn.q_proj.weight", "self_attn.k_proj.weight", "self_attn.v_proj.weight"),
        "qkv",
    ),
    Rule("self_attention.linear_proj.weight", ("self_attn.o_proj.weight",), "columns"),
    Rule("mlp.linear_fc1.layer_norm_weight", ("post_attention_layernorm.weight",), "replicated"),
    Rule("mlp.linear_fc1.weight", ("mlp.gate_proj.weight", "mlp.up_proj.weight"), "gate_up"),
    Rule("mlp.linear_fc2.weight", ("mlp.down_proj.weight",), "columns"),
)
QWEN3_LAYER = (
    *LLAMA_LAYER,
    Rule("self_attention.q_layernorm.weight", ("self_attn.q_norm.weight",), "replicated"),
    Rule("self_attention.k_layernorm.weight", ("self_attn.k_norm.weight",), "replicated"),
)
LAYER_RULES = {"llama": LLAMA_LAYER, "qwen3": QWEN3_LAYER}


def output_rule(shape: ModelShape) -> Rule:
    """Return the rule of the output layer, where a stage holds one of its own."""
    return TIED_OUTPUT if shape.tie_word_embeddings else OUTPUT


def layer_rule(rule: Rule, layer: int) -> Rule:
    """Return `rule` with the Hugging Face names of layer number `layer`, counted from 0 over the whole model."""
    return Rule(rule.megatron, tuple(f"model.layers.{layer}.{name}" for name in rule.hf), rule.split)


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
        "self_attn.q_norm.weight": (shape.head_dim,),
        "self_attn.k_norm.weight": (shape.head_dim,),
        "post_attention_layernorm.weight": (hidden,),
        "mlp.gate_proj.weight": (intermediate, hidden),
        "mlp.up_proj.weight": (intermediate, hidden),
        "mlp.down_proj.weight": (hidden, intermediate),
    }
    yield EMBEDDING.hf[0], (shape.vocab_size, hidden)
    for layer in range(shape.num_layers):
        for rule in LAYER_RULES[shape.family]:
            for name in rule.hf:
                yield f"model.layers.{layer}.{name}", in_layer[name]
    yield FINAL_NORM.hf[0], (hidden,)
    if not shape.tie_word_embeddings:
        yield OUTPUT.hf[0], (shape.vocab_size, hidden)
