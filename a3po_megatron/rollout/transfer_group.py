"""The group over which weights travel: actor and replica workers, apart from every other group of the process. Torch only.

`GlooGroup` moves buckets in host memory, `nccl_group.py` those in GPU memory, `rendezvous.py` picks. Gloo's members meet in a
file that all of them can read (`FileStore`): no port is open to strangers and nothing is unpickled. The group of one
membership is used for many publications; a new membership is a new epoch and a new group.
"""

from datetime import timedelta
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroupGloo

from a3po_megatron.rollout.transfer_messages import GROUP_BROKEN

SENDER_RANK = 0  # the actor; replica workers follow in member order


class GroupBroken(RuntimeError):
    """The group is of no use any more: a member died, hangs or left. This member is not to blame, as far as it knows."""

    def __init__(self, reason: str) -> None:
        super().__init__(f"{GROUP_BROKEN}: {' '.join(reason.split())}")


class Pending(Protocol):
    """A broadcast on its way."""

    def wait(self) -> None:
        """Return when the buffer has been sent, or filled. Raises GroupBroken at the deadline, or when a member failed."""


class TransferGroup(Protocol):
    """One membership of the weight group. Every wait has a deadline; its error says what it waited for."""

    device: torch.device  # where buckets lie

    def broadcast(self, flat: torch.Tensor, what: str) -> Pending:
        """Begin to send `flat` (uint8) from rank 0, or to receive into it. `what` names it in an error."""
        ...

    def close(self) -> None:
        """Leave the group: members that still wait for this one fail at once."""
        ...


class GlooGroup:
    """A group in host memory. A wait of a member ends `timeout_s` after its broadcast began."""

    device = torch.device("cpu")

    def __init__(self, store: str, rank: int, world_size: int, timeout_s: float, host: str) -> None:
        """Join as `rank` and wait for the others."""
        gloo: Any = ProcessGroupGloo  # torch's stubs know neither its options nor its collectives
        options = gloo._Options()
        options._timeout = timedelta(seconds=timeout_s)
        options._devices = [gloo.create_device(hostname=host)]
        self._store = dist.FileStore(store, world_size)
        self._store.set_timeout(timedelta(seconds=timeout_s))
        try:
            self._group: Any = gloo(self._store, rank, world_size, options)
        except RuntimeError as error:
            raise GroupBroken(
                f"rank {rank} waited up to {timeout_s:g} s for the {world_size - 1} other members of the weight group: "
                f"{error}"
            ) from error

    def broadcast(self, flat: torch.Tensor, what: str) -> Pending:
        """Begin to send or receive; gloo's own thread does the work."""
        if self._group is None:
            raise GroupBroken(f"{what}: this weight group was closed")
        options = dist.BroadcastOptions()
        options.rootRank = SENDER_RANK
        options.rootTensor = 0
        try:
            return _GlooPending(self._group.broadcast([flat], options), what)
        except RuntimeError as error:
            raise _failed(what, error) from error

    def close(self) -> None:
        """Close the sockets. A broadcast that is still on its way is waited for first, by gloo, until its deadline."""
        self._group = None


class _GlooPending:
    def __init__(self, work: Any, what: str) -> None:
        self._work, self._what = work, what

    def wait(self) -> None:
        try:
            self._work.wait()
        except RuntimeError as error:
            raise _failed(self._what, error) from error


def _failed(what: str, error: RuntimeError) -> GroupBroken:
    return GroupBroken(f"{what}: a member of the weight group failed or was too slow: {error}")
