"""Words from rank 0 to all ranks, while rank 0 waits for the controller. Bytes only; nothing is unpickled.

The other ranks wait here, in a group whose deadline covers what rank 0 may wait for; the collectives of training keep
their own, shorter one (`actor.timeout_s`).
"""

from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta

import numpy as np
import torch
import torch.distributed as dist

from a3po_megatron.config.controller import ControllerConfig

FAILED = b"failed"
SLACK_S = 300.0  # for connecting, and what an answer takes beyond the wait that the controller ends


def longest_wait_s(controller: ControllerConfig) -> float:
    """Return the longest time between two words of rank 0: a publication, a report and the wait for a batch."""
    return controller.publication_timeout_s + controller.evaluation_timeout_s + controller.batch_timeout_s + SLACK_S


class RunFailed(RuntimeError):
    """Rank 0 ends the run; its own error says why."""


class ControlGroup:
    """All ranks of the actor, over gloo in host memory."""

    def __init__(self, timeout_s: float) -> None:
        """Collective. `timeout_s`: how long a rank waits for the next word."""
        self._group = dist.new_group(backend="gloo", timeout=timedelta(seconds=timeout_s))

    def tell(self, message: bytes | None) -> bytes:
        """Return rank 0's `message`, which may be empty, on every rank. Collective; other ranks pass None.

        Raises RunFailed on the other ranks when rank 0 has called `fail` instead.
        """
        size = torch.tensor([len(message) if message is not None else 0])
        dist.broadcast(size, 0, group=self._group)
        if message is None:
            body = torch.empty(int(size), dtype=torch.uint8)
        else:
            body = torch.from_numpy(np.frombuffer(message, np.uint8).copy())
        if int(size):
            dist.broadcast(body, 0, group=self._group)
        if message is None and body.numpy().tobytes() == FAILED:
            raise RunFailed("rank 0 has ended the run, and says why")
        return body.numpy().tobytes()

    @contextmanager
    def told_of(self, *errors: type[Exception]) -> Iterator[None]:
        """Tell the other ranks, which wait for a word, of such an error of rank 0 on its way out of the block."""
        try:
            yield
        except errors:
            self.tell(FAILED)
            raise

    def close(self) -> None:
        """Leave the group."""
        dist.destroy_process_group(self._group)
