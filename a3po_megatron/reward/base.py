"""The one interface of rewards, and what a batch does with them.

A reward function is `reward(problem, response_ids) -> float`. It reads token ids, as they were sampled; one that needs
text is wrapped with the decoder of the run's tokenizer (`on_text`).
"""

from collections.abc import Callable, Sequence

import numpy as np

from a3po_megatron.config.schema import RewardConfig
from a3po_megatron.records import Float32, Int32, Problem
from a3po_megatron.reward.exact import exact_match
from a3po_megatron.reward.numeric import numeric_reward

RewardFunction = Callable[[Problem, Int32], float]
Decoder = Callable[[Sequence[int]], str]


def build_reward(config: RewardConfig, decode: Decoder) -> RewardFunction:
    """Return the reward function that `config.kind` names; `decode` turns response ids into text where it is needed."""
    if config.kind == "exact":
        return exact_match
    return lambda problem, response_ids: numeric_reward(decode(response_ids.tolist()), problem.answer)


def shuffled_rewards(rewards: Float32, seed: int, batch_index: int) -> Float32:
    """Return `rewards` [samples of a batch] permuted: their distribution stays, what they say about a response goes.

    The permutation depends on (seed, batch_index) only.
    """
    return np.random.default_rng([seed, batch_index]).permutation(rewards)
