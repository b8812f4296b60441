"""Which place of which batch a group fills, and which groups are generated again. Pure bookkeeping, no event loop.

A run has num_batches x B places; place i belongs to batch i // B, whatever is drawn for it. A finished group keeps its
place, or gives it back when

- it has no signal: all its rewards are equal, so all its advantages are 0 (DAPO's dynamic sampling). At most
  `max_generated` x B groups are generated for the places of a batch; after that its groups without signal keep their
  places, or the run stops, as `without_signal` says;
- it is a straggler: not all its responses came within `group_timeout_s`. At most `max_stragglers` of a batch.

A place that was given back is filled next, before places that were never filled. A rejected group is neither `accepted`
nor `running`, so the admission formula makes room for the one that replaces it, and the staleness bound is unchanged.

In `free` a replacement starts at once. In `lockstep` with dynamic sampling a batch is generated in *rounds*: when every
group of a round is finished, those without signal are replaced in the order of their places, which is the next round;
the batch after it starts when no place is given back. So which problem fills which place does not depend on which group
finished first, and two runs give the same batches.
"""

import heapq
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from a3po_megatron.batching.advantages import group_has_signal
from a3po_megatron.config.controller import AdvantageConfig, ControllerConfig
from a3po_megatron.controller.groups import Straggler
from a3po_megatron.errors import UserError
from a3po_megatron.records import Group

PlacedGroup = tuple[int, Group]


@dataclass(frozen=True)
class PlacesState:
    """The bookkeeping at one moment, for a snapshot, which names the groups in generation and their places itself."""

    next_place: int  # the first that was never filled
    released: int  # places below may be filled
    open: tuple[int, ...]  # to be filled again now
    given_back: tuple[int, ...]  # to be filled again in the next round
    held: tuple[PlacedGroup, ...]  # groups without signal whose round is not over
    replaced: dict[int, int]  # groups without signal that were replaced, by batch
    stragglers: dict[int, int]  # by batch


class Places:
    """The places of one run."""

    def __init__(self, config: ControllerConfig, advantage: AdvantageConfig, num_batches: int) -> None:
        """`advantage` says which members of a group count."""
        self._config, self._advantage = config, advantage
        self._batch_size = config.prompts_per_batch
        self._num_places = num_batches * config.prompts_per_batch
        self._in_rounds = config.dynamic_sampling and config.schedule == "lockstep"
        self._next = 0
        self._released = self._batch_size if self._in_rounds else self._num_places
        self._open: list[int] = []  # a heap
        self._filled: set[int] = set()  # groups in generation
        self._held: dict[int, Group] = {}
        self._given_back: list[int] = []  # for the next round
        self._replaced: Counter[int] = Counter()
        self._stragglers: Counter[int] = Counter()
        self._counts: Counter[str] = Counter()  # since the last row

    def startable(self) -> int:
        """Return how many groups could start now, staleness and concurrency aside."""
        return len(self._open) + self._released - self._next

    def start(self) -> int:
        """Return the place that a new group fills: the lowest that is free. Only when `startable()`."""
        assert self.startable(), "start() without a place"
        if self._open:
            place = heapq.heappop(self._open)
        else:
            place, self._next = self._next, self._next + 1
        self._filled.add(place)
        return place

    def finish(self, place: int, outcome: Group | Straggler) -> Sequence[PlacedGroup]:
        """Take the outcome of the group in `place`; return the groups that keep their places as of now.

        Raises the straggler if its batch had too many, UserError when data without signal stops the run.
        """
        self._filled.remove(place)
        accepted: list[PlacedGroup] = []
        if isinstance(outcome, Straggler):
            self._count_straggler(place, outcome)
            self._given_back.append(place)
        elif self._config.dynamic_sampling and not group_has_signal(outcome, self._advantage):
            self._held[place] = outcome
        else:
            accepted.append((place, outcome))
        self._counts["groups"] += 1
        self._counts["without_signal"] += place in self._held
        if self._in_rounds and (self._filled or self.startable()):
            return accepted
        return accepted + self._end_round()

    def row(self) -> dict[str, float | int | None]:
        """Return the metrics of the groups that finished since the last row, and begin the next row."""
        counts, self._counts = self._counts, Counter()
        with_rewards = counts["groups"] - counts["stragglers"]
        metrics: dict[str, float | int | None] = {"sampling/replaced_stragglers": counts["stragglers"]}
        if self._config.dynamic_sampling:
            metrics["sampling/rejected_groups"] = counts["rejected"]
            metrics["sampling/without_signal"] = counts["without_signal"] / with_rewards if with_rewards else None
            metrics["sampling/kept_without_signal"] = counts["kept_without_signal"]
        return metrics

    def state(self) -> PlacesState:
        """Return what `restore` needs."""
        return PlacesState(
            self._next,
            self._released,
            tuple(sorted(self._open)),
            tuple(sorted(self._given_back)),
            tuple(sorted(self._held.items(), key=lambda item: item[0])),
            dict(self._replaced),
            dict(self._stragglers),
        )

    def restore(self, state: PlacesState, running: Iterable[int]) -> None:
        """Continue where `state` was taken, with groups in generation again at the places `running`."""
        self._next, self._released = state.next_place, state.released
        self._open, self._given_back = list(state.open), list(state.given_back)
        self._filled, self._held = set(running), dict(state.held)
        self._replaced, self._stragglers = Counter(state.replaced), Counter(state.stragglers)

    def _end_round(self) -> list[PlacedGroup]:
        accepted = []
        for place in sorted(self._held):
            group = self._held.pop(place)
            if self._may_replace(place // self._batch_size):
                self._replaced[place // self._batch_size] += 1
                self._counts["rejected"] += 1
                self._given_back.append(place)
            else:
                self._counts["kept_without_signal"] += 1
                accepted.append((place, group))
        for place in self._given_back:
            heapq.heappush(self._open, place)
        self._given_back = []
        if self._in_rounds and not self._open:
            self._released = min(self._released + self._batch_size, self._num_places)
        return accepted

    def _may_replace(self, batch: int) -> bool:
        limit = int(self._config.max_generated * self._batch_size)
        if self._batch_size + self._replaced[batch] < limit:
            return True
        if self._config.without_signal == "stop":
            raise UserError(
                f"controller.max_generated={self._config.max_generated:g}: {limit} groups were generated for the "
                f"{self._batch_size} places of batch {batch}, and still one has only equal rewards. Problems too hard or "
                "too easy for the model, or a reward that never fits? Look at samples/; controller.without_signal=train "
                "goes on regardless"
            )
        return False

    def _count_straggler(self, place: int, straggler: Straggler) -> None:
        batch, limit = place // self._batch_size, self._config.max_stragglers
        if self._stragglers[batch] >= limit:
            if limit:
                straggler.add_note(f"controller.max_stragglers={limit} of batch {batch} had been replaced before it")
            raise straggler
        self._stragglers[batch] += 1
        self._counts["stragglers"] += 1
