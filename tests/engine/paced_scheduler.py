"""vLLM's scheduler, slowed down on demand: loaded into the test server, so that a response lasts as long as a test needs.

A tiny model writes thousands of tokens in the seconds for which a busy machine may not give the test process a turn. A
test that has something to do in the middle of a response says from which length on the server shall take its time.
"""

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.output import SchedulerOutput

PACE_FILE = "A3PO_TEST_PACE_FILE"  # environment variable: a file that holds a number of tokens, or is not there
STEP_S = 0.02  # a thousand tokens of a slow response outlast a pause of the test process of twenty seconds


class PacedScheduler(AsyncScheduler):
    """Sleeps before a step while the pace file is there and every running request has as many tokens as it says."""

    def schedule(self, *args: Any, **kwargs: Any) -> SchedulerOutput:
        """Return what vLLM's own scheduler does."""
        try:
            length = int(Path(os.environ[PACE_FILE]).read_text())
        except (FileNotFoundError, ValueError):  # not there, or just being written
            length = None
        if length is not None and all(request.num_tokens >= length for request in self.running):
            time.sleep(STEP_S)
        return super().schedule(*args, **kwargs)


@contextmanager
def slow_from(pace_file: Path, num_tokens: int) -> Iterator[None]:
    """Let the server be slow from `num_tokens` (prompt and response) on, until the block ends."""
    pace_file.write_text(str(num_tokens))
    try:
        yield
    finally:
        pace_file.unlink()
