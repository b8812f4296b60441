"""Whether a stated answer equals the truth: plain numbers exactly, words as words, everything else by math-verify.

math-verify decides about mathematics. This file only goes before it (where text or exact decimals settle the matter) and
guards it where it is known to be too kind: see `_too_kind`. What nobody could evaluate is refused by `huge.py` before. Imports
sympy when it is first needed: workers only.
"""

import logging
import re
from collections.abc import Sequence
from dataclasses import dataclass
from decimal import Decimal
from functools import lru_cache
from typing import Any

from a3po_megatron.reward.huge import NotComparable, refuse_huge
from a3po_megatron.reward.plain_number import plain_number, same_number
from a3po_megatron.reward.spelling import as_word, normalise, squeeze, unwrap_text
from a3po_megatron.reward.statement import DENIES

GLUED = re.compile(r"[-+]?[\d.,]+[A-Za-z]")
ABOUT = re.compile(r"\\(?:approx|simeq|sim)(?![A-Za-z])")
RELATION = re.compile(r"(?<![<>!\\])=(?!=)")
# What makes an answer two answers, or none, where the truth does not say the same.
HEDGED = re.compile(
    r"\b(?:maybe|perhaps|possibly|either|alternatively|if|else|otherwise|unless|at (?:most|least)|less|more|fewer|"
    r"about|around|approximately)\b|\\(?:l?dots|cdots)(?![A-Za-z])",
    re.IGNORECASE,
)
LIST = re.compile(r"[,;{}()\[\]]|\\(?:pm|cup)|\bor\b")


@dataclass(frozen=True)
class Comparison:
    """How math-verify compares; the defaults are its own."""

    digits: int = 6  # after the point, where a decimal is compared with an exact value
    strict: bool = True  # False: names of variables do not matter
    relations_as_sets: bool = False  # `-2 <= x <= 7` also answers `[-2, 7]`


class BadTruth(Exception):
    """The truth cannot be read, or is too big to evaluate: no response is to blame."""


def compare(gold: str, answer: str, how: Comparison) -> str:
    """Return "" if `answer` equals `gold`, else the reason why not. Raises BadTruth for a gold without a reading."""
    gold, answer = normalise(gold), normalise(answer)
    if not answer:
        return "the stated answer is empty"
    gold_number, answer_number = plain_number(unwrap_text(gold)), plain_number(unwrap_text(answer))
    if gold_number is not None and answer_number is not None:
        return same_number(gold_number, answer_number)
    if squeeze(gold) == squeeze(answer):
        return ""
    if (word := as_word(gold)) is not None:
        return "" if as_word(answer, of_gold=word) == word else "another word"
    if DENIES.search(unwrap_text(answer)):
        return "the answer is denied"
    if hedged(gold, answer):
        return "the answer is hedged"
    gold_value, answer_value = parse_math(gold), parse_math(answer)
    if not gold_value:
        raise BadTruth("it has no reading as mathematics or as a word")
    if not answer_value:
        return "the stated answer has no reading as mathematics"
    _refuse_huge_truth(gold_value[0])
    refuse_huge(answer_value[0])
    kind = _too_kind(gold, answer, gold_value[0], answer_value[0])
    return kind or verify(gold_value, answer_value, how)


def hedged(gold: str, answer: str) -> bool:
    """Whether the answer leaves open what it is: `5 (or 6)`, `5 or less`, `5 if a`."""
    gold, answer = unwrap_text(gold), unwrap_text(answer)
    if HEDGED.search(answer) and not HEDGED.search(gold):
        return True
    return bool(re.search(r"\bor\b", answer)) and not LIST.search(gold)


def verify(gold: list[Any], answer: list[Any], how: Comparison) -> str:
    """Ask math-verify about two parsed answers; "" if they are equal."""
    from math_verify import verify as math_verify

    equal = math_verify(
        gold,
        answer,
        float_rounding=how.digits,
        strict=how.strict,
        allow_set_relation_comp=how.relations_as_sets,
        timeout_seconds=None,  # its own timeouts are signals; the pool kills the worker instead
    )
    return "" if equal else "not equal"


@lru_cache(maxsize=4096)
def parse_math(text: str) -> list[Any]:
    """Return math-verify's reading of a normalised answer: [sympy object] or []."""
    from math_verify import LatexExtractionConfig, parse

    found = parse(f"${text}$", [LatexExtractionConfig()], fallback_mode="no_fallback", parsing_timeout=None)
    return found[:1]


def anywhere(gold: str, response: str, how: Comparison, kinds: tuple[str, ...] = ("latex", "expr")) -> tuple[str, str]:
    """Compare what math-verify itself finds in two texts; return (reason or "", what it found in the response)."""
    from math_verify import ExprExtractionConfig, LatexExtractionConfig, parse

    targets = [{"latex": LatexExtractionConfig(), "expr": ExprExtractionConfig()}[kind] for kind in kinds]
    gold_value, answer_value = (
        parse(gold, targets, parsing_timeout=None),
        parse(response, targets, parsing_timeout=None),
    )
    if not gold_value:
        raise BadTruth("math-verify finds no mathematics in it")
    if not answer_value:
        return "math-verify finds no answer in the response", ""
    _refuse_huge_truth(gold_value[0])
    refuse_huge(answer_value[0])
    return verify(gold_value, answer_value, how), str(answer_value[-1])


def check_gold(gold: str) -> str:
    """Return "" if `compare` can compare answers with `gold`, else why not."""
    text = normalise(gold)
    if plain_number(unwrap_text(text)) is not None or as_word(text) is not None:
        return ""
    try:
        value = parse_math(text)
        if value:
            refuse_huge(value[0])
            return "" if not verify(value, value, Comparison()) else "math-verify does not find it equal to itself"
    except NotComparable as error:
        return str(error)
    return "it has no reading as mathematics or as a word"


def _refuse_huge_truth(value: Any) -> None:
    try:
        refuse_huge(value)
    except NotComparable as error:
        raise BadTruth(str(error)) from None


def _too_kind(gold: str, answer: str, gold_value: Any, answer_value: Any) -> str:
    """Return why math-verify's yes could not be trusted here, or "".

    It takes the right side of any equation for an answer (`2x = 5` for 5), multiplies the letters of words (`east` is
    `seat`), forgets the base of a numeral (`52_8` is `52_7`), and takes `7m` for seven metres.
    """
    from sympy import Eq, Function, Symbol

    sides = RELATION.split(answer)
    parts = [plain_number(unwrap_text(side)) for side in sides]
    if len({part.value for part in parts if part is not None}) > 1 or (len(sides) > 2 and _false_chain(sides)):
        return "the equation is false"
    if _false_approximation(answer):
        return "the approximation is false"
    if isinstance(answer_value, Eq) and not isinstance(gold_value, Eq) and not RELATION.search(gold):
        left, right = answer_value.lhs, answer_value.rhs
        unknowns: set[Any] = getattr(left, "free_symbols", set())
        if not unknowns and not hasattr(left, "free_symbols"):
            return ""
        if not unknowns:
            return verify([right], [left], Comparison()) and "the equation is false"
        named = isinstance(left, Symbol | Function) or type(left).__name__ in ("Abs", "AppliedUndef")
        if len(unknowns) == 1 and not named:
            return "an equation to be solved is no answer"
    for number, other in ((gold, answer), (answer, gold)):
        plain = plain_number(unwrap_text(number))
        if plain is not None and not plain.unit and GLUED.fullmatch(other):
            return "a variable that the other has not"
    bases = [re.search(r"\d\s*_\s*\{?\s*(\d+)\s*\}?$", text) for text in (gold, answer)]
    if bases[0] and bases[1] and bases[0][1] != bases[1][1]:
        return "the numeral has another base"
    letters = [re.sub(r"[^A-Za-z]", "", unwrap_text(text)) for text in (gold, answer)]
    if (
        all(re.fullmatch(r"[A-Za-z ]{4,}", text) for text in (gold, answer))
        and letters[0].lower() != letters[1].lower()
    ):
        return "another word"
    return ""


def _false_approximation(answer: str) -> bool:
    """Whether numbers that are called about the same differ by more than a tenth, as in `5 \\approx 6`."""
    sides = [plain_number(unwrap_text(side)) for side in ABOUT.split(answer)]
    values = [abs(side.value) for side in sides if side is not None]
    return len(values) > 1 and max(values) > min(values) * Decimal("1.1")


def _false_chain(sides: Sequence[str]) -> bool:
    """Whether two sides of `a = b = c` that hold no unknown differ, or one cannot be read."""
    values = [parse_math(normalise(side)) for side in sides]
    if not all(values):
        return True
    known = [value for value in values if not getattr(value[0], "free_symbols", None)]
    return any(verify(known[0], other, Comparison()) for other in known[1:])


def quiet() -> None:
    """Switch off the libraries' logging, which would report every answer that cannot be parsed."""
    logging.disable(logging.CRITICAL)
