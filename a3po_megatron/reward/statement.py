"""The answer that one line states: mathematics, or a sentence around one formula or one number. Text in, text out."""

import re
from dataclasses import dataclass

ANSWER_IS = re.compile(
    r"\banswer\b[^.\n]{0,80}?(?:\b(?:is|are|equals|be)\b:?|=|(?=\$|\\\(|\\\[))\s*(?:\b(?:thus|therefore|then|simply)\b\s*)?",
    re.IGNORECASE,
)
DENIES = re.compile(
    r"\b(?:not|never|isn't|wrong|incorrect|unknown|undetermined|cannot|can't|except|neither|nor)\b", re.I
)
OPENING = re.compile(
    r"^[\s*]*(?:(?:therefore|thus|hence|so|then|we (?:get|have|find|obtain)(?: that)?)\b[\s,:]*)+", re.IGNORECASE
)
# Between two formulas or boxes: what makes them parts of one answer, or alternatives.
JOINS = re.compile(
    r"\b(?:and|or|either|maybe|perhaps|possibly|alternatively|alternative|could|might|if)\b", re.IGNORECASE
)
HEDGES = re.compile(r"\b(?:or|either|option|maybe|perhaps|possibly|alternatively|could|might)\b", re.IGNORECASE)
ALTERNATIVES = re.compile(r"\b(?:or|either|maybe|perhaps|possibly|alternatively)\b", re.IGNORECASE)
PROSE_NUMBER = re.compile(r"(?<![A-Za-z0-9.])-?\$?(?:\d{1,3}(?:,\d{3})+|\d+)(?:\.\d+)?(?:\s*\\?%)?")
WORD = re.compile(r"[A-Za-z]{2,}")
# fmt: off
MATH_WORDS = frozenset((
    "sin", "cos", "tan", "cot", "sec", "csc", "log", "ln", "exp", "pi", "sqrt", "frac", "and", "or", "max", "min",
    "mod", "gcd", "lcm", "infty", "cm", "mm", "km", "kg", "ft",
))
# fmt: on


@dataclass(frozen=True)
class Extraction:
    """What was found: `answer` is empty where there is none, and `problem` says why."""

    answer: str = ""
    problem: str = ""


def clean(answer: str) -> str:
    """Return `answer` without what people put around it: space, Markdown, quotes, math delimiters, a full stop."""
    before = None
    while answer != before:
        before = answer
        answer = answer.strip().strip("*_`\"'“”").strip()
        answer = re.sub(r"^(?:\\[\[(]|\$\$?)(.*?)(?<!\\)(?:\\[\])]|\$\$?)$", r"\1", answer, flags=re.DOTALL)
        answer = re.sub(r"(?:\\\\|(?<!\.)\.|[,;:]|\\[,;! ])+$", "", answer)
        answer = re.sub(r"^(?:\\[,;! ]|[:=](?!=))+", "", answer)
    return answer


def statement(line: str) -> Extraction:
    """Return the answer that one line states: mathematics, or a sentence around one formula or one number."""
    line = line.split("</")[0]
    inner = list(ANSWER_IS.finditer(line))
    if inner:
        line = line[inner[-1].end() :]
    line = re.split(r"(?<=[^\s.])\.\s+(?=[A-Z\[(])", line, maxsplit=1)[0]
    line = OPENING.sub("", line)
    if DENIES.search(line):
        return Extraction(problem=f"the response denies rather than answers: {clean(line)[:60]}")
    plain = clean(line)
    if not is_prose(plain):
        return Extraction(plain)
    last = list(re.finditer(r"\b(?:is|are|be|equals)\b:?\s*", plain))
    if last and not ALTERNATIVES.search(plain[: last[-1].start()]):
        tail = clean(plain[last[-1].end() :])
        if re.search(r"\d|[\\$]", tail) and not is_prose(tail):
            return Extraction(tail)
    formulas = list(
        dict.fromkeys(clean(f) for f in re.findall(r"(?<!\\)\$([^$]+)\$|\\\((.+?)\\\)", line) for f in f if f)
    )
    outside = re.sub(r"(?<!\\)\$[^$]+\$|\\\(.+?\\\)", " ", line)
    if formulas and (len(formulas) == 1 or JOINS.search(outside)) and not re.search(r"\d", outside):
        return Extraction(", ".join(formulas))
    numbers = {match[0] for match in PROSE_NUMBER.finditer(plain)}
    if len(numbers) == 1 and not HEDGES.search(plain):
        return Extraction(numbers.pop())
    if numbers:
        return Extraction(problem=f"the response states several numbers: {plain[:60]}")
    return Extraction(plain)


def is_prose(text: str) -> bool:
    """Whether `text` holds several words of a language, outside of `\\text{...}` and LaTeX commands."""
    bare = re.sub(r"\\(?:text|mbox|mathrm|textbf|operatorname|begin|end)\s*\{[^{}]*\}|\\[A-Za-z]+", " ", text)
    return len([word for word in WORD.findall(bare) if word.lower() not in MATH_WORDS]) >= 2
