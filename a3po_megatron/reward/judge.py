"""One answer against the truth: extraction by convention, then comparison. Runs in a worker; every verdict has a reason."""

from dataclasses import dataclass, field

from a3po_megatron.records import Verdict
from a3po_megatron.reward.compare import BadTruth, Comparison, anywhere, compare
from a3po_megatron.reward.extract import CONVENTIONS, MARKERS, find_answer
from a3po_megatron.reward.huge import NotComparable
from a3po_megatron.reward.numeric import final_number, numeric_verdict

SHOWN = 200  # characters of an extracted answer that a verdict carries


@dataclass(frozen=True)
class MathSettings:
    """What the judge is told with every answer."""

    convention: str = "auto"
    comparison: Comparison = field(default_factory=Comparison)
    kinds: tuple[str, ...] = ("latex", "expr")  # of convention `anywhere`: what math-verify looks for

    def __post_init__(self) -> None:
        assert self.convention in CONVENTIONS, f"convention {self.convention!r} is none of {', '.join(CONVENTIONS)}"


def judge_math(gold: str, response: str, settings: MathSettings) -> Verdict:
    """Return 1.0 where the response states an answer equal to `gold`, else 0.0. Raises BadTruth for a bad gold."""
    if settings.convention == "last_number":
        return _judge_number(gold, response)
    answer = ""
    try:
        if settings.convention == "anywhere":
            reason, answer = anywhere(gold, response, settings.comparison, settings.kinds)
        else:
            found = find_answer(response, settings.convention)
            answer = found.answer
            reason = found.problem or compare(gold_answer(gold), answer, settings.comparison)
    except NotComparable as error:
        reason = str(error)
    return Verdict(0.0, reason, answer[:SHOWN]) if reason else Verdict(1.0, "equal to the truth", answer[:SHOWN])


def gold_answer(gold: str) -> str:
    """Return the answer within `gold`, which may be a whole solution with a box, `####`, `Answer:` or `A:`."""
    if any(marker.search(gold) for marker in MARKERS["auto"]):
        found = find_answer(gold)
        if not found.problem:
            return found.answer
    return gold.strip()


def _judge_number(gold: str, response: str) -> Verdict:
    if final_number(gold) is None:
        raise BadTruth("it holds no number")
    return numeric_verdict(response, gold)
