"""What the controller would need to go on elsewhere: cursor, finished groups that wait, and unfinished responses."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np

from a3po_megatron.controller.groups import RunningGroup
from a3po_megatron.controller.places import PlacesState
from a3po_megatron.records import Float32, Group, Int32


@dataclass(frozen=True)
class UnfinishedResponse:
    """The tokens of one sample that have arrived so far; possibly none, possibly all."""

    response_ids: Int32  # [R so far]
    behavior_logprobs: Float32  # [R so far]
    versions: Int32  # [R so far]


@dataclass(frozen=True)
class UnfinishedGroup:
    """A group in generation; its problem is found again by `draw_index`."""

    place: int
    draw_index: int
    problem_id: str
    responses: tuple[UnfinishedResponse, ...]  # by sample index


@dataclass(frozen=True)
class Snapshot:
    """The controller's state at one moment. `wire.encode` makes bytes of it.

    A batch that has been handed out belongs to the step that trains it, not to this state.
    """

    version: int
    num_taken: int  # groups handed out so far
    cursor: dict[str, Any]
    waiting: tuple[tuple[int, Group], ...]  # (place, group) in the buffer
    unfinished: tuple[UnfinishedGroup, ...]
    places: PlacesState


def copy_unfinished(running: Iterable[RunningGroup]) -> tuple[UnfinishedGroup, ...]:
    """Copy what has arrived of the groups in generation."""
    return tuple(
        UnfinishedGroup(
            group.place,
            group.draw.index,
            group.draw.problem.id,
            tuple(
                UnfinishedResponse(
                    np.array(response.token_ids, dtype=np.int32),
                    np.array(response.logprobs, dtype=np.float32),
                    np.array(response.versions, dtype=np.int32),
                )
                for response in group.responses
            ),
        )
        for group in running
    )
