"""The group over which weights travel, as the controller knows it: who is in it, where they meet. Imports neither torch nor vllm.

Rank 0 is the actor; a replica has as many ranks as workers, in the order of the members. The members' side is
`transfer_group.py`. A group lasts for as long as the membership stays; each new one has an epoch and a meeting place of its own.
"""

import uuid
from collections.abc import Sequence
from itertools import accumulate
from pathlib import Path

from a3po_megatron.rollout.replicas import Replica
from a3po_megatron.rollout.transfer_messages import Rendezvous, Transfer


class WeightGroup:
    """The group of the present epoch, if one works."""

    def __init__(self, folder: Path) -> None:
        """`folder`: for meeting places; the actor and all servers can reach it."""
        self._folder = folder
        self._members: tuple[str, ...] = ()  # empty: no group works
        self._store: Path | None = None
        self.epoch = 0

    def is_of(self, members: Sequence[Replica]) -> bool:
        """Whether a group of exactly these works."""
        return self._members == _names(members)

    def works_for(self, members: Sequence[Replica]) -> None:
        """A publication to these ended well: their group can be used again."""
        self._members = _names(members)

    def distrust(self) -> None:
        """Count the group as broken, until a publication has ended well."""
        self._members = ()

    def begin_epoch(self) -> None:
        """Choose a new meeting place; the old one is of no use any more."""
        if self._store is not None:
            self._store.unlink(missing_ok=True)
        self.epoch += 1
        self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._store = self._folder / f"epoch_{self.epoch}_{uuid.uuid4().hex}"

    def rendezvous(self, transfer: Transfer, members: Sequence[Replica], unique_id: str) -> Rendezvous:
        """Return what whoever joins must know; `unique_id`: of nccl, base64."""
        world_size = 1 + sum(replica.world_size for replica in members)
        return {"transfer": transfer, "world_size": world_size, "store": str(self._store or ""), "unique_id": unique_id}


def first_ranks(members: Sequence[Replica]) -> dict[str, int]:
    """Return the rank of each member's first worker, by name."""
    starts = accumulate((replica.world_size for replica in members), initial=1)
    return dict(zip(_names(members), starts, strict=False))  # the last start is the world size


def _names(members: Sequence[Replica]) -> tuple[str, ...]:
    return tuple(replica.client.name for replica in members)
