"""The arithmetic task: vocabulary, split, encoding, exact-match reward."""

import random

import numpy as np
import pytest

from a3po_megatron.config.data import ArithmeticTaskConfig
from a3po_megatron.data.arithmetic import EOS_ID, TOKENS, ArithmeticTask, decode_ids
from a3po_megatron.errors import UserError
from a3po_megatron.reward.exact import exact_match


def test_the_split_is_the_front_and_the_rest_of_one_seeded_shuffle() -> None:
    task = ArithmeticTask(ArithmeticTaskConfig())
    questions = [(a, b) for a in range(100) for b in range(100)]
    random.Random(1234).shuffle(questions)
    assert task.heldout_questions == questions[:1000]
    assert task.train_questions == questions[1000:]
    # Frozen, so that a change of the generator is noticed: the checkpoint of a warm start depends on the split.
    assert task.heldout_questions[:3] == [(13, 54), (26, 16), (86, 57)]
    assert task.train_questions[:3] == [(52, 48), (89, 40), (69, 80)]


def test_a_question_becomes_characters_and_its_answer_ends() -> None:
    task = ArithmeticTask(ArithmeticTaskConfig())
    prompt, answer = task.encode((7, 25))
    assert prompt.tolist() == [9, 12, 4, 7, 13]
    assert answer.tolist() == [5, 4, EOS_ID]
    assert prompt.dtype == answer.dtype == np.int32
    assert decode_ids([*prompt, *answer]) == "7+25=32<eos>"
    assert [TOKENS[i] for i in (0, 1, 2, 11, 12, 13)] == ["<pad>", "<eos>", "0", "9", "+", "="]


def test_problems_carry_the_prompt_and_the_answer_as_text() -> None:
    task = ArithmeticTask(ArithmeticTaskConfig())
    (problem,) = task.problems([(99, 99)])
    assert (problem.id, problem.answer, problem.prompt_ids.tolist()) == ("99+99", "198", [11, 11, 12, 11, 11, 13])


@pytest.mark.parametrize(
    ("response", "reward"),
    [("198$", 1.0), ("198", 0.0), ("198$$", 0.0), ("0198$", 0.0), ("199$", 0.0), ("$198", 0.0), ("", 0.0)],
)
def test_only_the_answer_with_its_end_token_earns_the_reward(response: str, reward: float) -> None:
    (problem,) = ArithmeticTask(ArithmeticTaskConfig()).problems([(99, 99)])
    ids = [EOS_ID if character == "$" else TOKENS.index(character) for character in response]
    assert exact_match(problem, np.array(ids, dtype=np.int32)) == reward


def test_holding_out_every_question_is_refused() -> None:
    with pytest.raises(UserError, match=r"num_heldout=121: there are 121 questions"):
        ArithmeticTask(ArithmeticTaskConfig(max_operand=10, num_heldout=121))
