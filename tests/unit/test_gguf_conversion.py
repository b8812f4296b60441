"""GGUF -> Hugging Face at tiny size, against the independent reading in `tests/references/gguf_llama.py`."""

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType, GGUFWriter, quantize
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from a3po_megatron.convert.gguf import convert_gguf_to_hf, restore_rotary_rows
from a3po_megatron.errors import UserError
from tests.references.gguf_llama import gguf_logits

CHECKOUT = Path(__file__).resolve().parents[2]
HIDDEN, FFN, HEADS, KV_HEADS, LAYERS = 64, 96, 4, 2, 2
SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
LETTERS = [*"0123456789abcdefghijklmnopqrstuvwxyz+=.#", "Ġ", "Ċ"]
# "1 2" makes "12" a token that only a rule without digit splitting can reach
MERGES = ["a b", "Ġ ab", "1 2"]
TOKENS = [*SPECIAL, *LETTERS, "ab", "Ġab", "12"]
TEMPLATE = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\\n' + m['content'] + '<|im_end|>\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)


def write_gguf(
    path: Path,
    *,
    tied: bool = True,
    architecture: str = "llama",
    pre: str = "smollm",
    extra_tensor: str | None = None,
    skip_tensor: str | None = None,
    extra_key: tuple[str, Any] | None = None,
) -> Path:
    """A random tiny Llama as llama.cpp stores one: Q4_1 matrices, Q8_0 embedding, F32 norms."""
    rng = np.random.default_rng(0)
    writer = GGUFWriter(path, architecture)
    writer.add_block_count(LAYERS)
    writer.add_context_length(128)
    writer.add_embedding_length(HIDDEN)
    writer.add_feed_forward_length(FFN)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_rope_freq_base(10000.0)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_dimension_count(HIDDEN // HEADS)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre)
    writer.add_token_list(TOKENS)
    writer.add_token_types([3] * len(SPECIAL) + [1] * (len(TOKENS) - len(SPECIAL)))
    writer.add_token_merges(MERGES)
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_pad_token_id(2)
    writer.add_unk_token_id(0)
    writer.add_chat_template(TEMPLATE)
    if extra_key is not None:
        writer.add_string(*extra_key)

    def add(name: str, shape: tuple[int, ...], kind: GGMLQuantizationType) -> None:
        if name == skip_tensor:
            return
        values = rng.normal(0, 0.2, shape).astype(np.float32) + (1.0 if len(shape) == 1 else 0.0)
        writer.add_tensor(f"{name}.weight", quantize(values, kind), raw_dtype=kind)

    q4, q8, f32 = GGMLQuantizationType.Q4_1, GGMLQuantizationType.Q8_0, GGMLQuantizationType.F32
    kv_size = HIDDEN // HEADS * KV_HEADS
    add("token_embd", (len(TOKENS), HIDDEN), q8)
    add("output_norm", (HIDDEN,), f32)
    if not tied:
        add("output", (len(TOKENS), HIDDEN), q8)
    if extra_tensor:
        add(extra_tensor, (HIDDEN,), f32)
    for layer in range(LAYERS):
        for name, shape, kind in (
            ("attn_norm", (HIDDEN,), f32),
            ("attn_q", (HIDDEN, HIDDEN), q4),
            ("attn_k", (kv_size, HIDDEN), q4),
            ("attn_v", (kv_size, HIDDEN), q4),
            ("attn_output", (HIDDEN, HIDDEN), q4),
            ("ffn_norm", (HIDDEN,), f32),
            ("ffn_gate", (FFN, HIDDEN), q4),
            ("ffn_up", (FFN, HIDDEN), q4),
            ("ffn_down", (HIDDEN, FFN), q4),
        ):
            add(f"blk.{layer}.{name}", shape, kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.mark.parametrize("tied", [True, False])
def test_converted_model_has_the_logits_of_an_independent_reading(tmp_path: Path, tied: bool) -> None:
    source = write_gguf(tmp_path / "tiny.gguf", tied=tied)
    convert_gguf_to_hf(source, tmp_path / "hf")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "hf", dtype=torch.float32, attn_implementation="eager")
    token_ids = [1, 10, 20, 3, 44, 7, 2, 30, 31, 45]
    with torch.no_grad():
        logits = model(torch.tensor([token_ids])).logits[0]
    expected = gguf_logits(source, token_ids)
    assert expected.std() > 0.1, "the reference must not be flat"
    torch.testing.assert_close(logits, expected, rtol=0, atol=1e-5)  # float32 sums in another order; logits of order 1


def test_rotary_rows_go_from_neighbours_to_halves_in_each_head() -> None:
    stored = np.array([[0], [10], [1], [11], [20], [30], [21], [31]])  # 2 heads of 4 rows: a0 b0 a1 b1
    assert restore_rotary_rows(stored, num_heads=2)[:, 0].tolist() == [0, 1, 10, 11, 20, 21, 30, 31]


def test_bfloat16_is_the_float32_folder_rounded(tmp_path: Path) -> None:
    source = write_gguf(tmp_path / "tiny.gguf")
    convert_gguf_to_hf(source, tmp_path / "f32", "float32")
    convert_gguf_to_hf(source, tmp_path / "bf16", "bfloat16")
    exact, rounded = (load_file(tmp_path / name / "model.safetensors") for name in ("f32", "bf16"))
    assert exact.keys() == rounded.keys()
    for name in exact:
        assert torch.equal(exact[name].to(torch.bfloat16), rounded[name]), name
    assert AutoModelForCausalLM.from_pretrained(tmp_path / "bf16").dtype == torch.bfloat16


def test_tokenizer_splits_digits_matches_special_tokens_and_knows_the_template(tmp_path: Path) -> None:
    convert_gguf_to_hf(write_gguf(tmp_path / "tiny.gguf"), tmp_path / "hf")
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "hf")
    assert tokenizer.convert_ids_to_tokens(tokenizer("12 ab<|im_end|>").input_ids) == ["1", "2", "Ġab", "<|im_end|>"]
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.pad_token_id) == (1, 2, 2)
    assert len(tokenizer) == len(TOKENS)
    messages = [{"role": "user", "content": "1+1="}]
    chat = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    assert chat == "<|im_start|>user\n1+1=<|im_end|>\n<|im_start|>assistant\n"


def test_plain_gpt2_rule_keeps_digits_together(tmp_path: Path) -> None:
    convert_gguf_to_hf(write_gguf(tmp_path / "tiny.gguf", pre="gpt-2"), tmp_path / "hf")
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "hf")
    assert tokenizer.convert_ids_to_tokens(tokenizer("12").input_ids) == ["12"]


def not_gguf(path: Path) -> Path:
    path.write_bytes(b"PK\x03\x04 a zip file")
    return path


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda path: path, "cannot read the GGUF file: No such file"),
        (not_gguf, "not a GGUF file"),
        (lambda path: write_gguf(path, architecture="gemma"), "architecture 'gemma' is not supported"),
        (lambda path: write_gguf(path, extra_tensor="rope_freqs"), "no place for tensor 'rope_freqs.weight'"),
        (lambda path: write_gguf(path, skip_tensor="blk.1.attn_v"), "'blk.1.attn_v.weight' is missing"),
        (lambda path: write_gguf(path, skip_tensor="token_embd"), "'token_embd.weight' is missing"),
        (lambda path: write_gguf(path, pre="qwen2"), "tokenizer.ggml.pre 'qwen2' is not supported"),
        (lambda path: write_gguf(path, extra_key=("llama.rope.scaling.type", "yarn")), "rope scaling 'yarn'"),
    ],
)
def test_wrong_source_gives_one_clear_line_and_leaves_nothing(
    tmp_path: Path, make: Callable[[Path], Path], message: str
) -> None:
    source = make(tmp_path / "model.gguf")
    with pytest.raises(UserError) as error:
        convert_gguf_to_hf(source, tmp_path / "hf")
    assert message in str(error.value)
    assert str(source) in str(error.value)
    assert "\n" not in str(error.value)
    assert [path.name for path in tmp_path.iterdir() if path != source] == []


def test_file_cut_anywhere_is_called_truncated(tmp_path: Path) -> None:
    whole = write_gguf(tmp_path / "whole.gguf").read_bytes()
    cut = tmp_path / "cut.gguf"
    for size in [4, 10, 24, 30, 100, len(whole) // 10, len(whole) // 2, len(whole) - 100]:
        cut.write_bytes(whole[:size])
        with pytest.raises(UserError, match=r"cut\.gguf: the GGUF file is truncated or damaged"):
            convert_gguf_to_hf(cut, tmp_path / "hf")
    assert not (tmp_path / "hf").exists()


def test_command_line_converts_once_and_refuses_an_existing_destination(tmp_path: Path) -> None:
    source, destination = write_gguf(tmp_path / "tiny.gguf"), tmp_path / "models" / "tiny"
    command = [sys.executable, "tools/convert_checkpoint.py", "gguf-to-hf", str(source), str(destination)]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(CHECKOUT), os.environ.get("PYTHONPATH", "")])}

    def run() -> subprocess.CompletedProcess[str]:
        return subprocess.run(command, cwd=CHECKOUT, env=environment, capture_output=True, text=True, timeout=60)

    first = run()
    assert (first.returncode, first.stderr) == (0, "")
    assert {path.name for path in destination.iterdir()} == {
        "config.json",
        "generation_config.json",
        "model.safetensors",
        "tokenizer.json",
        "tokenizer_config.json",
    }
    second = run()
    assert second.returncode == 2
    assert second.stderr == f"error: {destination}: exists already; remove it or choose another destination\n"
