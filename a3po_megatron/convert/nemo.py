"""A NeMo 2 checkpoint -> a megatron checkpoint of ours.

    NEMO/weights/                 a megatron distributed checkpoint; names begin with `module.`
    NEMO/context/model.yaml       the model's settings, written by fiddle: read as plain YAML, nothing that it names is imported
    NEMO/context/nemo_tokenizer/  a Hugging Face tokenizer, where it has one

NeMo keeps Megatron's settings, not Hugging Face's; config.json is made from them here.
"""

import json
import shutil
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from a3po_megatron.actor.hf_folder import COMPANIONS
from a3po_megatron.actor.megatron_folder import MegatronFolder
from a3po_megatron.config.actor import ActorConfig
from a3po_megatron.config.model_shape import read_model_shape
from a3po_megatron.convert.destination import writing
from a3po_megatron.convert.megatron import check_layout
from a3po_megatron.convert.megatron_writer import write_megatron_folder
from a3po_megatron.convert.weights import Cast, Summary, Watch, unwatched
from a3po_megatron.errors import UserError

WEIGHTS, MODEL_FILE, TOKENIZER = Path("weights"), Path("context/model.yaml"), Path("context/nemo_tokenizer")
CLASS_NAMES = {
    "llama": "LlamaForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "qwen3_moe": "Qwen3MoeForCausalLM",
}


def nemo_to_megatron(
    source: Path,
    destination: Path,
    layout: ActorConfig,
    vocab_size: int | None = None,
    dtype: str | None = None,
    watch: Watch = unwatched,
) -> Summary:
    """Write NeMo folder `source` as the new megatron checkpoint `destination`, with the config.json that its settings amount to.

    `vocab_size`: for a checkpoint that does not say it; NeMo then takes it from the tokenizer. Raises UserError for settings
    that the actor does not have, and for weights that do not fit them.
    """
    config = nemo_config(source, vocab_size)
    with tempfile.TemporaryDirectory(prefix="nemo-") as name:
        companions = Path(name)
        (companions / "config.json").write_text(json.dumps(config, indent=2))
        for pattern in COMPANIONS:
            for file in (source / TOKENIZER).glob(pattern):
                shutil.copy2(file, companions / file.name)
        shape = read_model_shape(companions)
        check_layout(layout, shape)
        folder = MegatronFolder(source / WEIGHTS, shape)
        with writing(destination):
            return write_megatron_folder(
                folder if dtype is None else Cast(folder, dtype), layout, companions, destination, watch
            )


def is_nemo(folder: Path) -> bool:
    """Whether a folder looks like a NeMo 2 checkpoint."""
    return (folder / WEIGHTS).is_dir() and (folder / MODEL_FILE).parent.is_dir()


def nemo_config(source: Path, vocab_size: int | None = None) -> dict[str, Any]:
    """Return the config.json that NeMo's settings amount to. Raises UserError for what no supported family has."""
    path = source / MODEL_FILE
    settings = _read_settings(path)

    def get(name: str) -> Any:
        if name not in settings:
            raise UserError(f"{path}: config.{name} is missing; a NeMo 2 checkpoint of a language model has it")
        return settings[name]

    _refuse_unsupported(path, settings)
    family = _family(settings)
    heads, size = get("num_attention_heads"), vocab_size or settings.get("vocab_size")
    if not size:
        raise UserError(
            f"{path}: config.vocab_size is not set, NeMo took it from the tokenizer; pass it as --vocab-size"
        )
    return {
        "architectures": [CLASS_NAMES[family]],
        "model_type": family,
        "num_hidden_layers": get("num_layers"),
        "hidden_size": get("hidden_size"),
        "intermediate_size": get("ffn_hidden_size"),
        "num_attention_heads": heads,
        "num_key_value_heads": settings.get("num_query_groups") or heads,
        "head_dim": settings.get("kv_channels") or get("hidden_size") // heads,
        "vocab_size": size,
        "max_position_embeddings": get("seq_length"),
        "rms_norm_eps": get("layernorm_epsilon"),
        "tie_word_embeddings": get("share_embeddings_and_output_weights"),
        "hidden_act": "silu",
        "attention_bias": family == "qwen2",
        "rope_parameters": _rope(settings, get("rotary_base")),
        **(_experts(settings) if family == "qwen3_moe" else {}),
    }


def _read_settings(path: Path) -> Mapping[str, Any]:
    try:
        content = yaml.safe_load(path.read_text())
    except OSError as error:
        raise UserError(f"{path}: cannot read NeMo's settings of the model: {error.strerror}") from None
    except yaml.YAMLError as error:
        raise UserError(f"{path}: refused: not plain YAML ({' '.join(str(error).split())})") from None
    settings = content.get("config") if isinstance(content, dict) else None
    if not isinstance(settings, dict):
        raise UserError(f"{path}: no `config` in it; expected NeMo's settings of a language model")
    return settings


def _family(settings: Mapping[str, Any]) -> str:
    if settings.get("num_moe_experts"):
        return "qwen3_moe"
    if settings.get("qk_layernorm"):
        return "qwen3"
    return "qwen2" if settings.get("add_qkv_bias") else "llama"


def _rope(settings: Mapping[str, Any], base: float) -> dict[str, Any]:
    """NeMo's Llama 3.1 settings carry the scaling as fields of their own."""
    if not settings.get("scale_factor"):
        return {"rope_type": "default", "rope_theta": base}
    return {
        "rope_type": "llama3",
        "rope_theta": base,
        "factor": settings["scale_factor"],
        "low_freq_factor": settings.get("low_freq_factor", 1.0),
        "high_freq_factor": settings.get("high_freq_factor", 4.0),
        "original_max_position_embeddings": settings.get("old_context_len", 8192),
    }


def _experts(settings: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "num_experts": settings["num_moe_experts"],
        "num_experts_per_tok": settings.get("moe_router_topk", 2),
        "moe_intermediate_size": settings.get("moe_ffn_hidden_size") or settings["ffn_hidden_size"],
        "norm_topk_prob": not settings.get("moe_router_pre_softmax", False),
        "decoder_sparse_step": 1,
    }


def _refuse_unsupported(path: Path, settings: Mapping[str, Any]) -> None:
    """Refuse what would convert and then be another model."""
    activation = settings.get("activation_func")
    name = activation.get("_target_", "") if isinstance(activation, dict) else str(activation)
    is_moe, is_qk_norm = bool(settings.get("num_moe_experts")), bool(settings.get("qk_layernorm"))
    wrong = {
        f"normalization={settings.get('normalization')}": settings.get("normalization") != "RMSNorm",
        f"activation_func={name}": not name.endswith("silu"),
        "gated_linear_unit=false": not settings.get("gated_linear_unit"),
        "add_bias_linear=true": bool(settings.get("add_bias_linear")),
        f"position_embedding_type={settings.get('position_embedding_type')}": settings.get("position_embedding_type")
        != "rope",
        f"rotary_percent={settings.get('rotary_percent')}": settings.get("rotary_percent", 1.0) != 1.0,
        "qk_layernorm and add_qkv_bias together": is_qk_norm and bool(settings.get("add_qkv_bias")),
        "num_moe_experts without qk_layernorm": is_moe and not is_qk_norm,
        f"moe_shared_expert_intermediate_size={settings.get('moe_shared_expert_intermediate_size')}": bool(
            settings.get("moe_shared_expert_intermediate_size")
        ),
        f"moe_layer_freq={settings.get('moe_layer_freq')}": is_moe and settings.get("moe_layer_freq", 1) != 1,
    }
    for setting, found in wrong.items():
        if found:
            raise UserError(f"{path}: {setting} is not supported; supported families: {', '.join(CLASS_NAMES)}")
