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
is the last one: only the last can score, so that saying more never helps. What a box holds is read by `boxes.py`, what a line or
sentence states by `statement.py`.
"""

import re
from typing import Literal, get_args

from a3po_megatron.reward.boxes import BOX, balanced, boxed_answer
from a3po_megatron.reward.statement import ANSWER_IS, HEDGES, Extraction, clean, is_prose, statement

Convention = Literal["auto", "boxed", "answer_line", "gsm8k", "last_number", "anywhere"]
CONVENTIONS: tuple[str, ...] = get_args(Convention)
WINDOW = 4000  # characters at the end of a response in which the answer must begin
MAX_ANSWER = 500  # characters; no real answer comes near
MAX_NESTING = 12  # of braces, brackets and parentheses together; the parser takes seconds for a few more

ANSWER_LINE = re.compile(r"(?:\banswer|答案)\s*(?:\*\*|__)?\s*:(?:\*\*|__)?[ \t]*", re.IGNORECASE)
HASHES = re.compile(r"####[ \t]*:?[ \t]*")
A_LINE = re.compile(r"^[ \t]*A:[ \t]*", re.MULTILINE)
MARKERS = {
    "boxed": (BOX,),
    "answer_line": (ANSWER_LINE,),
    "gsm8k": (HASHES, A_LINE),
    "auto": (BOX, ANSWER_LINE, HASHES, A_LINE),
}
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


def _last_marker(text: str, markers: tuple[re.Pattern[str], ...]) -> tuple[re.Pattern[str], list[re.Match[str]]] | None:
    """Return the kind of marker that comes last with all its matches; a box on a marker's line belongs to that line."""
    found = [(marker, list(marker.finditer(text))) for marker in markers]
    found = [(marker, matches) for marker, matches in found if matches]
    if not found:
        return None
    marker, matches = max(found, key=lambda pair: pair[1][-1].start())
    boxes = dict(found).get(BOX, [])
    if boxes and balanced(text, boxes[-1].end())[0] > matches[-1].start():  # what is written in a box marks nothing
        marker, matches = BOX, boxes
    if marker is BOX:
        line = text.rfind("\n", 0, matches[-1].start()) + 1
        lines = [pair for pair in found if pair[0] is not BOX and line <= pair[1][-1].start() < matches[-1].start()]
        if lines:
            return max(lines, key=lambda pair: pair[1][-1].start())
    return marker, matches


def _after_marker(text: str, marker: re.Pattern[str], matches: list[re.Match[str]]) -> Extraction:
    if marker is BOX:
        return boxed_answer(text, matches)
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
        return boxed_answer(line, boxes)
    return statement(line)


def _unmarked(text: str, whole: bool) -> Extraction:
    paragraph = re.split(r"\n\s*\n", text.strip())[-1]
    matches = list(ANSWER_IS.finditer(paragraph))
    if matches:
        return statement(re.sub(r"^[\s:]+", "", paragraph[matches[-1].end() :]))
    bare = clean(text)
    if whole and len(bare) <= MAX_ANSWER and not is_prose(bare):
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
