"""The one way in which the controller's loops wait for each other."""

import asyncio
from collections.abc import Callable


class Changes:
    """Every change of the controller's state calls `notify`; every wait is a condition over that state with a deadline.

    All run in one event loop, so a condition is true for as long as its waiter does not await again.
    """

    def __init__(self) -> None:
        self._event = asyncio.Event()

    def notify(self) -> None:
        """Wake every waiter to look at its condition."""
        self._event.set()
        self._event = asyncio.Event()

    async def until(self, condition: Callable[[], bool], timeout_s: float | None, what: Callable[[], str]) -> None:
        """Return once `condition()` holds.

        Raises TimeoutError after `timeout_s` seconds, with `what()`, as it was then, in its text. None: the caller
        lives only as long as another wait that has a deadline.
        """
        deadline = None if timeout_s is None else asyncio.get_running_loop().time() + timeout_s
        while not condition():
            try:
                async with asyncio.timeout_at(deadline):
                    await self._event.wait()
            except TimeoutError:
                raise TimeoutError(f"waited {timeout_s:g} s for {what()}") from None
