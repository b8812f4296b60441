"""The torch-free tokenizer against transformers' own."""

from pathlib import Path

import pytest

from a3po_megatron.data.rows import read_rows
from a3po_megatron.data.tokenizer import ChatTokenizer
from a3po_megatron.errors import UserError

CHAT = [{"role": "user", "content": "What is 1,234 + 5?\n  Réponse: <|im_end|> 中"}]


@pytest.mark.parametrize("options", [{}, {"enable_thinking": False}, {"enable_thinking": True}])
def test_chat_ids_equal_transformers(published: Path, options: dict[str, bool]) -> None:
    from transformers import AutoTokenizer

    folder = published / "qwen3_tokenizer"
    reference = AutoTokenizer.from_pretrained(folder)
    expected = reference.apply_chat_template(CHAT, add_generation_prompt=True, return_dict=False, **options)
    tokenizer = ChatTokenizer(folder)
    assert tokenizer.chat_ids(CHAT, **options).tolist() == expected
    assert tokenizer.decode(expected) == reference.decode(expected, skip_special_tokens=True)
    for _, _, row in read_rows(str(published / "dapo" / "official_format_sample14.jsonl"), "", ""):
        expected = reference.apply_chat_template(
            row["prompt"], add_generation_prompt=True, return_dict=False, **options
        )
        assert tokenizer.chat_ids(row["prompt"], **options).tolist() == expected
    assert tokenizer.encode_document("1 + 1 =").tolist() == reference("1 + 1 =").input_ids


def test_folder_without_tokenizer_or_template_is_named(tmp_path: Path, published: Path) -> None:
    with pytest.raises(UserError, match=r"tokenizer\.json: not found"):
        ChatTokenizer(tmp_path)
    (tmp_path / "tokenizer.json").write_bytes((published / "qwen3_tokenizer" / "tokenizer.json").read_bytes())
    (tmp_path / "tokenizer_config.json").write_text('{"eos_token": {"content": "<|im_end|>"}}')
    plain = ChatTokenizer(tmp_path)
    assert plain.decode(plain.encode("1+2=3")) == "1+2=3"
    with pytest.raises(UserError, match="no chat template"):
        plain.chat_ids(CHAT)
    (tmp_path / "chat_template.jinja").write_text("{{ raise_exception('only a system message') }}")
    with pytest.raises(UserError, match="refuses these messages: only a system message"):
        ChatTokenizer(tmp_path).chat_ids(CHAT)
