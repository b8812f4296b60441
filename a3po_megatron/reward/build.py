"""From the settings to the rewards of a run, and the checks of those settings."""

import asyncio
import math
import re
from collections.abc import Sequence

from a3po_megatron.config.address import is_url
from a3po_megatron.config.reward import RewardConfig
from a3po_megatron.errors import UserError
from a3po_megatron.records import Problem, Sample, Verdict
from a3po_megatron.reward.base import Decoder, Judge, Part, RewardError, WeightedSum
from a3po_megatron.reward.endpoint import Endpoint
from a3po_megatron.reward.exact import judge_exact
from a3po_megatron.reward.form import format_check, overlong_penalty
from a3po_megatron.reward.judge import MathSettings
from a3po_megatron.reward.numeric import final_number, numeric_verdict
from a3po_megatron.reward.pool import WorkerPool, check_golds
from a3po_megatron.reward.worker import Request

CUT_OFF = Verdict(0.0, "cut off at the token limit (reward.accept_truncated=false)")


class Rewards:
    """The rewards of one run: `training` has all parts, `evaluation` the answer alone, so that accuracy stays one.

    With `reward.kind=none` both are the sum of the user's parts.
    """

    def __init__(self, config: RewardConfig, decode: Decoder, max_response_tokens: int) -> None:
        self.config = config
        self.pool = WorkerPool(config.pool, config.python.path if config.python.weight else "")
        self._decode = decode
        self._endpoint = Endpoint(config.http)
        answer = [] if config.kind == "none" else [Part("answer", config.weight, self._answer_judge())]
        self.training = WeightedSum([*answer, *self._other_parts(max_response_tokens)])
        self.evaluation = WeightedSum([Part("answer", 1.0, answer[0].judge)]) if answer else self.training

    def check(self, problems: Sequence[Problem]) -> None:
        """Raise UserError for an answer that nothing could be compared with, or a function that cannot be loaded."""
        try:
            self._check(problems)
        except BaseException:
            self.pool.close()
            raise

    def _check(self, problems: Sequence[Problem]) -> None:
        if self.config.kind == "math":
            check_golds(
                self.pool, [(problem.id, problem.answer) for problem in problems if not _is_number(problem.answer)]
            )
        if self.config.kind == "numeric":
            for problem in problems:
                if final_number(problem.answer) is None:
                    raise UserError(f"data: problem {problem.id}: the answer {problem.answer[:80]!r} holds no number")
        if self.config.python.weight:
            try:
                (verdict,) = self.pool.judge_now([Request("load", "", "", path=self.config.python.path)])
            except RewardError as error:
                path = self.config.python.path
                raise UserError(f"reward.python.path={path}: {str(error).removeprefix(f'{path}: ')}") from None
            if verdict.reward != 1.0:
                raise UserError(f"reward.python.path={self.config.python.path}: {verdict.reason}")

    async def aclose(self) -> None:
        """End the workers, close the connections."""
        await self._endpoint.aclose()
        await asyncio.to_thread(self.pool.close)

    def _answer_judge(self) -> Judge:
        if self.config.kind == "exact":
            return judge_exact
        return self._judge_numeric if self.config.kind == "numeric" else self._judge_math

    def _other_parts(self, max_response_tokens: int) -> list[Part]:
        config = self.config
        parts = []
        if config.format.weight:
            check = format_check(config.format)

            async def judge_format(problem: Problem, samples: Sequence[Sample]) -> list[Verdict]:
                return [check(text) for text in await self._texts(samples)]

            parts.append(Part("format", config.format.weight, judge_format))
        if config.overlong.weight:

            async def judge_length(problem: Problem, samples: Sequence[Sample]) -> list[Verdict]:
                return [overlong_penalty(len(s.response_ids), max_response_tokens, config.overlong) for s in samples]

            parts.append(Part("overlong", config.overlong.weight, judge_length))
        if config.python.weight:
            parts.append(Part("python", config.python.weight, self._judge_python))
        if config.http.weight:

            async def judge_http(problem: Problem, samples: Sequence[Sample]) -> list[Verdict]:
                return await self._endpoint.judge(problem.id, problem.answer, await self._texts(samples))

            parts.append(Part("http", config.http.weight, judge_http))
        return parts

    async def _judge_numeric(self, problem: Problem, samples: Sequence[Sample]) -> list[Verdict]:
        texts = await self._texts(samples)
        verdicts = await asyncio.to_thread(lambda: [numeric_verdict(text, problem.answer) for text in texts])
        return [v if self._due(sample) else CUT_OFF for v, sample in zip(verdicts, samples, strict=True)]

    async def _judge_math(self, problem: Problem, samples: Sequence[Sample]) -> list[Verdict]:
        settings = MathSettings(self.config.convention)
        texts = await self._texts(samples)
        judged = [self._due(sample) for sample in samples]
        requests = [
            Request("math", problem.answer, text, settings) for text, due in zip(texts, judged, strict=True) if due
        ]
        try:
            verdicts = iter(await self.pool.judge(requests))
        except RewardError as error:
            raise RewardError(f"problem {problem.id}: the answer {problem.answer[:80]!r}: {error}") from None
        return [next(verdicts) if due else CUT_OFF for due in judged]

    def _due(self, sample: Sample) -> bool:
        return self.config.accept_truncated or sample.finish_reason != "length"

    async def _judge_python(self, problem: Problem, samples: Sequence[Sample]) -> list[Verdict]:
        path = self.config.python.path
        texts = await self._texts(samples)
        requests = [Request("python", problem.answer, text, path=path, problem_id=problem.id) for text in texts]
        try:
            return await self.pool.judge(requests)
        except RewardError as error:
            raise RewardError(f"reward.python.path={path}: problem {problem.id}: {error}") from None

    async def _texts(self, samples: Sequence[Sample]) -> list[str]:
        return await asyncio.to_thread(lambda: [self._decode(sample.response_ids.tolist()) for sample in samples])


def check_reward(config: RewardConfig, task: str, max_response_tokens: int) -> None:
    """Refuse reward settings that cannot work or do not fit the task. Raises UserError."""
    kinds = ("exact", "none") if task == "arithmetic" else ("math", "numeric", "none")
    if config.kind not in kinds:
        raise UserError(f"reward.kind={config.kind} does not fit data.task={task}; use reward.kind={kinds[0]}")
    weights = {name: getattr(config, name).weight for name in ("format", "overlong", "python", "http")}
    for name, weight in {
        "reward.weight": config.weight,
        **{f"reward.{n}.weight": w for n, w in weights.items()},
    }.items():
        if not (math.isfinite(weight) and weight >= 0):
            raise UserError(f"{name}={weight}: a finite number, at least 0")
    if config.kind == "none" and not (weights["python"] or weights["http"]):
        raise UserError("reward.kind=none: nothing is judged; give reward.python or reward.http a weight above 0")
    if config.kind != "none" and config.weight == 0:
        raise UserError("reward.weight=0: the answer is judged for nothing; make it above 0 or set reward.kind=none")
    _check_parts(config, max_response_tokens)
    pool = config.pool
    for name, value, minimum in (
        ("num_workers", pool.num_workers, 1),
        ("memory_bytes", pool.memory_bytes, 0),
        ("max_response_chars", pool.max_response_chars, 1),
    ):
        if value < minimum:
            raise UserError(f"reward.pool.{name}={value}: must be at least {minimum}")
    if 0 < pool.memory_bytes < 1 << 29:
        raise UserError(
            f"reward.pool.memory_bytes={pool.memory_bytes}: a worker needs 536870912 (0.5 GiB) or more; 0: no limit"
        )
    if not pool.timeout_s > 0:
        raise UserError(f"reward.pool.timeout_s={pool.timeout_s}: a number of seconds above 0")


def _check_parts(config: RewardConfig, max_response_tokens: int) -> None:
    if config.format.weight and config.format.style == "regex":
        if not config.format.pattern:
            raise UserError("reward.format.pattern is empty: reward.format.style=regex needs a regular expression")
        try:
            re.compile(config.format.pattern)
        except re.error as error:
            raise UserError(
                f"reward.format.pattern={config.format.pattern}: not a regular expression: {error}"
            ) from None
    if config.overlong.weight and not 1 <= config.overlong.buffer_tokens <= max_response_tokens:
        raise UserError(
            f"reward.overlong.buffer_tokens={config.overlong.buffer_tokens}: between 1 and "
            f"rollout.max_response_tokens={max_response_tokens}"
        )
    if config.python.weight and not re.fullmatch(r"\w+(\.\w+)*:\w+", config.python.path):
        raise UserError(f"reward.python.path={config.python.path or '(empty)'}: expected package.module:function")
    if config.http.weight:
        if not is_url(config.http.url):
            raise UserError(
                f"reward.http.url={config.http.url or '(empty)'}: expected http://HOST[:PORT]/... or https://HOST[:PORT]/..."
            )
        for name in ("timeout_s", "max_tries", "max_concurrent"):
            if not getattr(config.http, name) > 0:
                raise UserError(f"reward.http.{name}={getattr(config.http, name)}: must be above 0")


def _is_number(answer: str) -> bool:
    """Whether an answer is so plain that no worker needs to look at it."""
    return re.fullmatch(r"-?\d+(?:\.\d+)?", answer) is not None
