"""GSM8K's answers: a worked solution whose last line is `#### 42`, with thousands commas and minus signs."""

from decimal import Decimal, InvalidOperation

from a3po_megatron.data.text import Instruction

INSTRUCTION = Instruction(suffix="\nThink step by step. Write the final answer, a number, on the last line after ####.")


def final_answer(solution: str) -> str:
    """Return the number after the last `####` as plain decimal text: `#### -1,234` -> `-1234`. Raises ValueError."""
    _, marker, answer = solution.rpartition("####")
    answer = answer.strip().replace(",", "")
    if not marker or not _is_number(answer):
        raise ValueError(f"the answer ends with {solution[-20:]!r}, expected '#### ' and a number")
    return answer


def _is_number(text: str) -> bool:
    try:
        return Decimal(text).is_finite()
    except InvalidOperation:
        return False
