"""What a person sees while an evaluation goes on: a bar at a terminal, a line every tenth elsewhere."""

import time
from types import TracebackType
from typing import Self

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

LINES = 10


class ResponseProgress:
    """Counts responses. A context: the bar ends with it."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._began = time.monotonic()
        self._said = 0  # lines
        self._bar = Progress(
            TextColumn("responses"),
            BarColumn(bar_width=20),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TimeRemainingColumn(),
            console=console,
            disable=not console.is_terminal,
        )
        self._task = self._bar.add_task("", total=None)

    def __enter__(self) -> Self:
        self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._bar.stop()

    def say(self, line: str) -> None:
        """Print one line above the bar."""
        self._console.print(line, soft_wrap=True)

    def update(self, num_done: int, num_requests: int) -> None:
        """`num_done` of `num_requests` responses came."""
        self._bar.update(self._task, completed=num_done, total=num_requests)
        due = num_done * LINES // num_requests
        if not self._console.is_terminal and due > self._said:
            self._said = due
            self.say(f"{num_done} of {num_requests} responses after {time.monotonic() - self._began:.0f} s")
