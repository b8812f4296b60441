"""config.json -> shape, or a line that says why not. Published models are in test_published_models.py."""

import json
from pathlib import Path

import pytest

from a3po_megatron.config.model_shape import Llama3Rope, read_model_shape
from a3po_megatron.errors import UserError

BASE = {
    "model_type": "qwen3", "num_hidden_layers": 2, "hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4,
    "num_key_value_heads": 2, "vocab_size": 100, "max_position_embeddings": 64, "rms_norm_eps": 1e-6, "rope_theta": 1e4,
    "hidden_act": "silu",
}  # fmt: skip


def write_config(folder: Path, **changes: object) -> Path:
    config = {key: value for key, value in {**BASE, **changes}.items() if value != "absent"}
    (folder / "config.json").write_text(json.dumps(config))
    return folder


MOE = {"model_type": "qwen3_moe", "num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 24}


@pytest.mark.parametrize("key", ["num_experts", "num_local_experts"])  # of older files and of transformers 5
def test_the_number_of_experts_has_two_names(key: str, tmp_path: Path) -> None:
    assert read_model_shape(write_config(tmp_path, **MOE | {"num_experts": "absent", key: 8})).num_experts == 8


def test_what_a_mixture_of_experts_leaves_unsaid_is_what_transformers_takes(tmp_path: Path) -> None:
    shape = read_model_shape(write_config(tmp_path, **MOE))
    assert (shape.head_dim, shape.norm_topk_prob) == (16, False)


def test_old_and_new_spelling_of_rope_and_missing_head_dim(tmp_path: Path) -> None:
    assert read_model_shape(write_config(tmp_path)).head_dim == 128  # transformers' default for Qwen3
    assert read_model_shape(write_config(tmp_path, model_type="llama")).head_dim == 16
    assert read_model_shape(write_config(tmp_path, head_dim=24)).head_dim == 24
    new = write_config(tmp_path, rope_theta="absent", rope_parameters={"rope_theta": 5e5, "rope_type": "default"})
    assert read_model_shape(new).rope_theta == 5e5


LLAMA3 = {
    "rope_type": "llama3",
    "factor": 32.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}


def test_llama_3_rotary_scaling_in_old_and_new_spelling(tmp_path: Path) -> None:
    expected = Llama3Rope(32.0, 1.0, 4.0, 8192)
    assert read_model_shape(write_config(tmp_path)).rope_scaling is None
    old = read_model_shape(write_config(tmp_path, model_type="llama", rope_scaling=LLAMA3))
    assert old.rope_scaling == expected
    new = {"rope_theta": "absent", "rope_parameters": {"rope_theta": 5e5, **LLAMA3}}
    assert read_model_shape(write_config(tmp_path, model_type="llama", **new)).rope_scaling == expected
    older = {key: value for key, value in LLAMA3.items() if key != "rope_type"} | {"type": "llama3"}
    assert read_model_shape(write_config(tmp_path, model_type="llama", rope_scaling=older)).rope_scaling == expected


def test_every_qwen2_has_a_bias_and_no_other_family(tmp_path: Path) -> None:
    families = {family: {} for family in ("llama", "qwen2", "qwen3")} | {"qwen3_moe": MOE}
    biased = {
        family: read_model_shape(write_config(tmp_path, **{**more, "model_type": family})).has_qkv_bias
        for family, more in families.items()
    }
    assert biased == {"llama": False, "qwen2": True, "qwen3": False, "qwen3_moe": False}


def test_vocabulary_is_padded_to_a_multiple_of_tensor_parallel(tmp_path: Path) -> None:
    shape = read_model_shape(write_config(tmp_path, vocab_size=131))
    assert [shape.padded_vocab_size(tp) for tp in (1, 2, 4)] == [131, 132, 132]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model_type": "mamba"}, "model_type 'mamba' is not supported; supported: llama, qwen2, qwen3, qwen3_moe"),
        ({"vocab_size": "absent"}, "key 'vocab_size' is missing"),
        ({"hidden_size": "wide"}, "a size is not a number"),
        ({"attention_bias": True}, "attention_bias=True is not supported for model_type 'qwen3'"),
        (
            {"model_type": "llama", "attention_bias": True},
            "attention_bias=True is not supported for model_type 'llama'",
        ),
        (
            {"model_type": "qwen2", "attention_bias": False},
            "attention_bias=False is not supported for model_type 'qwen2'",
        ),
        ({"model_type": "llama", "mlp_bias": True}, "mlp_bias is not supported"),
        ({"attention_dropout": 0.1}, "attention_dropout=0.1 is not supported"),
        (
            {"layer_types": ["full_attention", "sliding_attention"]},
            "layer_types with sliding_attention is not supported",
        ),
        ({"quantization_config": {"quant_method": "fp8"}}, "quantization_config (quantized weights) is not supported"),
        ({"use_mrope": True}, "use_mrope is not supported"),
        ({"dual_chunk_attention_config": {"chunk_size": 4}}, "dual_chunk_attention_config is not supported"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor=0.5 is not supported"),
        (
            {"rope_parameters": {"rope_theta": 1e4, "partial_rotary_factor": 0.25}},
            "partial_rotary_factor=0.25 is not supported",
        ),
        (
            {"rope_parameters": {"full_attention": {"rope_theta": 1e4}, "sliding_attention": {"rope_theta": 1e4}}},
            "rope_parameters of each kind of layer is not supported",
        ),
        ({"num_key_value_heads": 3}, "num_key_value_heads=3 does not divide num_attention_heads=4"),
        ({"num_key_value_heads": "absent"}, "key 'num_key_value_heads' is missing"),
        ({"head_dim": 15}, "head_dim=15: must be even"),
        ({"use_sliding_window": True}, "use_sliding_window is not supported"),
        ({"hidden_act": "gelu"}, "hidden_act=gelu is not supported"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}, "rope_type=yarn is not supported"),
        ({"rope_scaling": {"type": "linear", "factor": 4.0}}, "rope_type=linear is not supported"),
        ({"rope_scaling": {"rope_type": "llama3", "factor": 8.0}}, "key 'low_freq_factor' is missing"),
        ({**MOE, "num_experts": "absent"}, "key 'num_experts' is missing"),
        (
            {**MOE, "decoder_sparse_step": 2},
            "decoder_sparse_step=2, mlp_only_layers=None: dense layers between layers of",
        ),
        (
            {**MOE, "mlp_only_layers": [1]},
            "mlp_only_layers=[1]: dense layers between layers of experts are not supported",
        ),
        ({**MOE, "num_experts_per_tok": 9}, "num_experts_per_tok=9: at least 1 and at most the 8 experts"),
        (
            {**MOE, "num_experts_per_tok": 1, "norm_topk_prob": True},
            "num_experts_per_tok=1 with norm_topk_prob=true is not supported",
        ),
    ],
)
def test_a_model_that_the_actor_does_not_have_is_refused(tmp_path: Path, changes: dict, message: str) -> None:
    with pytest.raises(UserError) as caught:
        read_model_shape(write_config(tmp_path, **changes))
    assert message in str(caught.value)
    assert "config.json" in str(caught.value)


def test_a_folder_that_is_no_model_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="is not a folder"):
        read_model_shape(tmp_path / "none")
    with pytest.raises(UserError, match="cannot read the model's configuration"):
        read_model_shape(tmp_path)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(UserError, match="not valid JSON"):
        read_model_shape(tmp_path)
