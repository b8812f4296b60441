"""NeMo's settings become a config.json; they are read as data, and what no supported family has is refused."""

from pathlib import Path
from typing import Any

import pytest
import yaml

from a3po_megatron.convert.nemo import nemo_config
from a3po_megatron.errors import UserError

SETTINGS: dict[str, Any] = {
    "_target_": "nemo.collections.llm.gpt.model.qwen2.Qwen2Config1P5B",
    "activation_func": {"_target_": "torch.nn.functional.silu", "_call_": False},
    "add_bias_linear": False,
    "add_qkv_bias": True,
    "ffn_hidden_size": 88,
    "gated_linear_unit": True,
    "hidden_size": 48,
    "kv_channels": None,
    "layernorm_epsilon": 1e-6,
    "normalization": "RMSNorm",
    "num_attention_heads": 4,
    "num_layers": 4,
    "num_moe_experts": None,
    "num_query_groups": 2,
    "position_embedding_type": "rope",
    "rotary_base": 1000000.0,
    "rotary_percent": 1.0,
    "seq_length": 64,
    "share_embeddings_and_output_weights": True,
}


def make_nemo(folder: Path, **changes: Any) -> Path:
    (folder / "weights").mkdir(parents=True)
    (folder / "context").mkdir()
    (folder / "context" / "model.yaml").write_text(yaml.safe_dump({"config": {**SETTINGS, **changes}}))
    return folder


def test_settings_of_each_family_are_recognised(tmp_path: Path) -> None:
    config = nemo_config(make_nemo(tmp_path / "qwen2", vocab_size=131))
    assert (config["model_type"], config["head_dim"], config["vocab_size"]) == ("qwen2", 12, 131)
    assert config["rope_parameters"] == {"rope_type": "default", "rope_theta": 1e6}
    without_bias = {"add_qkv_bias": False, "vocab_size": 131}
    moe = {"num_moe_experts": 8, "moe_router_topk": 2, "moe_ffn_hidden_size": 24, "moe_router_pre_softmax": False}
    assert nemo_config(make_nemo(tmp_path / "llama", **without_bias))["model_type"] == "llama"
    assert nemo_config(make_nemo(tmp_path / "qwen3", **without_bias, qk_layernorm=True))["model_type"] == "qwen3"
    experts = nemo_config(make_nemo(tmp_path / "moe", **without_bias, qk_layernorm=True, **moe))
    assert [experts[name] for name in ("num_experts", "num_experts_per_tok", "norm_topk_prob")] == [8, 2, True]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({}, r"config\.vocab_size is not set, .*--vocab-size"),
        ({"normalization": "LayerNorm"}, "normalization=LayerNorm is not supported"),
        ({"activation_func": {"_target_": "torch.nn.functional.gelu"}}, r"activation_func=torch\.nn\.functional\.gelu"),
        ({"rotary_percent": 0.5}, "rotary_percent=0.5"),
        ({"num_moe_experts": 8}, "num_moe_experts without qk_layernorm"),
    ],
)
def test_settings_that_no_family_has_are_refused(changes: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=message):
        nemo_config(make_nemo(tmp_path / "nemo", **changes))


def test_what_a_file_asks_to_run_is_not_run(tmp_path: Path) -> None:
    folder = make_nemo(tmp_path / "nemo")
    made = tmp_path / "made"
    (folder / "context" / "model.yaml").write_text(f"config: !!python/object/apply:os.mkdir ['{made}']\n")
    with pytest.raises(UserError, match="refused: not plain YAML") as error:
        nemo_config(folder)
    assert "\n" not in str(error.value)
    assert not made.exists()
