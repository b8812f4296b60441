"""Text <-> token ids with the tokenizer and chat template of a Hugging Face folder.

Uses `tokenizers` and jinja2 directly: transformers' AutoTokenizer gives the same ids, but imports torch, which the
controller's side does without.
"""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jinja2
import jinja2.ext
import numpy as np
from jinja2.sandbox import ImmutableSandboxedEnvironment
from tokenizers import Tokenizer

from a3po_megatron.errors import UserError
from a3po_megatron.records import Int32

SPECIAL_ROLES = ("bos_token", "eos_token", "unk_token", "pad_token")


class ChatTokenizer:
    """The tokenizer of one model folder. Never adds special tokens of its own: the template writes them."""

    def __init__(self, folder: str | Path):
        """Read `tokenizer.json`, `tokenizer_config.json` and, if there, `chat_template.jinja`.

        Raises UserError when a file is missing or damaged. A folder without a chat template serves for plain text.
        """
        self.folder = Path(folder)
        path = self.folder / "tokenizer.json"
        if not path.is_file():
            raise UserError(f"{path}: not found; expected a Hugging Face folder with a tokenizer")
        try:
            self._tokenizer = Tokenizer.from_file(str(path))
        except Exception as error:  # tokenizers raises plain Exception
            raise UserError(f"{path}: not a tokenizer: {' '.join(str(error).split())}") from None
        config = _read_json(self.folder / "tokenizer_config.json")
        self._special_tokens = {role: _content(config[role]) for role in SPECIAL_ROLES if config.get(role)}
        self._template = self._compile_template(config)

    def encode(self, text: str) -> Int32:
        """Return the token ids of `text`, [len]; special tokens written out in the text become their ids."""
        return np.array(self._tokenizer.encode(text, add_special_tokens=False).ids, dtype=np.int32)

    @property
    def has_chat_template(self) -> bool:
        """Whether `render_chat` can work."""
        return self._template is not None

    def encode_document(self, text: str) -> Int32:
        """Return the token ids of `text` as the tokenizer itself begins a text, [len]: with `<s>` where it has one."""
        return np.array(self._tokenizer.encode(text).ids, dtype=np.int32)

    def decode(self, token_ids: Sequence[int] | Int32, *, skip_special_tokens: bool = True) -> str:
        """Return the text of token ids."""
        return self._tokenizer.decode([int(token) for token in token_ids], skip_special_tokens=skip_special_tokens)

    def render_chat(self, messages: Sequence[Mapping[str, str]], **options: Any) -> str:
        """Return the prompt text for `messages` (role, content), up to where the assistant begins to speak.

        `options` reach the template, for example `enable_thinking=False` for Qwen3. Raises UserError when there is no
        template or it refuses the messages.
        """
        if self._template is None:
            raise UserError(f"{self.folder}: no chat template (in tokenizer_config.json or chat_template.jinja)")
        variables = {**self._special_tokens, "messages": messages, "add_generation_prompt": True, **options}
        try:
            return self._template.render(variables)
        except jinja2.TemplateError as error:
            raise UserError(f"{self.folder}: the chat template refuses these messages: {error.message}") from None

    def chat_ids(self, messages: Sequence[Mapping[str, str]], **options: Any) -> Int32:
        """Return the token ids, [P], of `render_chat`."""
        return self.encode(self.render_chat(messages, **options))

    def _compile_template(self, config: Mapping[str, Any]) -> jinja2.Template | None:
        path = self.folder / "chat_template.jinja"
        source = path.read_text(encoding="utf-8") if path.is_file() else config.get("chat_template")
        if source is None:
            return None
        if not isinstance(source, str):
            raise UserError(f"{self.folder / 'tokenizer_config.json'}: chat_template is not one template but several")
        # As transformers sets it up, without strftime_now: a prompt that names today's date is another one tomorrow.
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[jinja2.ext.loopcontrols]
        )
        environment.filters["tojson"] = lambda value, **options: json.dumps(value, ensure_ascii=False, **options)
        environment.globals["raise_exception"] = _raise_template_error
        try:
            return environment.from_string(source)
        except jinja2.TemplateError as error:
            raise UserError(f"{self.folder}: the chat template does not parse: {error.message}") from None


def _raise_template_error(message: str) -> None:
    raise jinja2.TemplateError(message)


def _content(token: str | Mapping[str, Any]) -> str:
    """A special token is written as a string or as an object with `content`."""
    return token if isinstance(token, str) else str(token["content"])


def _read_json(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise UserError(f"{path}: cannot read: {error.strerror}") from None
    except ValueError as error:
        raise UserError(f"{path}: not valid JSON: {error}") from None
    if not isinstance(content, dict):
        raise UserError(f"{path}: expected a JSON object")
    return content
