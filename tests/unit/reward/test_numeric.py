"""The numeric reward, by hand and against 5276 labelled model solutions."""

import json
import time

import pytest

from a3po_megatron.data.folder import data_folder
from a3po_megatron.errors import UserError
from a3po_megatron.reward.numeric import numeric_verdict

MODELS = ("6b_finetuning", "6b_verification", "175b_finetuning", "175b_verification")


@pytest.mark.parametrize(
    ("response", "answer"),
    [
        ("6 * 7 = 42", "42"),
        ("#### 42", "42"),
        ("first #### 3, no:\n#### 42\nThat took 2 steps.", "42"),
        ("It costs $1,234.50.", "1234.5"),
        ("5.00", "5"),
        ("a raise of 50%", "50"),
        ("**18** eggs", "18"),
        (r"\boxed{18}", "18"),
        ("a loss of -$5", "-5"),
        ("a loss of $-5", "-5"),
        ("\N{MINUS SIGN}7 degrees", "-7"),
        ("we get 10-5", "5"),
        (".5", "0.5"),
        ("-0", "0"),
        ("123456789012345678901234567890123", "123456789012345678901234567890123"),
    ],
)
def test_right_number_scores_one(response: str, answer: str) -> None:
    assert numeric_verdict(response, answer).reward == 1.0


@pytest.mark.parametrize(
    ("response", "answer"),
    [
        ("", "0"),
        ("no idea", "0"),
        ("42 ####", "42"),
        ("42 and then 43", "42"),
        ("0.33", "0.3333333"),
        ("5", "-5"),
        ("-123456789012345678901234567890123", "-123456789012345678901234567890124"),
        ("molecule H42", "42"),
    ],
)
def test_anything_else_scores_zero(response: str, answer: str) -> None:
    assert numeric_verdict(response, answer).reward == 0.0


def test_answer_without_a_number_is_refused() -> None:
    with pytest.raises(ValueError, match="'many' holds no number"):
        numeric_verdict("42", "many")


@pytest.mark.parametrize("response", ["9" * 20_000, "1,111" * 4_000, "-$" * 10_000, "#" * 20_000])
def test_degenerate_response_is_scored_quickly(response: str) -> None:
    start = time.process_time()  # a busy machine may give this process no turn for seconds
    assert numeric_verdict(response, "42").reward == 0.0
    assert time.process_time() - start < 2.0  # milliseconds on an idle machine


def test_agrees_with_every_label_of_the_published_model_solutions() -> None:
    try:
        path = data_folder() / "gsm8k" / "example_model_solutions.jsonl"
    except UserError as error:
        pytest.skip(str(error))
    rows = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    labels = {
        (model, number): (
            numeric_verdict(row[model]["solution"], row["ground_truth"].splitlines()[-1]).reward,
            row[model],
        )
        for number, row in enumerate(rows)
        for model in MODELS
    }
    assert [key for key, (reward, label) in labels.items() if reward != float(label["is_correct"])] == []
    assert (len(labels), sum(reward for reward, _ in labels.values())) == (5276, 2001)
