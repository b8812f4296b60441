"""Plain numbers in answers: `-1,234.50`, `$5`, `35 cm`, `50%`, `2 million`, `1.5e3`. Exact: decimals, no rounding."""

import re
from dataclasses import dataclass
from decimal import Decimal

UNITS = {
    "mm": "mm millimeter millimetre", "cm": "cm centimeter centimetre", "m": "m meter metre", "km": "km kilometer kilometre",
    "in": "in inch inches", "ft": "ft foot feet", "yd": "yd yard", "mi": "mi mile",
    "mg": "mg milligram", "g": "g gram", "kg": "kg kilogram", "lb": "lb pound", "oz": "oz ounce",
    "s": "s sec second", "min": "min minute", "h": "h hr hour", "day": "day", "week": "week", "month": "month", "year": "year",
    "ml": "ml mL milliliter millilitre", "l": "l L liter litre", "dollar": "dollar", "cent": "cent", "euro": "euro",
    "degree": "degree", "rad": "rad radian", "mph": "mph", "percent": "percent percentage pct",
}  # fmt: skip
UNIT_OF = {name + plural: unit for unit, names in UNITS.items() for name in names.split() for plural in ("", "s")}
SCALES = {"hundred": 2, "thousand": 3, "million": 6, "billion": 9, "trillion": 12}
CURRENCY = {"$": "dollar", "€": "euro", "£": "pound sterling", "¥": "yen"}
# Words after a number that change it, so that what stands there is no number with a unit.
# fmt: off
NOT_UNITS = frozenset((
    "pi", "sqrt", "sin", "cos", "tan", "log", "ln", "exp", "frac", "infty", "or", "and", "to", "minus", "plus",
    "times", "over", "squared", "cubed", "dozen", "dozens", "half", "halves", "mod", "not", "no", "never", "wrong",
    "incorrect", "if", "unless", "except", "between", "than", "maybe", "perhaps", "possibly", "through", "base",
    "factorial", "third", "thirds", "quarter", "quarters", "fifth", "fifths", "sixth", "eighth", "tenth", "tenths",
    "hundredth", "hundredths", "i", "e", "x", "y", "z", "bn", "mil", "mln", "k", "lakh", "crore",
    "less", "more", "fewer", "most", "least", "at", "about", "around", "approximately", "else", "otherwise",
))
# fmt: on
NUMBER = re.compile(
    r"(?P<sign>[-+]?)\s*(?P<currency>[$€£¥]?)\s*(?P<sign2>[-+]?)"
    r"(?P<digits>(?:\d{1,3}(?:,\d{3})+|\d{1,3}(?: \d{3})+|\d+)(?:\.\d*)?|\.\d+)"
    r"(?:[eE](?P<exponent>[-+]?\d{1,3}))?"
    r"(?P<rest>\D.*|)",
    re.DOTALL,
)
EXPONENT = re.compile(r"(?:\^\s*\{?\s*([23])\s*\}?|([²³]))$")


@dataclass(frozen=True)
class PlainNumber:
    """A number and what stands after it."""

    value: Decimal
    percent: bool = False
    unit: str = ""  # a known unit with its power, such as `cm^2`; empty for none or one that is not known


def plain_number(text: str) -> PlainNumber | None:
    """Return the number that `text` (already normalised) is, with unit or percent sign; None if it is anything else."""
    match = NUMBER.fullmatch(text.strip())
    if not match or (match["sign"] and match["sign2"]):
        return None
    suffix = _suffix(match["rest"], match["digits"])
    if suffix is None:
        return None
    scale, percent, unit = suffix
    value = _shifted(Decimal(re.sub("[, ]", "", match["digits"])), scale + int(match["exponent"] or 0))
    if "-" in (match["sign"], match["sign2"]):
        value = value.copy_negate()
    return PlainNumber(value, percent, unit or CURRENCY.get(match["currency"], ""))


def _suffix(rest: str, digits: str) -> tuple[int, bool, str] | None:
    """Return (power of ten, percent, unit) of what follows the digits; None if it is more than words."""
    if not rest.strip():
        return 0, False, ""
    glued = not rest[0].isspace()
    rest = rest.strip()
    if re.fullmatch(r"(?:%|percent\b|pct\b|percentage\b).*", rest) and not re.search(r"\d", rest):
        return 0, True, ""
    if rest in ("°", r"^\circ", r"^{\circ}", r"\circ", r"\degree"):
        return 0, False, "degree"
    if rest in CURRENCY:
        return 0, False, CURRENCY[rest]
    power = EXPONENT.search(rest)
    words = (rest[: power.start()] if power else rest).replace("(", " ").replace(")", " ").replace("/", " per ")
    if not re.fullmatch(r"[A-Za-z .,'-]+", words):
        return None
    tokens = words.replace(".", " ").replace(",", " ").split()
    if not tokens or any(token.lower() in NOT_UNITS for token in tokens):
        return None
    if len(tokens[0]) == 1 and (glued or tokens[0] not in UNIT_OF):
        return None  # 7x, 7 k: a variable
    if glued and tokens[0].lower() not in UNIT_OF:
        return None  # 3ab
    scale = 0
    if (word := tokens[0].lower().removesuffix("s")) in SCALES:
        scale = SCALES[word]
        tokens = tokens[1:]
    prefix = {"square": "^2", "sq": "^2", "cubic": "^3"}.get(tokens[0].lower(), "") if tokens else ""
    tokens = tokens[1:] if prefix else tokens
    unit = UNIT_OF.get(tokens[0], UNIT_OF.get(tokens[0].lower(), "")) if tokens else ""
    if unit and len(tokens) > 2 and tokens[1] == "per":
        unit += "/" + UNIT_OF.get(tokens[2], tokens[2])
    if power:
        prefix = "^" + (power[1] or {"²": "2", "³": "3"}[power[2]])
    if unit == "percent":
        return scale, True, ""
    return scale, False, unit + prefix if unit else ""


def _shifted(value: Decimal, places: int) -> Decimal:
    """Return value * 10^places with every digit; `scaleb` would round to 28 of them."""
    sign, digits, exponent = value.as_tuple()
    assert isinstance(exponent, int)
    return Decimal((sign, digits, exponent + places))


def same_number(gold: PlainNumber, answer: PlainNumber) -> str:
    """Return "" if `answer` is `gold`, else why not. A percentage may be written as its number or as its share."""
    if gold.unit and answer.unit and gold.unit != answer.unit:
        return f"the unit is {answer.unit}, not {gold.unit}"
    if gold.percent == answer.percent:
        return "" if gold.value == answer.value else "another number"
    if gold.percent:
        return "" if answer.value in (gold.value, _shifted(gold.value, -2)) else "another number"
    # 50% may answer "what percentage?", whose truth is 50; but 0.5% is not 0.5
    as_number = abs(answer.value) >= 1 and answer.value == gold.value
    return "" if as_number or _shifted(answer.value, -2) == gold.value else "another number"
