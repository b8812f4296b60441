"""Sums `a+b=`: a task that a model of 0.4 million parameters learns in minutes. No tokenizer: one character, one token.

    id      0      1      2..11   12  13
    token  <pad>  <eos>   0..9    +   =      (the vocabulary is padded to 16)

Question (7, 25) is the prompt `7+25=`, ids [9, 12, 4, 7, 13]; its answer is `32<eos>`, ids [5, 4, 1].
"""

import random
from collections.abc import Iterable

import numpy as np

from a3po_megatron.config.data import ArithmeticTaskConfig
from a3po_megatron.errors import UserError
from a3po_megatron.records import Int32, Problem

Question = tuple[int, int]

TOKENS = ("<pad>", "<eos>", *"0123456789+=")
PAD_ID, EOS_ID = 0, 1
VOCAB_SIZE = 16
_ID_OF = {token: token_id for token_id, token in enumerate(TOKENS)}


class ArithmeticTask:
    """All questions with operands up to `max_operand`, shuffled once and split into held-out and train."""

    def __init__(self, config: ArithmeticTaskConfig) -> None:
        """Raises UserError if the held-out questions leave none to train on."""
        operands = range(config.max_operand + 1)
        questions = [(a, b) for a in operands for b in operands]
        if not 0 <= config.num_heldout < len(questions):
            raise UserError(
                f"arithmetic.num_heldout={config.num_heldout}: there are {len(questions)} questions with "
                f"max_operand={config.max_operand}; hold out fewer"
            )
        random.Random(config.split_seed).shuffle(questions)
        self.heldout_questions: list[Question] = questions[: config.num_heldout]
        self.train_questions: list[Question] = questions[config.num_heldout :]

    def encode(self, question: Question) -> tuple[Int32, Int32]:
        """Return (prompt ids, answer ids with the end token)."""
        a, b = question
        return encode_text(f"{a}+{b}="), np.append(encode_text(str(a + b)), np.int32(EOS_ID))

    def problems(self, questions: Iterable[Question]) -> list[Problem]:
        """Return the records of `questions`, in their order; the id is the sum as text."""
        return [Problem(f"{a}+{b}", encode_text(f"{a}+{b}="), str(a + b), "arithmetic") for a, b in questions]


def encode_text(text: str) -> Int32:
    """Return one token id a character; raises KeyError on a character outside the vocabulary."""
    return np.array([_ID_OF[character] for character in text], dtype=np.int32)


def decode_ids(token_ids: Iterable[int]) -> str:
    """Return the tokens' text, `<pad>` and `<eos>` spelt out; ids of the vocabulary's padding become `<14>`, `<15>`."""
    return "".join(TOKENS[i] if i < len(TOKENS) else f"<{i}>" for i in map(int, token_ids))
