"""The answer in `\\boxed{...}`: its content, which boxes belong together, and what stands around them that takes it back."""

import re

from a3po_megatron.reward.statement import HEDGES, JOINS, Extraction, clean

BOX = re.compile(r"\\+(?:boxed|fbox|framebox)(?![A-Za-z])\s*")
# Between two boxes: what makes the second replace the first; `JOINS` makes them parts of one answer, or alternatives.
REVISES = re.compile(
    r"\b(?:so|hence|thus|therefore|then|wait|actually|no|correct(?:ed|ion)?|instead|final(?:ly)?|which gives)\b",
    re.IGNORECASE,
)
LATEX_NOISE = re.compile(r"\\(?:text|mbox|textbf|mathrm|quad|qquad|left|right|[a-zA-Z]+)\b|[{}$\\]")


def boxed_answer(text: str, starts: list[re.Match[str]]) -> Extraction:
    """Return the content of the last box, with those that it is joined to and the alternatives that stand around it."""
    spans: list[tuple[int, int, str]] = []  # (start, end, content)
    for start in starts:
        if spans and start.start() < spans[-1][1]:
            spans.pop()  # a box in a box
        end, content = balanced(text, start.end())
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


def balanced(text: str, start: int) -> tuple[int, str]:
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


def _joins(gap: str) -> bool:
    """Whether two boxes with `gap` between them make one answer."""
    words = LATEX_NOISE.sub(" ", gap)
    if HEDGES.search(re.split(r"[.!?]\s", words)[-1]):  # in the sentence of the later box
        return True
    if REVISES.search(words) or re.search(r"[.!?]\s", words):
        return not re.search(r"[A-Za-z]", words)
    return len(words) <= 80 and (not re.search(r"[A-Za-z=]", words) or ("\n" not in gap and bool(JOINS.search(words))))
