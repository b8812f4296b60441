"""Who is in the fleet: the registered replicas, those that were dropped and why, and the version that new tokens get.

    supervisor --register--> [behind] --publication--> [current]
                                 any failed call -----> [fenced]  (its supervisor restarts it, under a new name)

`fleet.py` asks the current ones for tokens, `publication.py` brings all of them to a new version. Imports neither torch nor
vllm. All methods belong to one asyncio loop.
"""

import asyncio
from collections.abc import Awaitable, Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Literal

from a3po_megatron.rollout.client import ReplicaClient
from a3po_megatron.rollout.control import ReplicaError

MAX_FENCED_REMEMBERED = 100


@dataclass(eq=False)
class Replica:
    """One registered server."""

    client: ReplicaClient
    world_size: int  # its workers in the weight group
    state: Literal["current", "behind"]  # behind: must not answer before it has taken part in a publication
    limit: int  # requests it is given at once
    running: int = 0  # requests it is answering
    held: bool = False  # is given none: new weights are on their way
    times_held: int = 0
    idle: asyncio.Event = field(default_factory=asyncio.Event)  # set while it answers none
    failed: asyncio.Event = field(default_factory=asyncio.Event)
    dropped_for: str = ""  # the reason, once `failed` is set

    def __post_init__(self) -> None:
        self.idle.set()

    @property
    def has_room(self) -> bool:
        """Whether it may be given one more request now."""
        return self.state == "current" and not self.held and self.running < self.limit


class Replicas:
    """The registry. `changed` is notified whenever membership, a state or the version changes."""

    def __init__(self, version: int) -> None:
        """`version`: that of the weights in the servers' model folder."""
        self.version = version
        self.changed = asyncio.Condition()
        self.on_change: Callable[[], None] = lambda: None  # called at every change too
        self.fenced: dict[str, str] = {}  # name -> reason
        self._replicas: dict[str, Replica] = {}

    def __iter__(self) -> Iterator[Replica]:
        return iter(list(self._replicas.values()))

    def get(self, name: str) -> Replica | None:
        """Return the replica of that name, if it is registered."""
        return self._replicas.get(name)

    def holds(self, replica: Replica) -> bool:
        """Whether this very replica is still registered."""
        return self._replicas.get(replica.client.name) is replica

    async def add(self, replica: Replica) -> None:
        """Register `replica` under its client's name."""
        self._replicas[replica.client.name] = replica
        await self.notify()

    async def drop(self, name: str, reason: str) -> None:
        """Fence a replica: its calls end. An unknown name is not an error: two sides may see one death.

        It is fenced too, for the status to show: a supervisor tells so of a slot that it retired.
        """
        replica = self._replicas.pop(name, None)
        self.fenced.setdefault(name, reason)
        while len(self.fenced) > MAX_FENCED_REMEMBERED:
            del self.fenced[next(iter(self.fenced))]
        if replica is None:
            return
        replica.dropped_for = reason
        replica.failed.set()
        await replica.client.aclose()
        await self.notify()

    async def on_each(self, members: Sequence[Replica], call: Callable[[Replica], Awaitable[None]]) -> dict[str, str]:
        """Do `call` on all members at once; drop those that fail and return their reasons by name."""

        async def guarded(replica: Replica) -> tuple[str, str] | None:
            try:
                await unless_dropped(replica, call(replica))
            except ReplicaError as error:
                await self.drop(replica.client.name, str(error))
                return replica.client.name, str(error)
            return None

        return dict(failure for failure in await asyncio.gather(*map(guarded, members)) if failure)

    async def notify(self) -> None:
        """Wake whoever waits for a change."""
        self.on_change()
        async with self.changed:
            self.changed.notify_all()


async def unless_dropped[T](replica: Replica, call: Awaitable[T]) -> T:
    """Await `call`, but end it with ReplicaError as soon as `replica` is dropped."""
    work = asyncio.ensure_future(call)
    watch = asyncio.ensure_future(replica.failed.wait())
    try:
        await asyncio.wait((work, watch), return_when=asyncio.FIRST_COMPLETED)
        # A client that is closed under a call lets it fail in many ways; all of them mean that the replica was dropped.
        if replica.failed.is_set() and (not work.done() or work.exception() is not None):
            raise ReplicaError(f"replica {replica.client.name} was dropped: {replica.dropped_for}")
        return work.result()
    finally:
        watch.cancel()
        work.cancel()
