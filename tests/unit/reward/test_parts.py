"""The parts of a reward, their sum, and the rewards that a run's settings build."""

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from a3po_megatron.config.reward import (
    FormatRewardConfig,
    HttpRewardConfig,
    OverlongRewardConfig,
    PythonRewardConfig,
    RewardConfig,
    RewardPoolConfig,
)
from a3po_megatron.errors import UserError
from a3po_megatron.records import Problem, Sample, Verdict
from a3po_megatron.reward.base import Part, WeightedSum
from a3po_megatron.reward.build import Rewards, check_reward
from a3po_megatron.reward.form import format_check, overlong_penalty

ONE_WORKER = RewardPoolConfig(num_workers=1, timeout_s=100)


def problem(answer: str = "42") -> Problem:
    return Problem("p", np.array([1], dtype=np.int32), answer)


def sample(text: str, finish_reason: str = "stop") -> Sample:
    ids = np.array([ord(character) for character in text], dtype=np.int32)
    zeros = np.zeros(len(ids))
    return Sample("p", problem().prompt_ids, ids, zeros.astype(np.float32), zeros.astype(np.int32), finish_reason)


def decode(ids: Sequence[int]) -> str:
    return "".join(chr(token) for token in ids)


def judged(config: RewardConfig, samples: Sequence[Sample], answer: str = "42") -> tuple[list[Verdict], list[Verdict]]:
    """Return the verdicts of training and of evaluation."""

    async def main() -> tuple[list[Verdict], list[Verdict]]:
        rewards = Rewards(config, decode, max_response_tokens=40)
        try:
            rewards.check([problem(answer)])
            training = await rewards.training.judge(problem(answer), samples)
            return training, await rewards.evaluation.judge(problem(answer), samples)
        finally:
            await rewards.aclose()

    return asyncio.run(main())


@pytest.mark.parametrize(
    ("num_tokens", "penalty"), [(0, 0.0), (80, 0.0), (81, -0.05), (90, -0.5), (100, -1.0), (130, -1.0)]
)
def test_the_overlong_penalty_is_linear_over_the_buffer(num_tokens: int, penalty: float) -> None:
    config = OverlongRewardConfig(weight=1.0, buffer_tokens=20)
    assert overlong_penalty(num_tokens, 100, config).reward == pytest.approx(penalty)


@pytest.mark.parametrize(
    ("style", "pattern", "text", "reward"),
    [
        ("boxed", "", r"so \boxed{5}", 1.0),
        ("boxed", "", r"so \boxed{5", 0.0),
        ("boxed", "", "Answer: 5", 0.0),
        ("answer_line", "", "so\nAnswer: 5", 1.0),
        ("answer_line", "", "so 5", 0.0),
        ("think", "", "<think>a</think>b", 1.0),
        ("think", "", "<think>a</think>", 0.0),
        ("think", "", "<think>a</think>b<think>c</think>d", 0.0),
        ("think", "", "a</think>b", 0.0),
        ("regex", r"^First.*Last$", "First\nthen\nLast", 1.0),
        ("regex", r"^First.*Last$", "Last", 0.0),
    ],
)
def test_the_format_is_rewarded(style: str, pattern: str, text: str, reward: float) -> None:
    verdict = format_check(FormatRewardConfig(1.0, style, pattern))(text)  # type: ignore[arg-type]
    assert verdict.reward == reward
    assert verdict.reason


def test_the_sum_weighs_every_part_and_names_it_in_the_reason() -> None:
    async def always(problem: Problem, samples: Sequence[Sample]) -> list[Verdict]:
        return [Verdict(1.0, "because", "x")] * len(samples)

    async def half(problem: Problem, samples: Sequence[Sample]) -> list[Verdict]:
        return [Verdict(-0.5, "too long")] * len(samples)

    total = WeightedSum([Part("answer", 1.0, always), Part("overlong", 0.5, half)])
    verdicts = asyncio.run(total.judge(problem(), [sample("a"), sample("b")]))
    assert verdicts == [Verdict(0.75, "answer +1 (because); overlong -0.25 (too long)", "x")] * 2


def test_a_math_run_judges_answers_format_and_length_and_evaluates_the_answer_alone() -> None:
    config = RewardConfig(
        kind="math",
        format=FormatRewardConfig(weight=0.25, style="boxed"),
        overlong=OverlongRewardConfig(weight=1.0, buffer_tokens=10),
        pool=ONE_WORKER,
    )
    samples = [
        sample(r"\boxed{42}"),
        sample(r"\boxed{41}"),
        sample("Answer: 42"),
        sample("it is thirty-five tokens \\boxed{42}"),
        sample(r"\boxed{42} and so on", finish_reason="length"),
    ]
    training, evaluation = judged(config, samples)
    assert [verdict.reward for verdict in training] == pytest.approx([1.25, 0.25, 1.0, 0.75, 0.25])
    assert [verdict.reward for verdict in evaluation] == [1.0, 0.0, 1.0, 1.0, 0.0]
    assert "cut off at the token limit" in evaluation[4].reason
    accepting, _ = judged(replace(config, accept_truncated=True), samples[4:])
    assert accepting[0].reward == 1.25


def test_numeric_and_exact_still_judge_by_themselves_and_start_no_worker() -> None:
    training, _ = judged(RewardConfig(kind="numeric"), [sample("so 42"), sample("so 43"), sample("")])
    assert [(v.reward, bool(v.reason)) for v in training] == [(1.0, True), (0.0, True), (0.0, True)]


def test_a_users_function_is_a_part_and_may_be_the_only_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "mine.py").write_text(
        "def brevity(response, answer, problem_id):\n    return 1 / len(response), f'{problem_id} wants {answer}'\n"
    )
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    config = RewardConfig(kind="none", python=PythonRewardConfig(2.0, "mine:brevity"), pool=ONE_WORKER)
    training, evaluation = judged(config, [sample("ab")])
    assert training == evaluation == [Verdict(1.0, "p wants 42")]


@pytest.mark.parametrize(("path", "message"), [("nowhere:f", "cannot import"), ("math:nothing", "has no nothing")])
def test_a_function_that_cannot_be_loaded_is_refused_before_the_run(path: str, message: str) -> None:
    config = RewardConfig(kind="none", python=PythonRewardConfig(1.0, path), pool=ONE_WORKER)
    with pytest.raises(UserError, match=rf"reward\.python\.path={path}: .*{message}"):
        judged(config, [])


def test_a_truth_that_cannot_be_judged_is_refused_before_the_run() -> None:
    with pytest.raises(UserError, match=r"problem p: the answer .* cannot be judged"):
        judged(RewardConfig(kind="math", pool=ONE_WORKER), [], answer=r"\frac{")
    with pytest.raises(UserError, match="problem p: the answer 'many' holds no number"):
        judged(RewardConfig(kind="numeric"), [], answer="many")


@pytest.mark.parametrize(
    ("config", "task", "message"),
    [
        (RewardConfig(kind="math"), "arithmetic", "reward.kind=math does not fit data.task=arithmetic"),
        (RewardConfig(kind="exact"), "gsm8k", "reward.kind=exact does not fit data.task=gsm8k; use reward.kind=math"),
        (RewardConfig(kind="none"), "gsm8k", "reward.kind=none: nothing is judged"),
        (RewardConfig(weight=0.0), "arithmetic", "reward.weight=0: the answer is judged for nothing"),
        (RewardConfig(weight=-1.0), "arithmetic", "reward.weight=-1.0: a finite number, at least 0"),
        (RewardConfig(format=FormatRewardConfig(1.0, "regex", "")), "arithmetic", "reward.format.pattern is empty"),
        (RewardConfig(format=FormatRewardConfig(1.0, "regex", "(")), "arithmetic", "not a regular expression"),
        (
            RewardConfig(overlong=OverlongRewardConfig(1.0, 0)),
            "arithmetic",
            "between 1 and rollout.max_response_tokens=40",
        ),
        (
            RewardConfig(python=PythonRewardConfig(1.0, "")),
            "arithmetic",
            r"reward.python.path=\(empty\): expected package",
        ),
        (
            RewardConfig(http=HttpRewardConfig(1.0, "http://example:port/judge")),
            "arithmetic",
            "reward.http.url=http://example:port/judge: expected http://",
        ),
        (
            RewardConfig(http=HttpRewardConfig(1.0, "example")),
            "arithmetic",
            "reward.http.url=example: expected http://",
        ),
        (RewardConfig(http=HttpRewardConfig(1.0, "http://x", max_tries=0)), "arithmetic", "reward.http.max_tries=0"),
        (
            RewardConfig(pool=RewardPoolConfig(num_workers=0)),
            "arithmetic",
            "reward.pool.num_workers=0: must be at least 1",
        ),
        (
            RewardConfig(pool=RewardPoolConfig(memory_bytes=1000)),
            "arithmetic",
            "reward.pool.memory_bytes=1000: a worker",
        ),
        (
            RewardConfig(pool=RewardPoolConfig(timeout_s=0)),
            "arithmetic",
            "reward.pool.timeout_s=0: a number of seconds",
        ),
    ],
)
def test_settings_that_cannot_work_are_one_line(config: RewardConfig, task: str, message: str) -> None:
    with pytest.raises(UserError, match=message) as error:
        check_reward(config, task, max_response_tokens=40)
    assert "\n" not in str(error.value)
