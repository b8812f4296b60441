"""Exact match on token ids: the reward of the arithmetic task."""

from collections.abc import Sequence

from a3po_megatron.data.arithmetic import EOS_ID, encode_text
from a3po_megatron.records import Int32, Problem, Sample, Verdict


def exact_match(problem: Problem, response_ids: Int32) -> float:
    """Return 1.0 if the response is the answer followed by the end token and nothing else, else 0.0.

    A right number that was cut off before the end token is worth nothing: the model has not said that it is done.
    """
    return float([*encode_text(problem.answer), EOS_ID] == list(response_ids))


async def judge_exact(problem: Problem, samples: Sequence[Sample]) -> list[Verdict]:
    """Judge every sample by `exact_match`."""
    rewards = [exact_match(problem, sample.response_ids) for sample in samples]
    return [
        Verdict(reward, "equal to the truth" if reward else "not the truth and the end token") for reward in rewards
    ]
