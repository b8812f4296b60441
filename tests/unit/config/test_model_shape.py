"""config.json -> shape; parameter counts of published models are the oracle."""

import json
import math
from pathlib import Path

import pytest

from a3po_megatron.actor.hf_mapping import hf_shapes
from a3po_megatron.config.model_shape import read_model_shape
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


PUBLISHED = [  # layers, hidden, MLP, heads, tied, billions of parameters as published
    ("Qwen3-4B", 36, 2560, 9728, 32, True, 4.022),
    ("Qwen3-8B", 36, 4096, 12288, 32, False, 8.191),
    ("Qwen3-14B", 40, 5120, 17408, 40, False, 14.768),
    ("Qwen3-32B", 64, 5120, 25600, 64, False, 32.762),
]


@pytest.mark.parametrize("published", PUBLISHED, ids=lambda published: published[0])
def test_parameter_counts_of_published_models(published: tuple, tmp_path: Path) -> None:
    _, layers, hidden, intermediate, heads, tied, billions = published
    folder = write_config(
        tmp_path,
        num_hidden_layers=layers,
        hidden_size=hidden,
        intermediate_size=intermediate,
        num_attention_heads=heads,
        num_key_value_heads=8,
        head_dim=128,
        vocab_size=151936,
        tie_word_embeddings=tied,
    )
    count = sum(math.prod(shape) for shape in hf_shapes(read_model_shape(folder)).values())
    assert round(count / 1e9, 3) == billions


MOE = {"model_type": "qwen3_moe", "num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 24}


@pytest.mark.parametrize("key", ["num_experts", "num_local_experts"])  # of older files and of transformers 5
def test_the_parameter_count_of_a_published_mixture_of_experts(key: str, tmp_path: Path) -> None:
    """Qwen3-30B-A3B: 30.532 billion parameters, of which 3.353 billion are used for a token (published as 30.5 and 3.3)."""
    sizes = {"num_experts": "absent", key: 128, "num_experts_per_tok": 8, "moe_intermediate_size": 768}
    folder = write_config(
        tmp_path,
        **{**MOE, **sizes},
        num_hidden_layers=48,
        hidden_size=2048,
        num_attention_heads=32,
        num_key_value_heads=4,
        head_dim=128,
        vocab_size=151936,
        norm_topk_prob=True,
        decoder_sparse_step=1,
        mlp_only_layers=[],
    )
    shape = read_model_shape(folder)
    assert shape.norm_topk_prob
    assert shape.has_qk_norm
    shapes = hf_shapes(shape)
    experts = sum(math.prod(size) for name, size in shapes.items() if ".experts." in name)
    count = sum(math.prod(size) for size in shapes.values())
    assert round(count / 1e9, 3) == 30.532
    assert round((count - experts + experts * 8 // 128) / 1e9, 3) == 3.353


def test_what_a_mixture_of_experts_leaves_unsaid_is_what_transformers_takes(tmp_path: Path) -> None:
    shape = read_model_shape(write_config(tmp_path, **MOE))
    assert (shape.head_dim, shape.norm_topk_prob) == (16, False)


def test_old_and_new_spelling_of_rope_and_missing_head_dim(tmp_path: Path) -> None:
    assert read_model_shape(write_config(tmp_path)).head_dim == 128  # transformers' default for Qwen3
    assert read_model_shape(write_config(tmp_path, model_type="llama")).head_dim == 16
    assert read_model_shape(write_config(tmp_path, head_dim=24)).head_dim == 24
    new = write_config(tmp_path, rope_theta="absent", rope_parameters={"rope_theta": 5e5, "rope_type": "default"})
    assert read_model_shape(new).rope_theta == 5e5


def test_vocabulary_is_padded_to_a_multiple_of_tensor_parallel(tmp_path: Path) -> None:
    shape = read_model_shape(write_config(tmp_path, vocab_size=131))
    assert [shape.padded_vocab_size(tp) for tp in (1, 2, 4)] == [131, 132, 132]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model_type": "mamba"}, "model_type 'mamba' is not supported; supported: qwen3, qwen3_moe, llama"),
        ({"vocab_size": "absent"}, "key 'vocab_size' is missing"),
        ({"hidden_size": "wide"}, "a size is not a number"),
        ({"attention_bias": True}, "attention_bias is not supported"),
        ({"use_sliding_window": True}, "use_sliding_window is not supported"),
        ({"hidden_act": "gelu"}, "hidden_act=gelu is not supported"),
        ({"rope_scaling": {"rope_type": "llama3", "factor": 8.0}}, "rope_type=llama3 is not supported"),
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
