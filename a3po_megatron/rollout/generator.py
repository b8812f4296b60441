"""What everything that wants responses is given: the interface of a fleet, and the seed of a request."""

import hashlib
from collections.abc import Sequence
from typing import Protocol

from a3po_megatron.records import Int32
from a3po_megatron.rollout.client import Generation, PartialGeneration
from a3po_megatron.rollout.sampling import SamplingSettings


class Generator(Protocol):
    """The part of a fleet that turns a prompt into a response."""

    async def generate(
        self,
        prompt_ids: Sequence[int] | Int32,
        sampling: SamplingSettings,
        request_id: str,
        partial: PartialGeneration | None = None,
    ) -> Generation:
        """Sample one response; `partial` receives its tokens as they arrive."""
        ...


def request_seed(run_seed: int, problem_id: str, epoch: int, sample_index: int) -> int:
    """Return the sampling seed of one request: another one for every sample, the same one in every run."""
    text = repr((run_seed, problem_id, epoch, sample_index))
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=4).digest()) & 0x7FFFFFFF
