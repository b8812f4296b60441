"""One spelling for what people write in many: LaTeX commands, Unicode signs, spaces, words. Text in, text out; no mathematics."""

import re

# Signs that people write for LaTeX commands, by code point.
UNICODE = {
    "\u00d7": r"\times ", "\u00b7": r"\cdot ", "\u00f7": r"\div ", "\u2264": r"\le ", "\u2265": r"\ge ", "\u2260": r"\ne ",
    "\u221e": r"\infty ", "\u03c0": r"\pi ", "\u03b8": r"\theta ", "\u222a": r"\cup ", "\u2229": r"\cap ", "\u2208": r"\in ",
    "\u00b1": r"\pm ", "\u2205": r"\emptyset ", "\u00b2": "^2", "\u00b3": "^3", "\u00bd": r"\frac{1}{2}", "\u00b0": r"^\circ ",
    "\u2212": "-", "\u2013": "-", "\u2019": "'", "\uff0c": ",", "\uff08": "(", "\uff09": ")",
}  # fmt: skip
TEXT = re.compile(r"\\(?:text|mbox|textbf|textit|mathrm|mathbf|operatorname|texttt|bf|rm)\s*\{([^{}]*)\}")
SPACES = re.compile(
    r"(?<!\\)\\[,;:! ]|\\q?quad\b|~|\\(?:left|right|displaystyle|big|Big)(?![A-Za-z])|\\hspace\{[^{}]*\}"
)
LABEL = re.compile(r"^\\text\s*\{\s*(?:the\s+)?(?:final\s+)?ans(?:wer)?\s*(?:is)?\s*:?\s*\}", re.IGNORECASE)


def normalise(text: str) -> str:
    """Return the answer in one spelling: no dollar signs, spacing commands, delimiters' sizes; LaTeX for Unicode signs."""
    for character, latex in UNICODE.items():
        text = text.replace(character, latex)
    text = text.replace("{,}", ",").replace(r"\$", "$")
    text = re.sub(r"(?<=\d)\s*,\s*\\!\s*(?=\d{3})", ",", text)  # 10,\!080
    text = SPACES.sub(" ", text).replace(r"\%", "%").replace("\n", " ").replace("**", "^")
    text = re.sub(r"\\[dtc]frac(?![A-Za-z])", r"\\frac", text)
    text = re.sub(r"(?<![\\A-Za-z])sqrt\s*\(([^()]*)\)", r"\\sqrt{\1}", text)
    text = re.sub(
        r"(?<![\\A-Za-z])(pi|infinity|infty|theta)(?![A-Za-z])", lambda m: "\\" + m[0].replace("inity", "ty"), text
    )
    text = re.sub(r"√\s*(\d+|\([^()]*\)|[a-z])", r"\\sqrt{\1}", text)
    text = re.sub(r"\s+", " ", text).strip()
    text = LABEL.sub("", text).strip()
    number = re.fullmatch(r"\$\s*(.*)", text)
    if text.count("$") > 1 or (text.endswith("$") and len(text) > 1 and not number):
        text = text.replace("$", " ").strip()
    elif number and not re.match(r"[-+\d.]", number[1]):
        text = number[1]
    return text


def unwrap_text(text: str) -> str:
    """Return `text` with the content of `\\text{...}` and its like in place of the command."""
    return re.sub(r"\s+", " ", TEXT.sub(r" \1 ", text)).strip()


def squeeze(text: str) -> str:
    """Return `text` without the spaces that mean nothing."""
    return re.sub(r"(?<![A-Za-z0-9]) | (?![A-Za-z0-9])", "", text)


def as_word(text: str, of_gold: str = "") -> str | None:
    """Return the words that a verbal answer is, in lower case; None where `text` is not verbal.

    Verbal are `\\text{Evelyn}`, `\\text{(C)}`, and letters alone from four on: shorter ones are products of variables.
    With `of_gold`, which is verbal, shorter letters are too.
    """
    inner = TEXT.sub(r" \1 ", text)
    verbal = inner != text or of_gold
    if not re.fullmatch(r"[\s(]*[A-Za-z][A-Za-z\s'().,-]*", inner):
        return None
    words = re.sub(r"[^a-z]+", " ", inner.lower()).strip()
    return words if verbal or len(words) >= 4 else None
