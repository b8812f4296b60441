"""Finds the final answer that a response states, as text. Knows conventions, not mathematics; pure and linear in time.

    convention    the answer is
    boxed         the last `\\boxed{...}` or `\\fbox{...}`
    answer_line   what follows the last `Answer:` on its line (DAPO)
    gsm8k         what follows the last `####`, or `A:` at the start of a line
    auto          the last of any of these; else what follows `the answer is` in the last paragraph; else the whole response,
                  where it is nothing but an answer; else a concluding last sentence (`Therefore x is 5.`)
    last_number   see numeric.py
    anywhere      whatever math-verify finds in the text: for other people's graders' test cases, not for training

Where a response states several answers at once (`\\boxed{3} or \\boxed{4}`, `Answer: 3 or 4`) the text returned holds all of
them, so that it equals no single answer. An answer that is revised later (`\\boxed{3}. No, that counts x twice: \\boxed{4}`)
is the last one: only the last can score, so that saying more never helps.
"""

import re
from dataclasses import dataclass
from typing import Literal, get_args

Convention = Literal["auto", "boxed", "answer_line", "gsm8k", "last_number", "anywhere"]
CONVENTIONS: tuple[str, ...] = get_args(Convention)
WINDOW = 4000  # characters at the end of a response in which the answer must begin
MAX_ANSWER = 500  # characters; no real answer comes near
MAX_NESTING = 12  # of braces, brackets and parentheses together; the parser takes seconds for a few more

BOX = re.compile(r"\\+(?:boxed|fbox|framebox)(?![A-Za-z])\s*")
ANSWER_LINE = re.compile(r"(?:\banswer|答案)\s*(?:\*\*|__)?\s*:(?:\*\*|__)?[ \t]*", re.IGNORECASE)
HASHES = re.compile(r"####[ \t]*:?[ \t]*")
A_LINE = re.compile(r"^[ \t]*A:[ \t]*", re.MULTILINE)
ANSWER_IS = re.compile(
    r"\banswer\b[^.\n]{0,80}?(?:\b(?:is|are|equals|be)\b:?|=|(?=\$|\\\(|\\\[))\s*(?:\b(?:thus|therefore|then|simply)\b\s*)?",
    re.IGNORECASE,
)
MARKERS = {
    "boxed": (BOX,),
    "answer_line": (ANSWER_LINE,),
    "gsm8k": (HASHES, A_LINE),
    "auto": (BOX, ANSWER_LINE, HASHES, A_LINE),
}
# Between two boxes: what makes them alternatives or parts of one answer, and what makes the second replace the first.
JOINS = re.compile(
    r"\b(?:and|or|either|maybe|perhaps|possibly|alternatively|alternative|could|might|if)\b", re.IGNORECASE
)
HEDGES = re.compile(r"\b(?:or|either|option|maybe|perhaps|possibly|alternatively|could|might)\b", re.IGNORECASE)
ALTERNATIVES = re.compile(r"\b(?:or|either|maybe|perhaps|possibly|alternatively)\b", re.IGNORECASE)
PROSE_NUMBER = re.compile(r"(?<![A-Za-z0-9.])-?\$?(?:\d{1,3}(?:,\d{3})+|\d+)(?:\.\d+)?(?:\s*\\?%)?")
REVISES = re.compile(
    r"\b(?:so|hence|thus|therefore|then|wait|actually|no|correct(?:ed|ion)?|instead|final(?:ly)?|which gives)\b",
    re.IGNORECASE,
)
DENIES = re.compile(
    r"\b(?:not|never|isn't|wrong|incorrect|unknown|undetermined|cannot|can't|except|neither|nor)\b", re.I
)
LATEX_NOISE = re.compile(r"\\(?:text|mbox|textbf|mathrm|quad|qquad|left|right|[a-zA-Z]+)\b|[{}$\\]")
OPENING = re.compile(
    r"^[\s*]*(?:(?:therefore|thus|hence|so|then|we (?:get|have|find|obtain)(?: that)?)\b[\s,:]*)+", re.IGNORECASE
)
CONCLUDES = re.compile(
    r"\b(?:therefore|thus|hence|so|in total|altogether|in conclusion|solution|we (?:find|get|have|obtain))\b",
    re.IGNORECASE,
)
SENTENCE_END = re.compile(r"(?<=[^\s.])[.!]\s+(?=[A-Z\[($\\])")
END_OF_TURN = re.compile(r"<\|(?:im_start|im_end|endoftext|eot_id|end_of_text)\|>")
FAREWELL = "I hope it is correct."
UNMARKED = "no answer is marked as such"
CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f]")
TRANSLATION = str.maketrans(
    {
        "\N{MINUS SIGN}": "-",
        "\N{FULLWIDTH COLON}": ":",
        "\u00a0": " ",
        "\u2009": " ",
        "\u202f": " ",
        "\u200b": "",
        "\r": "\n",
    }
)


@dataclass(frozen=True)
class Extraction:
    """What was found: `answer` is empty where there is none, and `problem` says why."""

    answer: str = ""
    problem: str = ""


def find_answer(response: str, convention: str = "auto") -> Extraction:
    """Return the answer that `response` states by `convention`; anything that cannot be an answer is a `problem`."""
    if not response.strip():
        return Extraction(problem="the response is empty")
    _, end, tail = response.rpartition("</think>")
    if not end and "<think>" in response:
        return Extraction(problem="the thinking section never ends")
    tail = END_OF_TURN.split(tail, maxsplit=1)[0]
    text = tail[-WINDOW:].translate(TRANSLATION)
    last = _last_marker(text, MARKERS[convention])
    if last is not None:
        found = _after_marker(text, *last)
    elif convention == "auto":
        found = _unmarked(text, whole=len(text) == len(tail))
    else:
        found = Extraction(problem=f"no answer in the form that {convention} reads")
    return found if found.problem else refuse_oversize(found.answer)


def refuse_oversize(answer: str) -> Extraction:
    """Return the answer, or the reason why it cannot be one: empty, too long, too deeply nested, control characters."""
    if not answer:
        return Extraction(problem="the stated answer is empty")
    if len(answer) > MAX_ANSWER:
        return Extraction(problem=f"the stated answer has {len(answer)} characters, more than {MAX_ANSWER}")
    if CONTROL.search(answer):
        return Extraction(problem="the stated answer holds control characters")
    depth = deepest = 0
    for character in answer:
        depth += (character in "({[") - (character in ")}]")
        deepest = max(deepest, depth)
    if deepest > MAX_NESTING:
        return Extraction(problem=f"the stated answer is nested {deepest} deep, more than {MAX_NESTING}")
    return Extraction(answer)


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


def _last_marker(text: str, markers: tuple[re.Pattern[str], ...]) -> tuple[re.Pattern[str], list[re.Match[str]]] | None:
    """Return the kind of marker that comes last with all its matches; a box on a marker's line belongs to that line."""
    found = [(marker, list(marker.finditer(text))) for marker in markers]
    found = [(marker, matches) for marker, matches in found if matches]
    if not found:
        return None
    marker, matches = max(found, key=lambda pair: pair[1][-1].start())
    boxes = dict(found).get(BOX, [])
    if boxes and _balanced(text, boxes[-1].end())[0] > matches[-1].start():  # what is written in a box marks nothing
        marker, matches = BOX, boxes
    if marker is BOX:
        line = text.rfind("\n", 0, matches[-1].start()) + 1
        lines = [pair for pair in found if pair[0] is not BOX and line <= pair[1][-1].start() < matches[-1].start()]
        if lines:
            return max(lines, key=lambda pair: pair[1][-1].start())
    return marker, matches


def _after_marker(text: str, marker: re.Pattern[str], matches: list[re.Match[str]]) -> Extraction:
    if marker is BOX:
        return _boxes(text, matches)
    if len(matches) > 1:
        before = text[matches[-2].end() : matches[-1].start()].strip(" \t\n*#,;")
        after = text[matches[-1].end() :].split("\n", 1)[0]
        if len(before) <= 40 and "\n" not in before and re.search(r"\d", before) and clean(before) != clean(after):
            return Extraction(problem=f"several answers in a row: {clean(before)[:40]}; {clean(after)[:40]}")
    rest = text[matches[-1].end() :]
    line = rest.split("\n", 1)[0]
    if not line.strip(" \t*_") or clean(line) in ("", "\\[", "$$", "["):  # the answer stands below its marker
        line = re.split(r"\n\s*\n", rest.strip(), maxsplit=1)[0]
    boxes = list(BOX.finditer(line))
    if boxes:
        return _boxes(line, boxes)
    return statement(line)


def _boxes(text: str, starts: list[re.Match[str]]) -> Extraction:
    """Return the content of the last box, with those that it is joined to and the alternatives that stand around it."""
    spans: list[tuple[int, int, str]] = []  # (start, end, content)
    for start in starts:
        if spans and start.start() < spans[-1][1]:
            spans.pop()  # a box in a box
        end, content = _balanced(text, start.end())
        if end < 0:
            spans.append((start.start(), len(text), ""))
        else:
            doubled = start[0].startswith("\\\\")  # text that was escaped twice
            spans.append((start.start(), end, content.replace("\\\\", "\\") if doubled else content))
    if spans[-1][1] == len(text) and not spans[-1][2]:
        return Extraction(problem=r"the last \boxed is empty or not closed")
    joined = [spans[-1]]
    for earlier in reversed(spans[:-1]):
        if not _joins(text[earlier[1] : joined[0][0]]):
            break
        joined.insert(0, earlier)
    answers = list(dict.fromkeys(clean(content) for _, _, content in joined))
    before = re.split(r"(?<=[.!?:])\s|\n", text[: joined[0][0]])[-1]
    after = re.split(r"(?<=[.!?])\s|\n", text[joined[-1][1] :])[0]
    if re.search(r"(?:\d|\}|\b[a-zA-Z])\s*\$?\s*,?\s*\b(?:or|either)\b[\s$\\(\[{]*$", LATEX_NOISE.sub(" ", before)) or (
        re.search(r"\d", after) and HEDGES.search(LATEX_NOISE.sub(" ", after))
    ):
        return Extraction(problem=f"the response hedges around its box: {' '.join((before + after).split())[:80]}")
    if len(answers) == 1:
        percent = re.match(r"[\s$)]*(?:\\?%|percent\b|pct\b)", text[joined[-1][1] :])
        return Extraction(answers[0] + (r"\%" if percent and "%" not in answers[0] else ""))
    return Extraction(", ".join(answers))


def _joins(gap: str) -> bool:
    """Whether two boxes with `gap` between them make one answer."""
    words = LATEX_NOISE.sub(" ", gap)
    if HEDGES.search(re.split(r"[.!?]\s", words)[-1]):  # in the sentence of the later box
        return True
    if REVISES.search(words) or re.search(r"[.!?]\s", words):
        return not re.search(r"[A-Za-z]", words)
    return len(words) <= 80 and (not re.search(r"[A-Za-z=]", words) or ("\n" not in gap and bool(JOINS.search(words))))


def _balanced(text: str, start: int) -> tuple[int, str]:
    """Return (end, content) of the group that opens at `start`; (-1, "") if it does not close. No brace: one token."""
    if start >= len(text):
        return -1, ""
    if text[start] != "{":
        token = re.match(r"-?[0-9][0-9.,]*|[A-Za-z]", text[start:])
        return (start + token.end(), token[0]) if token else (-1, "")
    depth, position = 0, start
    while position < len(text):
        character = text[position]
        if character == "\\" and text[position + 1 : position + 2] in ("{", "}", "\\"):
            position += 2
            continue
        depth += (character == "{") - (character == "}")
        if depth == 0:
            return position + 1, text[start + 1 : position]
        position += 1
    return -1, ""


def _unmarked(text: str, whole: bool) -> Extraction:
    paragraph = re.split(r"\n\s*\n", text.strip())[-1]
    matches = list(ANSWER_IS.finditer(paragraph))
    if matches:
        return statement(re.sub(r"^[\s:]+", "", paragraph[matches[-1].end() :]))
    bare = clean(text)
    if whole and len(bare) <= MAX_ANSWER and not _prose(bare):
        return statement(bare)
    sentence = SENTENCE_END.split(paragraph.removesuffix(FAREWELL).strip())[-1].split("\n")[-1]
    if (
        len(sentence) <= 300
        and CONCLUDES.search(sentence)
        and not HEDGES.search(sentence)
        and not sentence.endswith("?")
    ):
        found = statement(sentence)
        return found if found.problem or found.answer != clean(sentence) else Extraction(problem=UNMARKED)
    return Extraction(problem=UNMARKED)


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
    if not _prose(plain):
        return Extraction(plain)
    last = list(re.finditer(r"\b(?:is|are|be|equals)\b:?\s*", plain))
    if last and not ALTERNATIVES.search(plain[: last[-1].start()]):
        tail = clean(plain[last[-1].end() :])
        if re.search(r"\d|[\\$]", tail) and not _prose(tail):
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


WORD = re.compile(r"[A-Za-z]{2,}")
# fmt: off
MATH_WORDS = frozenset((
    "sin", "cos", "tan", "cot", "sec", "csc", "log", "ln", "exp", "pi", "sqrt", "frac", "and", "or", "max", "min",
    "mod", "gcd", "lcm", "infty", "cm", "mm", "km", "kg", "ft",
))
# fmt: on


def _prose(text: str) -> bool:
    """Whether `text` holds several words of a language, outside of `\\text{...}` and LaTeX commands."""
    bare = re.sub(r"\\(?:text|mbox|mathrm|textbf|operatorname|begin|end)\s*\{[^{}]*\}|\\[A-Za-z]+", " ", text)
    return len([word for word in WORD.findall(bare) if word.lower() not in MATH_WORDS]) >= 2
