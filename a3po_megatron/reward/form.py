"""Rewards that look at the form of a response alone: its format, and its length."""

import re
from collections.abc import Callable

from a3po_megatron.config.reward import FormatRewardConfig, OverlongRewardConfig
from a3po_megatron.records import Verdict
from a3po_megatron.reward.extract import find_answer

THINK = re.compile(r"\s*<think>(?:(?!</?think>).)*</think>(?:(?!</?think>).)*\S(?:(?!</?think>).)*", re.DOTALL)


def format_check(config: FormatRewardConfig) -> Callable[[str], Verdict]:
    """Return the function from a response's text to 1 where it has the form that is asked for, else 0."""
    if config.style == "regex":
        pattern = re.compile(config.pattern, re.DOTALL)
        return lambda text: _verdict(pattern.search(text) is not None, "the pattern")
    if config.style == "think":
        return lambda text: _verdict(THINK.fullmatch(text) is not None, "one closed <think> section and then an answer")
    style = config.style
    wanted = {"boxed": r"a closed \boxed{...}", "answer_line": "a line `Answer: x`"}[style]
    return lambda text: _verdict(not find_answer(text, style).problem, wanted)


def overlong_penalty(num_tokens: int, max_tokens: int, config: OverlongRewardConfig) -> Verdict:
    """Return DAPO's soft overlong punishment (arXiv 2503.14476, eq. 13) of a response of `num_tokens`.

    0 for |y| <= L_max - L_cache; (L_max - L_cache - |y|) / L_cache between; -1 from L_max on, where L_max is `max_tokens`
    and L_cache is `buffer_tokens`. Example: with 100 and 20, a response of 90 tokens gets -0.5.
    """
    excess = num_tokens - (max_tokens - config.buffer_tokens)
    if excess <= 0:
        return Verdict(0.0, "not overlong")
    return Verdict(-min(1.0, excess / config.buffer_tokens), f"{num_tokens} of at most {max_tokens} tokens")


def _verdict(fits: bool, wanted: str) -> Verdict:
    return Verdict(1.0, f"has {wanted}") if fits else Verdict(0.0, f"lacks {wanted}")
