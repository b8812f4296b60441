"""The shape of a model, read from a Hugging Face `config.json`. Knows no weights, no ranks and no torch."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from a3po_megatron.errors import UserError

Family = Literal["llama", "qwen2", "qwen3", "qwen3_moe"]
FAMILIES: tuple[Family, ...] = ("llama", "qwen2", "qwen3", "qwen3_moe")


@dataclass(frozen=True)
class Llama3Rope:
    """Llama 3's scaling of rotary frequencies; names of `rope_scaling` in config.json."""

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_position_embeddings: int


@dataclass(frozen=True)
class ModelShape:
    """Sizes in elements; Hugging Face's names where it has one."""

    family: Family
    num_layers: int
    hidden_size: int
    intermediate_size: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    vocab_size: int
    max_position_embeddings: int
    rms_norm_eps: float
    rope_theta: float
    tie_word_embeddings: bool
    # Mixture of experts, in every layer; 0 experts: a dense MLP of `intermediate_size` instead
    num_experts: int = 0
    num_experts_per_tok: int = 0
    moe_intermediate_size: int = 0  # of one expert
    norm_topk_prob: bool = False  # whether the chosen experts' probabilities are scaled to the sum of 1
    rope_scaling: Llama3Rope | None = None  # None: plain rotary frequencies

    @property
    def query_heads_per_group(self) -> int:
        """Query heads that share one key/value head."""
        return self.num_attention_heads // self.num_key_value_heads

    @property
    def has_qk_norm(self) -> bool:
        """Whether query and key heads are normalised before the rotary embedding (Qwen3)."""
        return self.family in ("qwen3", "qwen3_moe")

    @property
    def has_qkv_bias(self) -> bool:
        """Whether the projections to query, key and value add a bias (Qwen2, Qwen2.5)."""
        return self.family == "qwen2"

    def padded_vocab_size(self, tensor_parallel: int) -> int:
        """Rows of the embedding on all tensor-parallel ranks together: the vocabulary, rounded up to a multiple."""
        return -(-self.vocab_size // tensor_parallel) * tensor_parallel


def read_model_shape(folder: str | Path) -> ModelShape:
    """Read `folder/config.json`, or the file itself where one is named.

    Raises UserError when the folder or file is missing or not JSON, the family is unknown, a key is missing or a feature
    (see `_refuse_unsupported`) is set that the actor does not have.
    """
    path = Path(folder) if Path(folder).is_file() else Path(folder) / "config.json"
    config = _read_json(path.parent, path)
    family = config.get("model_type")
    if family not in FAMILIES:
        raise UserError(f"{path}: model_type '{family}' is not supported; supported: {', '.join(FAMILIES)}")
    _refuse_unsupported(path, config)
    try:
        heads = int(config["num_attention_heads"])
        shape = ModelShape(
            family=family,
            num_layers=int(config["num_hidden_layers"]),
            hidden_size=int(config["hidden_size"]),
            intermediate_size=int(config["intermediate_size"]),
            num_attention_heads=heads,
            num_key_value_heads=int(_key_value_heads(config) or heads),
            head_dim=int(config.get("head_dim") or _default_head_dim(family, int(config["hidden_size"]), heads)),
            vocab_size=int(config["vocab_size"]),
            max_position_embeddings=int(config["max_position_embeddings"]),
            rms_norm_eps=float(config["rms_norm_eps"]),
            rope_theta=float(_rope(config)["rope_theta"]),
            tie_word_embeddings=bool(config.get("tie_word_embeddings", False)),
            **(_experts(path, config) if family == "qwen3_moe" else {}),
            rope_scaling=_rope_scaling(_rope(config)),
        )
    except KeyError as error:
        raise UserError(f"{path}: key {error} is missing") from None
    except (TypeError, ValueError) as error:
        raise UserError(f"{path}: a size is not a number: {error}") from None
    _check_heads(path, shape)
    return shape


def _check_heads(path: Path, shape: ModelShape) -> None:
    if shape.num_attention_heads % shape.num_key_value_heads:
        raise UserError(
            f"{path}: num_key_value_heads={shape.num_key_value_heads} does not divide num_attention_heads="
            f"{shape.num_attention_heads}: each key/value head is shared by as many query heads"
        )
    if shape.head_dim % 2:
        raise UserError(f"{path}: head_dim={shape.head_dim}: must be even, rotary embedding turns pairs")


def _key_value_heads(config: dict[str, Any]) -> int | None:
    """None stands for one a query head. Of Qwen a file must say it: transformers' default is a fixed number."""
    return config.get("num_key_value_heads") if config["model_type"] == "llama" else config["num_key_value_heads"]


def _experts(path: Path, config: dict[str, Any]) -> dict[str, Any]:
    """Return the fields of a mixture of experts. transformers 5 writes `num_local_experts`, older files `num_experts`."""
    if (step := config.get("decoder_sparse_step", 1)) != 1 or config.get("mlp_only_layers"):
        raise UserError(
            f"{path}: decoder_sparse_step={step}, mlp_only_layers={config.get('mlp_only_layers')}: dense layers between "
            "layers of experts are not supported; every layer must have experts (1 and [])"
        )
    num_experts = int(config["num_local_experts"] if "num_local_experts" in config else config["num_experts"])
    chosen, normalised = int(config["num_experts_per_tok"]), bool(config.get("norm_topk_prob", False))
    if not 1 <= chosen <= num_experts:
        raise UserError(f"{path}: num_experts_per_tok={chosen}: at least 1 and at most the {num_experts} experts")
    if chosen == 1 and normalised:
        raise UserError(
            f"{path}: num_experts_per_tok=1 with norm_topk_prob=true is not supported: the one expert has weight 1 "
            "whatever the router says, so the router has no gradient"
        )
    return {
        "num_experts": num_experts,
        "num_experts_per_tok": chosen,
        "moe_intermediate_size": int(config["moe_intermediate_size"]),
        "norm_topk_prob": normalised,
    }


def _read_json(folder: Path, path: Path) -> dict[str, Any]:
    if not folder.is_dir():
        raise UserError(f"model.path: {folder} is not a folder; expected a Hugging Face checkpoint folder")
    try:
        config = json.loads(path.read_text())
    except OSError as error:
        raise UserError(f"{path}: cannot read the model's configuration: {error.strerror}") from None
    except ValueError as error:
        raise UserError(f"{path}: not valid JSON: {error}") from None
    if not isinstance(config, dict):
        raise UserError(f"{path}: expected a JSON object")
    return config


def _default_head_dim(family: str, hidden_size: int, heads: int) -> int:
    """Return what transformers takes where the file names no head_dim."""
    return 128 if family == "qwen3" else hidden_size // heads


def _rope(config: dict[str, Any]) -> dict[str, Any]:
    """Rotary settings: transformers 5 writes `rope_parameters`, older files `rope_theta` and `rope_scaling`."""
    rope = dict(config.get("rope_parameters") or config.get("rope_scaling") or {})
    return rope if "rope_theta" in rope else {"rope_theta": config["rope_theta"], **rope}


def _rope_type(rope: dict[str, Any]) -> str:
    return str(rope.get("rope_type", rope.get("type", "default")))


def _rope_scaling(rope: dict[str, Any]) -> Llama3Rope | None:
    if _rope_type(rope) == "default":
        return None
    return Llama3Rope(
        factor=float(rope["factor"]),
        low_freq_factor=float(rope["low_freq_factor"]),
        high_freq_factor=float(rope["high_freq_factor"]),
        original_max_position_embeddings=int(rope["original_max_position_embeddings"]),
    )


def _refuse_unsupported(path: Path, config: dict[str, Any]) -> None:
    """Refuse what would load and then train another model than transformers and vLLM compute."""
    for setting, found in (_unsupported_anywhere(config) | _unsupported_rope(config)).items():
        if found:
            raise UserError(f"{path}: {setting} is not supported for model_type '{config['model_type']}'")


def _unsupported_anywhere(config: dict[str, Any]) -> dict[str, bool]:
    has_qkv_bias = config["model_type"] == "qwen2"  # always, whatever the file says
    kinds = sorted(set(config.get("layer_types") or ()) - {"full_attention"})
    return {
        f"attention_bias={config.get('attention_bias')}": config.get("attention_bias", has_qkv_bias) != has_qkv_bias,
        "mlp_bias": bool(config.get("mlp_bias")),
        "use_sliding_window": bool(config.get("use_sliding_window")),
        f"layer_types with {', '.join(map(str, kinds))}": bool(kinds),
        f"attention_dropout={config.get('attention_dropout')}": bool(config.get("attention_dropout")),
        "dual_chunk_attention_config": bool(config.get("dual_chunk_attention_config")),
        "quantization_config (quantized weights)": bool(config.get("quantization_config")),
        f"hidden_act={config.get('hidden_act')}": config.get("hidden_act") != "silu",
    }


def _unsupported_rope(config: dict[str, Any]) -> dict[str, bool]:
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
    rope_type = _rope_type(rope)
    by_layer = any(isinstance(value, dict) for value in rope.values())
    turned = rope.get("partial_rotary_factor", config.get("partial_rotary_factor"))
    return {
        "use_mrope": bool(config.get("use_mrope")),
        f"rope_type={rope_type}": rope_type not in ("default", "llama3"),
        "rope_parameters of each kind of layer": by_layer,
        f"partial_rotary_factor={turned}": turned not in (None, 1),
    }
