"""GSM8K: JSON lines with `question` and `answer`, whose last line is `#### 42` -> problems.

Answers carry thousands commas and minus signs; they leave here as plain decimal text (`#### -1,234` -> `-1234`).
"""

import json
import os
from dataclasses import dataclass
from decimal import Decimal, InvalidOperation
from pathlib import Path

from a3po_megatron.data.tokenizer import ChatTokenizer
from a3po_megatron.errors import UserError
from a3po_megatron.records import Problem

INSTRUCTION = "Think step by step. Write the final answer, a number, on the last line after ####."
CHECKOUT = Path(__file__).resolve().parents[2]


@dataclass(frozen=True)
class Row:
    """One question with its final answer as plain decimal text; `line` counts from 1."""

    line: int
    question: str
    answer: str


def data_folder() -> Path:
    """Return the folder that holds `gsm8k/`: A3PO_DATA or shared/data beside the checkout. UserError when not there."""
    folder = Path(os.environ.get("A3PO_DATA") or CHECKOUT.parent / "shared" / "data")
    if not folder.is_dir():
        raise UserError(f"data folder {folder} is not there; set A3PO_DATA to the folder that holds gsm8k/")
    return folder


def read_gsm8k(path: str | Path) -> list[Row]:
    """Read every row of a GSM8K file, in order. Raises UserError naming file and line for the first unreadable one."""
    try:
        lines = Path(path).read_text(encoding="utf-8").removesuffix("\n").split("\n")
    except OSError as error:
        raise UserError(f"{path}: cannot read the GSM8K file: {error.strerror}") from None
    except UnicodeDecodeError as error:
        raise UserError(f"{path}: not UTF-8 text: {error.reason} at byte {error.start}") from None
    if lines == [""]:
        raise UserError(f"{path}: the GSM8K file is empty")
    return [_parse_row(f"{path}, line {number}", number, line) for number, line in enumerate(lines, start=1)]


def load_gsm8k(path: str | Path, tokenizer: ChatTokenizer, instruction: str = INSTRUCTION) -> list[Problem]:
    """Return one problem a row, its prompt a user's message `question + instruction` in the model's chat template.

    Ids are `gsm8k/<file stem>/<line>`, unique and stable. Raises UserError as `read_gsm8k` and `ChatTokenizer` do.
    """
    stem = Path(path).stem
    return [
        Problem(
            id=f"gsm8k/{stem}/{row.line}",
            prompt_ids=tokenizer.chat_ids([{"role": "user", "content": f"{row.question}\n{instruction}".strip()}]),
            answer=row.answer,
        )
        for row in read_gsm8k(path)
    ]


def _parse_row(where: str, number: int, line: str) -> Row:
    try:
        row = json.loads(line)
    except ValueError as error:
        raise UserError(f"{where}: not valid JSON: {error}") from None
    if not isinstance(row, dict):
        raise UserError(f"{where}: expected an object with 'question' and 'answer'")
    for key in ("question", "answer"):
        if not isinstance(row.get(key), str) or not row[key].strip():
            raise UserError(f"{where}: '{key}' is missing, empty or not text")
    _, marker, answer = row["answer"].rpartition("####")
    answer = answer.strip().replace(",", "")
    if not marker or not _is_number(answer):
        raise UserError(f"{where}: the answer ends with {row['answer'][-20:]!r}, expected '#### ' and a number")
    return Row(number, row["question"], answer)


def _is_number(text: str) -> bool:
    try:
        return Decimal(text).is_finite()
    except InvalidOperation:
        return False
