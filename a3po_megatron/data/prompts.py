"""A problem's text -> the token ids that the model reads: instruction around it, system prompt, chat template."""

from typing import Any

from a3po_megatron.config.data import PromptConfig
from a3po_megatron.data.sets import INSTRUCTIONS
from a3po_megatron.data.text import Instruction
from a3po_megatron.data.tokenizer import ChatTokenizer
from a3po_megatron.errors import UserError
from a3po_megatron.records import Int32


class PromptWriter:
    """Writes prompts as the settings say, with one model's tokenizer."""

    def __init__(self, config: PromptConfig, tokenizer: ChatTokenizer) -> None:
        """Raises UserError when the tokenizer's chat template cannot do what the settings ask for."""
        self._config, self._tokenizer = config, tokenizer
        self._options: dict[str, Any] = (
            {} if config.thinking == "template" else {"enable_thinking": config.thinking == "enabled"}
        )
        if config.style == "plain":
            return
        if not tokenizer.has_chat_template:
            raise UserError(
                f"{tokenizer.folder}: the tokenizer has no chat template; use an instruct model, or data.prompt.style=plain "
                "for a base model, which then reads the problem and its instruction as they are"
            )
        if self._options:
            question = [{"role": "user", "content": "?"}]
            on, off = (tokenizer.render_chat(question, enable_thinking=value) for value in (True, False))
            if on == off:
                raise UserError(
                    f"data.prompt.thinking={config.thinking}: the chat template of {tokenizer.folder} has no "
                    "enable_thinking; use data.prompt.thinking=template"
                )

    def text(self, problem: str, own: Instruction) -> str:
        """Return the problem within its instruction; `own` is that of its set."""
        name = self._config.instruction
        if name == "own":
            return own.around(problem)
        if name == "custom":
            return Instruction(self._config.prefix, self._config.suffix).around(problem)
        return INSTRUCTIONS[name].around(problem)

    def ids(self, problem: str, own: Instruction) -> Int32:
        """Return the token ids [P] of the whole prompt, up to where the response begins."""
        text = self.text(problem, own)
        if self._config.style == "plain":
            return self._tokenizer.encode_document(text)
        system = [{"role": "system", "content": self._config.system}] if self._config.system else []
        return self._tokenizer.chat_ids([*system, {"role": "user", "content": text}], **self._options)
