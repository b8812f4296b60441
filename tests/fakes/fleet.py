"""A fleet without servers: answers sums, one token at a time, under the version that is live when a token is drawn."""

import asyncio
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from a3po_megatron.data.arithmetic import EOS_ID, decode_ids, encode_text
from a3po_megatron.records import Int32
from a3po_megatron.rollout.client import Generation, PartialGeneration
from a3po_megatron.rollout.sampling import SamplingSettings
from a3po_megatron.rollout.transfer_messages import PublicationOutcome, Rendezvous, SendPlan, Transfer


class FakeFleet:
    """Right answers in greedy mode, else right or off by one, as the request's seed says. A pause holds every token."""

    def __init__(self, token_s: float = 0.0) -> None:
        self.token_s = token_s
        self.version = 0
        self.replicas: dict[str, str] = {}
        self.greedy_requests = 0
        self.tokens_drawn = 0
        self.may_draw = asyncio.Event()
        self.may_draw.set()
        self.failure: Exception | None = None
        self.hold: Callable[[str], bool] = lambda request_id: False  # which responses stop after their first token
        self.release = asyncio.Event()  # lets them go on
        self.needs_publication = False
        self.attempts_that_fail = 0
        self.calls: list[str] = []

    async def register(self, name: str, url: str, world_size: int) -> dict[str, str]:
        self.replicas[name] = url
        return {"state": "current", "reason": ""}

    async def deregister(self, name: str, reason: str) -> None:
        self.replicas.pop(name, None)

    async def generate(
        self,
        prompt_ids: Sequence[int] | Int32,
        sampling: SamplingSettings,
        request_id: str,
        partial: PartialGeneration | None = None,
    ) -> Generation:
        if self.failure is not None:
            raise self.failure
        partial = PartialGeneration() if partial is None else partial
        a, b = decode_ids(prompt_ids).rstrip("=").split("+")
        error = 0
        if sampling.temperature > 0:
            assert sampling.seed is not None
            error = int(np.random.default_rng(sampling.seed).integers(2))
        else:
            assert sampling.evaluation
            self.greedy_requests += 1
        for index, token in enumerate([*encode_text(str(int(a) + int(b) + error)), EOS_ID]):
            if index == 1 and self.hold(request_id):
                await self.release.wait()
            await asyncio.sleep(self.token_s)
            await self.may_draw.wait()
            partial.token_ids.append(int(token))
            partial.logprobs.append(-0.5)
            partial.versions.append(self.version)
            self.tokens_drawn += 1
        return Generation(
            np.array(partial.token_ids, dtype=np.int32),
            np.array(partial.logprobs, dtype=np.float32),
            np.array(partial.versions, dtype=np.int32),
            "stop",
        )

    async def begin_publication(
        self, version: int, manifest: Mapping[str, Sequence[Any]], transfer: Transfer = "gloo", unique_id: str = ""
    ) -> SendPlan:
        self.may_draw.clear()
        self.calls.append(f"begin {version} {' '.join(manifest['names'])}")
        rendezvous = Rendezvous(transfer=transfer, world_size=1 + len(self.replicas), store="somewhere", unique_id="")
        return SendPlan(1, rendezvous, list(self.replicas), bucket_bytes=1024, keep_in="", unique_id_wanted=False)

    async def finish_publication(self, version: int, error: str = "", kept: bool = False) -> PublicationOutcome:
        if self.attempts_that_fail:
            self.attempts_that_fail -= 1
            return PublicationOutcome(version, [], {}, again=True)
        await asyncio.sleep(self.token_s)
        self.version = version
        self.may_draw.set()
        self.calls.append(f"finish {version}")
        self.needs_publication = False
        return PublicationOutcome(version, list(self.replicas), {}, again=False)

    def status(self) -> dict[str, Any]:
        return {"replicas": dict(self.replicas)}

    async def aclose(self) -> None:
        self.replicas.clear()
