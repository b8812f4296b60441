"""Answers in one spelling, instructions taken off, keys by which two problems are the same."""

from typing import Any

import pytest

from a3po_megatron.data.gsm8k import final_answer
from a3po_megatron.data.sets import INSTRUCTIONS
from a3po_megatron.data.text import letters_and_digits, normalized_answer, problem_key, strip_instruction, words_of


@pytest.mark.parametrize(
    ("given", "answer"),
    [
        (70.0, "70"),
        ("70.0", "70"),
        (" 70. ", "70"),
        ("025", "25"),
        (-0.0, "0"),
        ("-0", "0"),
        ("000", "0"),
        ("-007", "-7"),
        (1e22, "10000000000000000000000"),
        ("22099999999999998951424", "22099999999999998951424"),
        (12, "12"),
        (0.5, "0.5"),
        ("0.50", "0.50"),
        ("70.05", "70.05"),
        (".5", ".5"),
        ("58,500", "58,500"),
        ("\\frac{1}{2}", "\\frac{1}{2}"),
        ("p - q", "p - q"),
        ("٣", "٣"),  # digits of another script are no integer of ours
        (True, None),
        (None, None),
        (["1"], None),
        ("  ", None),
        (float("nan"), None),
        (float("-inf"), None),
    ],
)
def test_an_answer_has_one_spelling(given: Any, answer: str | None) -> None:
    assert normalized_answer(given) == answer


@pytest.mark.parametrize(("written", "answer"), [("42", "42"), ("1,234,000", "1234000"), ("-10", "-10")])
def test_the_answer_of_gsm8k_is_plain_decimal_text(written: str, answer: str) -> None:
    assert final_answer(f"6*7=42 #### no\n#### {written}") == answer


@pytest.mark.parametrize("solution", ["about 42", "#### many", "#### nan", "#### ", "42"])
def test_a_solution_without_a_number_at_its_end_is_refused(solution: str) -> None:
    with pytest.raises(ValueError, match="the answer ends with"):
        final_answer(solution)


def test_known_instructions_are_taken_off_and_nothing_else() -> None:
    problem = "What is $2+2$?\nPlease reason."
    for name in ("dapo", "boxed"):
        assert strip_instruction(INSTRUCTIONS[name].around(problem)) == (problem, True)
    assert strip_instruction(f"  {problem}\n") == (problem, False)
    only_prefix = INSTRUCTIONS["dapo"].prefix + problem
    assert strip_instruction(only_prefix) == (only_prefix, False)


def test_problems_are_the_same_whatever_their_spacing_but_not_with_another_sign() -> None:
    assert problem_key("Find $x$ if\n\\[ x^2 = 4.\\]") == problem_key("find  \\(x\\) if $$x^2 \\, = \\ 4.$$")
    assert problem_key("\\left( 1 \\right) \\cdot \\qquad y") == problem_key("(1)\\cdot y")
    assert problem_key("x^8 - 98x^4") != problem_key("x^8 + 98x^4")
    assert problem_key("\\leftarrow") != problem_key("\\arrow")


def test_for_decontamination_only_letters_and_digits_count() -> None:
    assert letters_and_digits("$\\overline{r_1}, X^{10}$ ½") == "overliner1x1012"  # NFKC writes ½ as 1⁄2
    assert words_of("Find $\\overline{AB}_2$; 已知 x=3") == ["find", "overline", "ab", "2", "已", "知", "x", "3"]
