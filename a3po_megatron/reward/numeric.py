"""A simple reward for word problems: 1 when the response's final number equals the answer, else 0."""

import re
from decimal import Decimal

from a3po_megatron.records import Verdict

MARKER = "####"
# -1,234.50 with an optional dollar sign; a minus right after a digit, letter or bracket is a subtraction
NUMBER = re.compile(
    r"(?<![A-Za-z0-9.])"
    r"(?:(?<![)\]])(?P<minus>-))?\$?(?P<minus_after_dollar>-)?"
    r"(?P<digits>(?:[0-9]{1,3}(?:,[0-9]{3})+(?![0-9])|[0-9]+)(?:\.[0-9]+)?|\.[0-9]+)"
)


def numeric_verdict(response_text: str, answer: str) -> Verdict:
    """Return 1.0 or 0.0 with the number that was read. Exact (decimals, no rounding): `0.33` is not one third, `50%` is `50`.

    Example: `numeric_verdict("6*7=42\\n#### $42.", "42").reward == 1.0`. Raises ValueError when `answer` holds no number.
    """
    expected, found = final_number(answer), final_number(response_text)
    if expected is None:
        raise ValueError(f"answer {answer!r} holds no number")
    if found is None:
        return Verdict(0.0, "the response holds no number")
    extracted = str(found)[:200]
    return (
        Verdict(1.0, "equal to the truth", extracted)
        if found == expected
        else Verdict(0.0, "another number", extracted)
    )


def final_number(text: str) -> Decimal | None:
    """Return the number after the last `####`; without a marker the last number of the text; None if there is none.

    After a marker the first number counts, so that what a model goes on to say does not.
    """
    _, marker, tail = text.replace("\N{MINUS SIGN}", "-").rpartition(MARKER)
    numbers = [_value(match) for match in NUMBER.finditer(tail)]
    if not numbers:
        return None
    return numbers[0] if marker else numbers[-1]


def _value(match: re.Match[str]) -> Decimal:
    value = Decimal(match["digits"].replace(",", ""))
    return value.copy_negate() if match["minus"] or match["minus_after_dollar"] else value  # unary minus would round
