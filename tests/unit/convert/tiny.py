"""Tiny Hugging Face folders of every family, made without transformers: random values, norms and biases among them."""

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from a3po_megatron.actor.hf_mapping import hf_shapes
from a3po_megatron.config.model_shape import read_model_shape

SIZES: dict[str, Any] = {
    "hidden_size": 24,
    "intermediate_size": 40,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 6,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1e4,
    "hidden_act": "silu",
}
LLAMA3 = {
    "rope_scaling": {
        "rope_type": "llama3",
        "factor": 4.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 2.0,
        "original_max_position_embeddings": 16,
    }
}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "norm_topk_prob": True}
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {"model_type": "llama"},
    "llama3": {"model_type": "llama", **LLAMA3},
    "qwen2": {"model_type": "qwen2"},
    "qwen3": {"model_type": "qwen3"},
    "qwen3_moe": {"model_type": "qwen3_moe", **EXPERTS},
}


def make_folder(
    folder: Path,
    family: str = "qwen3",
    *,
    tied: bool = False,
    vocab: int = 131,
    dtype: torch.dtype = torch.float32,
    **sizes: Any,
) -> Path:
    """Write a folder and return it."""
    folder.mkdir(parents=True)
    config = {**SIZES, **FAMILIES[family], "vocab_size": vocab, "tie_word_embeddings": tied, **sizes}
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "tokenizer.json").write_text('{"a": "tokenizer"}')
    generator = torch.Generator().manual_seed(0)
    shapes = hf_shapes(read_model_shape(folder))
    tensors = {name: torch.randn(shape, generator=generator).to(dtype) for name, shape in shapes.items()}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def tensors_of(folder: Path) -> dict[str, torch.Tensor]:
    """Return every tensor of a folder, read by safetensors itself."""
    return {name: tensor for file in folder.glob("*.safetensors") for name, tensor in load_file(file).items()}


def change(folder: Path, **changes: Any) -> Path:
    """Change keys of config.json."""
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))
    return folder
