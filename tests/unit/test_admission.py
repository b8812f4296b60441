"""Staleness of what is consumed, over random orders of events: only `Admission` and `GroupBuffer`, no event loop."""

import random
from dataclasses import dataclass, field

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from a3po_megatron.batching.buffer import GroupBuffer
from a3po_megatron.batching.staleness import is_overdue
from a3po_megatron.controller.admission import Admission
from a3po_megatron.records import Group, Problem, Sample


@dataclass
class Simulation:
    """The controller's counts, driven by a random choice among what may happen next."""

    admission: Admission
    choose: random.Random
    overtaking: bool = True  # groups may finish in any order
    version: int = 0
    accepted: int = 0
    running: dict[int, list[int]] = field(default_factory=dict)  # draw -> versions of its tokens so far
    started: int = 0
    consumed: list[list[Group]] = field(default_factory=list)  # by version

    def __post_init__(self) -> None:
        self.buffer = GroupBuffer(self.admission.groups_per_batch, self.admission.schedule == "lockstep")
        self.training = False

    def run(self) -> None:
        while len(self.consumed) < self.admission.num_batches or self.training:
            events = []
            if self.admission.capacity(self.version, self.accepted, len(self.running)) > 0:
                events.append(self.start)
            if self.running:
                events += [self.draw_token, self.finish]
            if not self.training and self.buffer.ready():
                events.append(self.train)
            if self.training and self.admission.groups_before_publication(self.version + 1, self.accepted) == 0:
                events.append(self.publish)
            assert events, f"deadlock at version {self.version}"
            self.choose.choice(events)()
            assert len(self.running) <= self.admission.max_concurrent
            in_all = self.accepted + len(self.running)
            assert in_all <= (self.admission.max_staleness + self.version + 1) * self.admission.groups_per_batch

    def start(self) -> None:
        self.running[self.started] = [self.version]
        self.started += 1

    def draw_token(self) -> None:
        self.running[self.choose.choice(list(self.running))].append(self.version)

    def finish(self) -> None:
        draw = self.choose.choice(list(self.running)) if self.overtaking else min(self.running)
        versions = np.array(self.running.pop(draw), dtype=np.int32)
        ids, logprobs = np.zeros(len(versions), dtype=np.int32), np.zeros(len(versions), dtype=np.float32)
        sample = Sample(str(draw), ids, ids, logprobs, versions, "stop")
        self.buffer.put(draw, Group(Problem(str(draw), ids, ""), (sample,), np.zeros(1, dtype=np.float32)))
        self.accepted += 1

    def train(self) -> None:
        self.consumed.append(self.buffer.take())
        self.training = True

    def publish(self) -> None:
        self.version += 1
        self.training = False


runs = {
    "max_staleness": st.integers(0, 5),
    "groups_per_batch": st.integers(1, 5),
    "max_concurrent": st.integers(1, 40),
    "seed": st.integers(0, 2**32),
}


@given(**runs)
@settings(deadline=None)
def test_in_free_running_no_token_is_older_than_the_bound_unless_its_group_was_overtaken(
    max_staleness: int, groups_per_batch: int, max_concurrent: int, seed: int
) -> None:
    admission = Admission("free", max_staleness, groups_per_batch, max_concurrent, num_batches=12)
    simulation = Simulation(admission, random.Random(seed), overtaking=False)
    simulation.run()
    for version, groups in enumerate(simulation.consumed):
        assert min(group.oldest_version for group in groups) >= version - max_staleness
        assert not any(is_overdue(s, version, max_staleness).any() for group in groups for s in group.samples)


@given(**runs)
@settings(deadline=None)
def test_in_free_running_overtaken_groups_are_neither_lost_nor_twice_and_their_old_tokens_are_counted(
    max_staleness: int, groups_per_batch: int, max_concurrent: int, seed: int
) -> None:
    admission = Admission("free", max_staleness, groups_per_batch, max_concurrent, num_batches=12)
    simulation = Simulation(admission, random.Random(seed))
    simulation.run()
    draws = [int(group.problem.id) for groups in simulation.consumed for group in groups]
    assert sorted(draws) == list(range(12 * groups_per_batch))
    for version, groups in enumerate(simulation.consumed):
        counted = sum(is_overdue(s, version, max_staleness).sum() for group in groups for s in group.samples)
        ages = [version - v for group in groups for s in group.samples for v in s.versions.tolist()]
        assert counted == sum(age > max_staleness for age in ages)


@given(**runs)
@settings(deadline=None)
def test_in_lockstep_batch_k_comes_wholly_from_version_k_minus_d_and_the_first_ones_from_version_0(
    max_staleness: int, groups_per_batch: int, max_concurrent: int, seed: int
) -> None:
    admission = Admission("lockstep", max_staleness, groups_per_batch, max_concurrent, num_batches=12)
    simulation = Simulation(admission, random.Random(seed))
    simulation.run()
    for k, groups in enumerate(simulation.consumed):
        versions = {v for group in groups for s in group.samples for v in s.versions.tolist()}
        assert versions == {max(0, k - max_staleness)}
        assert [int(g.problem.id) for g in groups] == list(range(k * groups_per_batch, (k + 1) * groups_per_batch))


@pytest.mark.parametrize(
    ("version", "accepted", "running", "capacity"),
    [
        (0, 0, 0, 10),  # 3 batches of 4 may start, 10 at once
        (0, 8, 2, 2),  # 12 - 10
        (0, 10, 2, 0),
        (1, 10, 2, 4),
        (1, 4, 10, 0),  # all places are taken
        (9, 36, 2, 2),  # the run has 10 batches, not 12
    ],
)
def test_capacity_is_the_formula(version: int, accepted: int, running: int, capacity: int) -> None:
    admission = Admission("free", max_staleness=2, groups_per_batch=4, max_concurrent=10, num_batches=10)
    assert admission.capacity(version, accepted, running) == capacity
