"""Admission: how many groups may start now, and when weights may be replaced. Pure arithmetic over counts.

B groups make a batch; batch k is trained at version k and one publication follows every batch. All groups that ever
started are `accepted` (finished, whether consumed or not) or `running`; one that is replaced (`places.py`) is neither.

    capacity = min(max_concurrent - running, (max_staleness + version + 1) * B - (accepted + running))

The second term is the staleness bound: while version v is live, only groups of the batches up to v + max_staleness may
have started, so a group that starts now is due at most max_staleness publications later. With max_staleness = 0 the
schedule is synchronous.

`free` and `lockstep` with lag d = max_staleness share this formula. Lockstep adds one wait: version v may replace v - 1
only when every group that must come from v - 1 or older is finished. Then batch k comes wholly from version
max(0, k - d): batch d + v starts as soon as version v is live and is complete before v is replaced. The first d + 1
batches come from version 0, so their lag grows from 0 to d.
"""

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class Admission:
    """The two rules for one run. Counts are in groups."""

    schedule: Literal["free", "lockstep"]
    max_staleness: int  # versions; the exact lag in lockstep
    groups_per_batch: int
    max_concurrent: int
    num_batches: int  # of the whole run: nothing is generated that no batch will consume

    def started_limit(self, version: int) -> int:
        """Return how many groups may have started, in all, while `version` is live."""
        return min(self.max_staleness + version + 1, self.num_batches) * self.groups_per_batch

    def capacity(self, version: int, accepted: int, running: int) -> int:
        """Return how many groups may start now; never negative."""
        return max(0, min(self.max_concurrent - running, self.started_limit(version) - (accepted + running)))

    def groups_before_publication(self, next_version: int, accepted: int) -> int:
        """Return how many groups must finish before `next_version` may replace the weights; always 0 in `free`."""
        if self.schedule == "free":
            return 0
        return max(0, self.started_limit(next_version - 1) - accepted)
