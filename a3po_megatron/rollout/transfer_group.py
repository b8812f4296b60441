"""The process group over which weights travel: gloo, apart from every other group of the process. Torch only.

Members meet in a file that all of them can read (`FileStore`): no port is open to strangers and nothing is unpickled.
The group of one membership is used for many publications; a new membership meets in a new file.
"""

from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroupGloo

SENDER_RANK = 0  # the actor; replica workers follow in member order


class TransferGroup:
    """One membership of the weight group. Every wait ends after `timeout_s` with an error that says what it was for."""

    def __init__(self, store: str | Path, rank: int, world_size: int, timeout_s: float, host: str) -> None:
        """Join as `rank` and wait for the others. `host`: this machine's address on the interface to use."""
        gloo: Any = ProcessGroupGloo  # torch's stubs know neither its options nor its collectives
        options = gloo._Options()
        options._timeout = timedelta(seconds=timeout_s)
        options._devices = [gloo.create_device(hostname=host)]
        self._world_size = world_size
        self._store = dist.FileStore(str(store), world_size)
        self._store.set_timeout(timedelta(seconds=timeout_s))
        try:
            self._group: Any = gloo(self._store, rank, world_size, options)
        except RuntimeError as error:
            raise RuntimeError(
                f"rank {rank} waited up to {timeout_s:g} s for the {world_size - 1} other members of the weight group: "
                f"{error}"
            ) from error

    def broadcast(self, flat: torch.Tensor, what: str) -> None:
        """Send `flat` (uint8, on the CPU) from rank 0, or receive into it. `what` names it in an error. Blocks."""
        if self._group is None:
            raise RuntimeError(f"{what}: this weight group was closed")
        options = dist.BroadcastOptions()
        options.rootRank = SENDER_RANK
        options.rootTensor = 0
        try:
            self._group.broadcast([flat], options).wait()
        except RuntimeError as error:
            raise RuntimeError(f"{what}: a member of the weight group failed or was too slow: {error}") from error

    def close(self) -> None:
        """Leave the group: sockets are closed, members that still wait fail at once."""
        self._group = None
