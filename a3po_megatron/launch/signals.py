"""Ctrl-C, SIGTERM and a closed terminal as a fact to look at, not an exception from anywhere: the launcher always ends in order."""

import signal
from types import FrameType
from typing import Self


class SignalCount:
    """Counts SIGINT, SIGTERM and SIGHUP while the context is open. The first asks to end, the second not to wait."""

    def __init__(self) -> None:
        self.received: list[signal.Signals] = []

    @property
    def first(self) -> signal.Signals | None:
        """The signal that asked to end, if one came."""
        return self.received[0] if self.received else None

    def in_a_hurry(self) -> bool:
        """Whether somebody asked twice."""
        return len(self.received) > 1

    def __enter__(self) -> Self:
        endings = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
        self._before = {number: signal.signal(number, self._note) for number in endings}
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _note(self, number: int, _: FrameType | None) -> None:
        self.received.append(signal.Signals(number))
