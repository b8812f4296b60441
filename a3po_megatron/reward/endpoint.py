"""A user's own reward behind an HTTP endpoint.

Request, one a group:   POST {"problem_id": str, "answer": str, "responses": [str, ...]}
Answer, status 200:     {"rewards": [number, ...]}, optionally with "reasons": [str, ...] of the same length
"""

import asyncio
import math
from collections.abc import Sequence
from typing import Any

import httpx

from a3po_megatron.config.reward import HttpRewardConfig
from a3po_megatron.records import Verdict
from a3po_megatron.reward.base import RewardError

FIRST_PAUSE_S = 0.5  # before the second try; then doubled
MAX_BODY_BYTES = 1 << 20


class Endpoint:
    """Asks one endpoint; a try that fails for a reason that may pass is repeated, `max_tries` in all."""

    def __init__(self, config: HttpRewardConfig, transport: httpx.AsyncBaseTransport | None = None) -> None:
        self._config = config
        self._transport = transport
        self._client: httpx.AsyncClient | None = None
        self._slots = asyncio.Semaphore(config.max_concurrent)

    async def judge(self, problem_id: str, answer: str, responses: Sequence[str]) -> list[Verdict]:
        """Return one verdict a response. Raises RewardError when the endpoint refuses, or keeps failing."""
        body = {"problem_id": problem_id, "answer": answer, "responses": [_text(response) for response in responses]}
        pause_s = FIRST_PAUSE_S
        for attempt in range(1, self._config.max_tries + 1):
            try:
                async with self._slots, asyncio.timeout(self._config.timeout_s):
                    return self._verdicts(await self._post(body), len(responses))
            except (httpx.TransportError, TimeoutError) as error:
                trouble = str(error) or type(error).__name__
            except _PassingTrouble as error:
                trouble = str(error)
            if attempt < self._config.max_tries:
                await asyncio.sleep(pause_s)
                pause_s *= 2
        raise RewardError(f"reward.http.url={self._config.url}: failed {self._config.max_tries} times, last: {trouble}")

    async def aclose(self) -> None:
        """Close the connections."""
        if self._client is not None:
            await self._client.aclose()

    async def _post(self, body: dict[str, Any]) -> Any:
        if self._client is None:
            self._client = httpx.AsyncClient(transport=self._transport, timeout=self._config.timeout_s, trust_env=False)
        answer = await self._client.post(self._config.url, json=body)
        if answer.status_code >= 500 or answer.status_code in (408, 425, 429):
            raise _PassingTrouble(f"status {answer.status_code}: {answer.text[:100]}")
        if answer.status_code != 200:
            raise self._broken(f"status {answer.status_code}: {answer.text[:100]}")
        if len(answer.content) > MAX_BODY_BYTES:
            raise self._broken(f"an answer of {len(answer.content)} bytes, more than {MAX_BODY_BYTES}")
        try:
            return answer.json()
        except ValueError:
            raise self._broken("the answer is not JSON") from None

    def _verdicts(self, answer: Any, count: int) -> list[Verdict]:
        rewards = answer.get("rewards") if isinstance(answer, dict) else None
        if not isinstance(rewards, list) or len(rewards) != count:
            raise self._broken(f'expected {{"rewards": [{count} numbers]}}')
        reasons = answer.get("reasons", ["judged by the endpoint"] * count)
        if not isinstance(reasons, list) or len(reasons) != count or not all(isinstance(text, str) for text in reasons):
            raise self._broken(f'"reasons" must be {count} texts')
        for reward in rewards:
            if isinstance(reward, bool) or not isinstance(reward, int | float) or not math.isfinite(reward):
                raise self._broken(f"a reward of {reward!r:.50} is not a finite number")
        return [
            Verdict(float(reward), text[:300] or "judged by the endpoint")
            for reward, text in zip(rewards, reasons, strict=True)
        ]

    def _broken(self, what: str) -> RewardError:
        return RewardError(f"reward.http.url={self._config.url}: {' '.join(what.split())}")


class _PassingTrouble(Exception):
    """The endpoint is there, but busy or unwell."""


def _text(response: str) -> str:
    return response.encode("utf-8", "replace").decode()
