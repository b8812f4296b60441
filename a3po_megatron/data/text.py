"""Problems and answers as text: instructions taken off, answers in one spelling, keys by which two problems are the same.

Two keys, because the two uses err on different sides. Of two training rows that are told apart by a sign only
(`x^8 - 98x^4 + 1` and `x^8 + 98x^4 + 1`) both are kept; a training row that is told apart from an evaluation problem by
its signs, brackets or way of writing LaTeX only is one too many.
"""

import re
import unicodedata
from dataclasses import dataclass
from typing import Any

DAPO_PREFIX = (
    "Solve the following math problem step by step. The last line of your response should be of the form "
    "Answer: $Answer (without quotes) where $Answer is the answer to the problem.\n\n"
)
DAPO_SUFFIX = '\n\nRemember to put your answer on its own line after "Answer:".'
BOXED_SUFFIX = "\nPlease reason step by step, and put your final answer within \\boxed{}."

_HAN = "\u4e00-\u9fff"
_INTEGER = re.compile(r"(?P<minus>-?)0*(?P<digits>[0-9]+)(?:\.0*)?")
_LATEX_SPACING = re.compile(r"\\(?:left|right|quad|qquad)(?![a-zA-Z])|\\[,;!: ()\[\]]|\$|\s")
_WORD = re.compile(rf"[{_HAN}]|[^\W_{_HAN}]+")


_CHINESE_SUFFIX = (  # of 20 rows of DAPO
    "\n让我们一步一步地思考。请以“Answer: \\boxed{<final_answer>}”的格式输出最终答案。如果是选择题，请按顺序输出"  # noqa: RUF001
    "正确的选项，不带任何标点或空格。对于其他类型的问题，请只输出最终答案的数值。"  # noqa: RUF001
)


@dataclass(frozen=True)
class Instruction:
    """What stands around a problem to say how it should be answered."""

    prefix: str = ""
    suffix: str = ""

    def around(self, problem: str) -> str:
        """Return the problem with the instruction."""
        return f"{self.prefix}{problem}{self.suffix}"


# What published files are known to carry inside the problem's field.
KNOWN_INSTRUCTIONS = (
    Instruction(DAPO_PREFIX, DAPO_SUFFIX),
    Instruction(suffix=BOXED_SUFFIX),
    Instruction(suffix=_CHINESE_SUFFIX),
)


def strip_instruction(text: str) -> tuple[str, bool]:
    """Return (the bare problem, whether one of `KNOWN_INSTRUCTIONS` stood around it)."""
    text = text.strip()
    for known in KNOWN_INSTRUCTIONS:
        if text.startswith(known.prefix) and text.endswith(known.suffix):
            return text.removeprefix(known.prefix).removesuffix(known.suffix).strip(), True
    return text, False


def normalized_answer(answer: Any) -> str | None:
    """Return an answer in one spelling: 70.0, "70.0" and "070" become "70"; other text stays, without outer spaces.

    None when it is no answer: not text and not a number, empty, not finite.
    """
    if isinstance(answer, bool) or not isinstance(answer, str | int | float):
        return None
    text = str(answer).strip()
    if not text or text in ("nan", "inf", "-inf"):
        return None
    if isinstance(answer, float) and answer.is_integer():
        text = str(int(answer))  # also of 1e+22
    match = _INTEGER.fullmatch(text)
    if match is None:
        return text
    return match["digits"] if match["digits"] == "0" else match["minus"] + match["digits"]


def problem_key(text: str) -> str:
    """Return the key of deduplication: white space, case, dollar signs and LaTeX spacing do not count."""
    return _LATEX_SPACING.sub("", unicodedata.normalize("NFKC", text)).casefold()


def letters_and_digits(text: str) -> str:
    """Return the key of decontamination: nothing counts but letters and digits."""
    return "".join(c for c in unicodedata.normalize("NFKC", text).casefold() if c.isalnum())


def words_of(text: str) -> list[str]:
    """Return the words of a text in lower case: runs of letters and digits; every Chinese character is one."""
    return _WORD.findall(unicodedata.normalize("NFKC", text).casefold())
