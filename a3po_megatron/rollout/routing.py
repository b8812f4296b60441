"""Which replica answers a request, and who waits: the line in front of the fleet.

    request --> [line] --> home: the replica that read this prompt before, unless it has much more to do than another
                      \\-> else the one with the least to do
A replica takes no more than its limit (`watch.py` adapts it) and none while it takes new weights. Then requests wait here,
in the order in which they came; those that new weights interrupted go first, for they hold tokens that grow stale.
"""

import asyncio
from collections import OrderedDict, deque
from dataclasses import dataclass

from a3po_megatron.rollout.replicas import Replica, Replicas

MAX_HOMES = 16384  # prompts remembered


@dataclass(eq=False)
class _Waiter:
    prompt: int
    last: Replica | None
    place: asyncio.Future[Replica]


class Router:
    """Gives requests to replicas. `serve` must be called whenever a replica may take more than before."""

    def __init__(self, replicas: Replicas) -> None:
        self._replicas = replicas
        self._line: deque[_Waiter] = deque()
        self._homes: OrderedDict[int, Replica] = OrderedDict()  # by hash of the prompt

    @property
    def num_waiting(self) -> int:
        """Requests that no replica has room for."""
        return sum(not waiter.place.done() for waiter in self._line)

    async def enter(self, prompt: int, last: Replica | None, timeout_s: float) -> Replica:
        """Wait for a place on a replica and take it; `leave` gives it back. Raises TimeoutError.

        `prompt`: a hash of the prompt. `last`: the replica that answered the first part of this response, if any did.
        """
        waiter = _Waiter(prompt, last, asyncio.get_running_loop().create_future())
        if last is None:
            self._line.append(waiter)
        else:
            self._line.appendleft(waiter)
        self.serve()
        try:
            async with asyncio.timeout(timeout_s):
                return await waiter.place
        except BaseException:
            if waiter.place.done() and not waiter.place.cancelled():
                self.leave(waiter.place.result())  # the place came in the moment in which the wait ended
            raise

    def leave(self, replica: Replica) -> None:
        """Give a place back."""
        replica.running -= 1
        if replica.running == 0:
            replica.idle.set()
        self.serve()

    def serve(self) -> None:
        """Give every place that is free to whoever waits longest."""
        while self._line:
            waiter = self._line[0]
            if not waiter.place.done():  # else it gave up
                replica = self._choose(waiter)
                if replica is None:
                    return
                replica.running += 1
                replica.idle.clear()
                waiter.place.set_result(replica)
            self._line.popleft()

    def _choose(self, waiter: _Waiter) -> Replica | None:
        """Return the replica for this request, None if all are full."""
        free = [replica for replica in self._replicas if replica.has_room]
        if not free:
            return None
        choice = min(free, key=lambda replica: replica.running / replica.limit)
        for home in (waiter.last, self._homes.get(waiter.prompt)):
            # A quarter more work than the least loaded has is the price of a prompt that need not be read again.
            if home in free and home.running <= choice.running + home.limit // 4:
                choice = home
                break
        self._homes[waiter.prompt] = choice
        self._homes.move_to_end(waiter.prompt)
        if len(self._homes) > MAX_HOMES:
            self._homes.popitem(last=False)
        return choice
