"""A GGUF file of the Llama type -> a Hugging Face folder that transformers, vLLM and the actor load.

    file -> metadata -> config.json, tokenizer.json, ...        (config here, tokenizer in `gguf_tokenizer.py`)
         -> tensors  -> dequantised, renamed, q/k rows restored -> model.safetensors

Every tensor of the file must be known, and every tensor of the architecture must be in the file with the right shape:
anything else is an error, nothing is skipped. (transformers' own reader passes over what it cannot name, needs
`accelerate`, refuses to save what it read, and forgets that this vocabulary splits numbers into digits.)

GGUF stores the rows of q and k so that rotary pairs are neighbours (2i, 2i+1); Hugging Face rotates halves (i, i+d/2).
"""

import json
import os
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from gguf import GGUFReader, dequantize
from numpy.typing import NDArray
from safetensors.torch import save_file
from tokenizers import Tokenizer

from a3po_megatron.convert.destination import refuse_existing, writing
from a3po_megatron.convert.gguf_tokenizer import build_tokenizer, tokenizer_config
from a3po_megatron.convert.weights import Summary
from a3po_megatron.errors import UserError

ARCHITECTURE = "llama"
DTypeName = Literal["float32", "bfloat16"]


@dataclass(frozen=True)
class TensorPlan:
    """Where one GGUF tensor goes. `rotary_heads` is the number of heads whose rows are permuted, 0 for none."""

    hf_name: str
    shape: tuple[int, ...]
    rotary_heads: int = 0


def convert_gguf_to_hf(source: Path, destination: Path, dtype: DTypeName = "float32") -> Summary:
    """Read `source` and write the folder `destination`, which must not exist; it appears only when it is complete.

    float32 keeps the dequantised values exactly; bfloat16 rounds them and halves the size.
    Raises UserError: file missing, not GGUF, truncated, of another architecture, or destination there already.
    """
    refuse_existing(destination)  # now, not after all tensors have been read
    reader = open_gguf(source)
    metadata = {name: field.contents() for name, field in reader.fields.items()}
    config = llama_config(source, metadata, reader, dtype)
    tokenizer = build_tokenizer(source, metadata)
    tensors = read_tensors(source, reader, plan_tensors(config), getattr(torch, dtype))
    if tokenizer.get_vocab_size() > config["vocab_size"]:
        counts = f"{tokenizer.get_vocab_size()} tokens, but an embedding of {config['vocab_size']} rows"
        raise UserError(f"{source}: {counts}")

    partial = destination.with_name(f"{destination.name}.partial-{os.getpid()}")
    try:
        with writing(destination):
            _write_folder(partial, tensors, tokenizer, config, metadata)
            partial.rename(destination)
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    sizes = [tensor.nbytes for tensor in tensors.values()]
    return Summary(
        num_tensors=len(tensors),
        num_parameters=sum(tensor.numel() for tensor in tensors.values()),
        num_bytes=sum(sizes),
        largest_bytes=max(sizes),
        dtypes=(dtype,),
    )


def _write_folder(
    folder: Path,
    tensors: Mapping[str, torch.Tensor],
    tokenizer: Tokenizer,
    config: Mapping[str, Any],
    metadata: Mapping[str, Any],
) -> None:
    folder.mkdir(parents=True)
    save_file(dict(tensors), folder / "model.safetensors", metadata={"format": "pt"})
    tokenizer.save(str(folder / "tokenizer.json"))
    shutil.copymode(folder / "tokenizer.json", folder / "model.safetensors")  # safetensors writes 0600
    _write_json(folder / "tokenizer_config.json", tokenizer_config(metadata, config["max_position_embeddings"]))
    _write_json(folder / "generation_config.json", _token_ids(metadata))
    _write_json(folder / "config.json", config)


def open_gguf(path: Path) -> GGUFReader:
    """Open a GGUF file; tensor data stays on disk until read. Raises UserError when it is not a whole GGUF file."""
    try:
        with path.open("rb") as file:
            magic = file.read(4)
    except OSError as error:
        raise UserError(f"{path}: cannot read the GGUF file: {error.strerror}") from None
    if magic != b"GGUF":
        raise UserError(f"{path}: not a GGUF file: it starts with {magic!r}, expected b'GGUF'")
    try:
        return GGUFReader(path)
    except (ValueError, IndexError, KeyError, OverflowError) as error:  # what the reader meets past the end of the file
        raise UserError(f"{path}: the GGUF file is truncated or damaged ({_one_line(error)}); fetch it again") from None


def llama_config(source: Path, metadata: Mapping[str, Any], reader: GGUFReader, dtype: DTypeName) -> dict[str, Any]:
    """The content of `config.json`. Raises UserError for another architecture or a variant that Llama's class lacks."""
    architecture = metadata.get("general.architecture")
    if architecture != ARCHITECTURE:
        raise UserError(f"{source}: architecture '{architecture}' is not supported; supported: {ARCHITECTURE}")

    def number(name: str, default: float | None = None) -> float:
        key = f"{ARCHITECTURE}.{name}"
        value = metadata.get(key, default)
        if not isinstance(value, int | float):
            raise UserError(f"{source}: metadata key '{key}' is {value!r}, expected one number")
        return value

    hidden_size, heads = int(number("embedding_length")), int(number("attention.head_count"))
    head_dim = int(number("attention.key_length", hidden_size // heads))
    if number("rope.dimension_count", head_dim) != head_dim:
        raise UserError(f"{source}: rotary embedding on part of a head is not supported (head_dim is {head_dim})")
    if metadata.get("llama.rope.scaling.type", "none") != "none":
        raise UserError(f"{source}: rope scaling '{metadata['llama.rope.scaling.type']}' is not supported")
    if metadata.get("llama.expert_count", 0):
        raise UserError(f"{source}: mixture-of-experts variants are not supported")
    shapes = {tensor.name: tensor.shape.tolist() for tensor in reader.tensors}
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "dtype": dtype,
        "vocab_size": shapes.get("token_embd.weight", [hidden_size, 0])[1],  # a missing one is reported later
        "hidden_size": hidden_size,
        "intermediate_size": int(number("feed_forward_length")),
        "num_hidden_layers": int(number("block_count")),
        "num_attention_heads": heads,
        "num_key_value_heads": int(number("attention.head_count_kv", heads)),
        "head_dim": head_dim,
        "hidden_act": "silu",
        "max_position_embeddings": int(number("context_length")),
        "rms_norm_eps": _shortest_decimal(number("attention.layer_norm_rms_epsilon")),
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": _shortest_decimal(number("rope.freq_base", 10000.0)),
        },
        "tie_word_embeddings": "output.weight" not in shapes,
        "attention_bias": False,
        "mlp_bias": False,
        **_token_ids(metadata),
    }


def plan_tensors(config: Mapping[str, Any]) -> dict[str, TensorPlan]:
    """GGUF name -> target, for every tensor that a model of this `config.json` has."""
    hidden, ffn, vocab = config["hidden_size"], config["intermediate_size"], config["vocab_size"]
    heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
    query_size, kv_size = heads * config["head_dim"], kv_heads * config["head_dim"]
    plan = {
        "token_embd.weight": TensorPlan("model.embed_tokens.weight", (vocab, hidden)),
        "output_norm.weight": TensorPlan("model.norm.weight", (hidden,)),
    }
    if not config["tie_word_embeddings"]:
        plan["output.weight"] = TensorPlan("lm_head.weight", (vocab, hidden))
    for layer in range(config["num_hidden_layers"]):
        block, hf = f"blk.{layer}", f"model.layers.{layer}"
        plan |= {
            f"{block}.attn_norm.weight": TensorPlan(f"{hf}.input_layernorm.weight", (hidden,)),
            f"{block}.attn_q.weight": TensorPlan(f"{hf}.self_attn.q_proj.weight", (query_size, hidden), heads),
            f"{block}.attn_k.weight": TensorPlan(f"{hf}.self_attn.k_proj.weight", (kv_size, hidden), kv_heads),
            f"{block}.attn_v.weight": TensorPlan(f"{hf}.self_attn.v_proj.weight", (kv_size, hidden)),
            f"{block}.attn_output.weight": TensorPlan(f"{hf}.self_attn.o_proj.weight", (hidden, query_size)),
            f"{block}.ffn_norm.weight": TensorPlan(f"{hf}.post_attention_layernorm.weight", (hidden,)),
            f"{block}.ffn_gate.weight": TensorPlan(f"{hf}.mlp.gate_proj.weight", (ffn, hidden)),
            f"{block}.ffn_up.weight": TensorPlan(f"{hf}.mlp.up_proj.weight", (ffn, hidden)),
            f"{block}.ffn_down.weight": TensorPlan(f"{hf}.mlp.down_proj.weight", (hidden, ffn)),
        }
    return plan


def read_tensors(
    source: Path, reader: GGUFReader, plan: Mapping[str, TensorPlan], dtype: torch.dtype
) -> dict[str, torch.Tensor]:
    """Hugging Face name -> dequantised tensor. Raises UserError for a tensor unmapped, missing or of another shape."""
    names = [tensor.name for tensor in reader.tensors]
    if unmapped := [name for name in names if name not in plan]:
        raise UserError(f"{source}: no place for tensor '{unmapped[0]}' in a Llama model ({len(unmapped)} such)")
    if missing := [name for name in plan if name not in names]:
        raise UserError(f"{source}: tensor '{missing[0]}' is missing ({len(missing)} such)")
    tensors = {}
    for tensor in reader.tensors:
        target = plan[tensor.name]
        shape = tuple(reversed(tensor.shape.tolist()))  # GGUF names the fastest dimension first
        if shape != target.shape:
            raise UserError(f"{source}: tensor '{tensor.name}' has shape {shape}, the metadata asks for {target.shape}")
        try:
            values = dequantize(tensor.data, tensor.tensor_type).reshape(shape)
        except NotImplementedError:
            raise UserError(f"{source}: tensor '{tensor.name}': cannot dequantise {tensor.tensor_type.name}") from None
        if target.rotary_heads:
            values = restore_rotary_rows(values, target.rotary_heads)
        tensors[target.hf_name] = torch.from_numpy(np.array(values, dtype=np.float32)).to(dtype)
    return tensors


def restore_rotary_rows(weight: NDArray[Any], num_heads: int) -> NDArray[Any]:
    """Reorder the rows of each head from neighbouring pairs to halves: [a0 b0 a1 b1] -> [a0 a1 b0 b1]."""
    rows, columns = weight.shape
    pairs = weight.reshape(num_heads, rows // num_heads // 2, 2, columns)
    return pairs.swapaxes(1, 2).reshape(rows, columns)


def _token_ids(metadata: Mapping[str, Any]) -> dict[str, int]:
    names = {"bos_token_id": "bos_token_id", "eos_token_id": "eos_token_id", "pad_token_id": "padding_token_id"}
    keys = {hf: f"tokenizer.ggml.{ggml}" for hf, ggml in names.items()}
    return {hf: int(metadata[key]) for hf, key in keys.items() if key in metadata}


def _shortest_decimal(value: float) -> float:
    """GGUF holds float32: 9.999999747378752e-06 was written as 1e-05, and is the same float32."""
    return float(str(np.float32(value)))


def _write_json(path: Path, content: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split()) or type(error).__name__
