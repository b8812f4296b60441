"""Finished groups that wait for a training step."""

from collections.abc import Sequence

from a3po_megatron.records import Group


class GroupBuffer:
    """Groups by their place in the run; the lowest places leave first, in whatever order the groups arrive."""

    def __init__(self, groups_per_batch: int, in_order: bool) -> None:
        """`in_order`: a batch is exactly the next `groups_per_batch` places (lockstep), not the lowest ones there."""
        self._groups: dict[int, Group] = {}
        self._groups_per_batch = groups_per_batch
        self._in_order = in_order
        self.num_taken = 0  # groups that left, ever

    def __len__(self) -> int:
        return len(self._groups)

    def put(self, place: int, group: Group) -> None:
        """Add the finished group that fills `place`."""
        assert place not in self._groups, f"place {place} was filled twice"
        self._groups[place] = group

    def ready(self) -> bool:
        """Whether `take` can make a batch."""
        return self._next_indices() is not None

    def take(self) -> list[Group]:
        """Remove and return the next batch of groups, ordered by place; only when `ready()`."""
        indices = self._next_indices()
        assert indices is not None, "take() before ready()"
        self.num_taken += len(indices)
        return [self._groups.pop(index) for index in indices]

    def items(self) -> list[tuple[int, Group]]:
        """Return (place, group) of all that wait, by place."""
        return sorted(self._groups.items(), key=lambda item: item[0])

    def _next_indices(self) -> Sequence[int] | None:
        if self._in_order:
            wanted = range(self.num_taken, self.num_taken + self._groups_per_batch)
            return wanted if all(index in self._groups for index in wanted) else None
        oldest = sorted(self._groups)[: self._groups_per_batch]
        return oldest if len(oldest) == self._groups_per_batch else None
