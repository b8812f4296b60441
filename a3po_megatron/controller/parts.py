"""What the loop is given: the fleet, problems, rewards, settings of the requests, files."""

from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from a3po_megatron.config.controller import AdvantageConfig
from a3po_megatron.controller.rows import RunFiles
from a3po_megatron.data.source import PromptSource
from a3po_megatron.records import Problem
from a3po_megatron.reward.base import Reward
from a3po_megatron.rollout.generator import Generator
from a3po_megatron.rollout.sampling import SamplingSettings
from a3po_megatron.rollout.transfer_messages import PublicationOutcome, SendPlan, Transfer


class Fleet(Generator, Protocol):
    """What the loop needs of `rollout/fleet.py`."""

    @property
    def needs_publication(self) -> bool:
        """Whether there are replicas, but none has the current weights or can get them by itself."""
        ...

    async def register(self, name: str, url: str, world_size: int) -> dict[str, str]:
        """Add a replica, or hear again from it; return its `state` and `reason`."""
        ...

    async def deregister(self, name: str, reason: str) -> None:
        """Drop a replica."""
        ...

    def status(self) -> dict[str, Any]:
        """Return the replicas and their states, for people."""
        ...

    async def begin_publication(
        self, version: int, manifest: Mapping[str, Sequence[Any]], transfer: Transfer, unique_id: str
    ) -> SendPlan:
        """Pause the replicas and make them receive."""
        ...

    async def finish_publication(self, version: int, error: str, kept: bool) -> PublicationOutcome:
        """Wait until every member has the weights and let them go on as `version`; `again`: they stay paused."""
        ...

    async def aclose(self) -> None:
        """Close the connections to the replicas."""
        ...


@dataclass(frozen=True)
class Parts:
    """What a run is made of: built by `recipes/controller.py`, by fakes in tests."""

    fleet: Fleet
    source: PromptSource
    heldout: Sequence[Problem]  # empty: no evaluation
    reward: Reward  # of training
    evaluation_reward: Reward  # of held-out problems: the answer alone
    advantage: AdvantageConfig
    shuffle_rewards: bool  # the negative control
    sampling: SamplingSettings  # of training; every request gets a seed of its own
    evaluation_sampling: SamplingSettings
    files: RunFiles
    say: Callable[[str], None]  # prints one line of progress
    close_rewards: Callable[[], Awaitable[None]]  # ends the reward's worker processes and connections
