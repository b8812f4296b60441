"""The tokenizer inside a GGUF file -> `tokenizer.json` and `tokenizer_config.json`.

GGUF keeps vocabulary, merges and token kinds, but only a *name* for the rule that cuts text before the merges apply
(`tokenizer.ggml.pre`). A wrong rule still decodes well and quietly gives other token ids: an unknown name is an error.
"""

from collections.abc import Mapping
from enum import IntEnum
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from a3po_megatron.errors import UserError

DIGITS_THEN_GPT2 = ("smollm", "starcoder", "refact")  # every digit is a token of its own
GPT2 = ("gpt-2",)


class TokenKind(IntEnum):
    """Values of `tokenizer.ggml.token_type` that mark tokens matched whole in the text."""

    CONTROL = 3
    USER_DEFINED = 4


def build_tokenizer(source: Path, metadata: Mapping[str, Any]) -> Tokenizer:
    """Return the byte-level BPE tokenizer that the file describes. Raises UserError for any other kind."""
    if (model := metadata.get("tokenizer.ggml.model")) != "gpt2":
        raise UserError(f"{source}: tokenizer model '{model}' is not supported; supported: gpt2 (byte-level BPE)")
    if missing := [key for key in ("tokens", "merges", "token_type") if f"tokenizer.ggml.{key}" not in metadata]:
        raise UserError(f"{source}: key 'tokenizer.ggml.{missing[0]}' is missing from the metadata")
    for key in ("add_bos_token", "add_eos_token", "add_space_prefix"):
        if metadata.get(f"tokenizer.ggml.{key}", False):
            raise UserError(f"{source}: tokenizer.ggml.{key}=true is not supported; expected false")

    tokens, kinds = metadata["tokenizer.ggml.tokens"], metadata["tokenizer.ggml.token_type"]
    vocabulary = {token: index for index, token in enumerate(tokens)}
    if len(vocabulary) != len(tokens):
        raise UserError(f"{source}: {len(tokens) - len(vocabulary)} tokens appear twice in the vocabulary")
    merges = [tuple(merge.split(" ", 1)) for merge in metadata["tokenizer.ggml.merges"]]
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=merges))
    tokenizer.pre_tokenizer = _pre_tokenizer(source, metadata.get("tokenizer.ggml.pre"))
    tokenizer.decoder = decoders.ByteLevel()
    for token, kind in zip(tokens, kinds, strict=True):
        if kind == TokenKind.CONTROL:
            tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False)])
        elif kind == TokenKind.USER_DEFINED:
            tokenizer.add_tokens([AddedToken(token, normalized=False)])
    return tokenizer


def tokenizer_config(metadata: Mapping[str, Any], max_length: int) -> dict[str, Any]:
    """The content of `tokenizer_config.json`: special tokens by role and the chat template."""
    tokens = metadata["tokenizer.ggml.tokens"]
    roles = {"bos_token": "bos", "eos_token": "eos", "unk_token": "unknown", "pad_token": "padding"}
    config: dict[str, Any] = {
        "tokenizer_class": "PreTrainedTokenizerFast",  # takes tokenizer.json as it is; a named class may rebuild it
        "model_max_length": max_length,
        "clean_up_tokenization_spaces": False,
    }
    for role, name in roles.items():
        if (index := metadata.get(f"tokenizer.ggml.{name}_token_id")) is not None:
            config[role] = tokens[index]
    if "tokenizer.chat_template" in metadata:
        config["chat_template"] = metadata["tokenizer.chat_template"]
    return config


def _pre_tokenizer(source: Path, name: str | None) -> pre_tokenizers.PreTokenizer:
    gpt2 = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    if name in DIGITS_THEN_GPT2:
        return pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), gpt2])
    if name in GPT2:
        return gpt2
    supported = ", ".join((*DIGITS_THEN_GPT2, *GPT2))
    raise UserError(f"{source}: tokenizer.ggml.pre '{name}' is not supported; supported: {supported}")
