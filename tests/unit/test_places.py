"""Which groups keep their places: `Places` and `Admission` over random orders of events, no event loop."""

import random
from dataclasses import dataclass, field, replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from a3po_megatron import wire
from a3po_megatron.batching.advantages import group_advantages, group_has_signal
from a3po_megatron.batching.buffer import GroupBuffer
from a3po_megatron.config.controller import AdvantageConfig, ControllerConfig
from a3po_megatron.controller.admission import Admission
from a3po_megatron.controller.groups import Straggler
from a3po_megatron.controller.places import Places, PlacesState
from a3po_megatron.errors import UserError
from a3po_megatron.records import Group, Problem, Sample

NUM_BATCHES = 8
DYNAMIC = ControllerConfig(prompts_per_batch=4, max_staleness=2, dynamic_sampling=True)


def group(draw: int, version: int, signal: bool) -> Group:
    ids = np.zeros(1, dtype=np.int32)
    samples = tuple(
        Sample(str(draw), ids, ids, np.zeros(1, np.float32), np.array([version], np.int32), "stop") for _ in range(2)
    )
    return Group(Problem(str(draw), ids, ""), samples, np.array([0, signal], dtype=np.float32))


@dataclass
class Simulation:
    """The loop's counts. Whether a draw has signal depends on the draw alone; everything else is chosen at random."""

    config: ControllerConfig
    choose: random.Random
    without_signal: float  # share of the draws
    version: int = 0
    accepted: int = 0
    draws: int = 0
    training: bool = False
    running: dict[int, tuple[int, int]] = field(default_factory=dict)  # place -> (draw, version of its tokens)
    consumed: list[list[Group]] = field(default_factory=list)

    def __post_init__(self) -> None:
        config = self.config
        self.places = Places(config, AdvantageConfig(), NUM_BATCHES)
        self.admission = Admission(
            config.schedule, config.max_staleness, config.prompts_per_batch, config.max_concurrent_groups, NUM_BATCHES
        )
        self.buffer = GroupBuffer(config.prompts_per_batch, config.schedule == "lockstep")

    def run(self) -> "Simulation":
        while len(self.consumed) < NUM_BATCHES or self.training:
            events = []
            capacity = self.admission.capacity(self.version, self.accepted, len(self.running))
            if min(capacity, self.places.startable()) > 0:
                events.append(self.start)
            if self.running:
                events.append(self.finish)
            if not self.training and self.buffer.ready():
                events.append(self.train)
            if self.training and self.admission.groups_before_publication(self.version + 1, self.accepted) == 0:
                events.append(self.publish)
            assert events, f"deadlock at version {self.version}"
            self.choose.choice(events)()
        return self

    def start(self) -> None:
        self.running[self.places.start()] = self.draws, self.version
        self.draws += 1

    def finish(self) -> None:
        place = self.choose.choice(list(self.running))
        draw, version = self.running.pop(place)
        signal = random.Random(draw).random() >= self.without_signal
        for kept, finished in self.places.finish(place, group(draw, version, signal)):
            self.buffer.put(kept, finished)
            self.accepted += 1

    def train(self) -> None:
        self.consumed.append(self.buffer.take())
        self.training = True

    def publish(self) -> None:
        self.version, self.training = self.version + 1, False

    def problems(self) -> list[list[str]]:
        return [[g.problem.id for g in groups] for groups in self.consumed]


runs = {
    "prompts_per_batch": st.integers(1, 5),
    "max_concurrent_groups": st.integers(1, 30),
    "max_staleness": st.integers(0, 4),
    "max_generated": st.sampled_from([1.0, 1.5, 3.0]),
    "without_signal": st.sampled_from([0.0, 0.3, 0.8, 1.0]),
    "seed": st.integers(0, 2**32),
}


@pytest.mark.parametrize("schedule", ["free", "lockstep"])
@given(**runs)
@settings(deadline=None, max_examples=60)
def test_every_batch_fills_and_no_more_is_generated_than_the_bound(
    schedule: str, without_signal: float, seed: int, **changes: float
) -> None:
    config = replace(DYNAMIC, schedule=schedule, **changes)
    done = Simulation(config, random.Random(seed), without_signal).run()
    size = config.prompts_per_batch
    assert [len(groups) for groups in done.consumed] == [size] * NUM_BATCHES
    assert done.draws <= NUM_BATCHES * int(config.max_generated * size)
    if without_signal == 1.0:
        assert done.draws == NUM_BATCHES * int(config.max_generated * size)
    if without_signal == 0.0:
        assert done.draws == NUM_BATCHES * size
    used = [problem for groups in done.problems() for problem in groups]
    assert len(set(used)) == len(used)
    counts = done.places.row()
    assert counts["sampling/rejected_groups"] == done.draws - NUM_BATCHES * size
    kept_without = sum(not group_has_signal(g, AdvantageConfig()) for groups in done.consumed for g in groups)
    assert counts["sampling/kept_without_signal"] == kept_without


@given(**runs)
@settings(deadline=None, max_examples=60)
def test_in_lockstep_batches_do_not_depend_on_which_group_finishes_first_and_come_from_one_version(
    without_signal: float, seed: int, **changes: float
) -> None:
    config = replace(DYNAMIC, schedule="lockstep", **changes)
    first = Simulation(config, random.Random(seed), without_signal).run()
    second = Simulation(config, random.Random(seed + 1), without_signal).run()
    assert first.problems() == second.problems()
    for k, groups in enumerate(first.consumed):
        versions = {v for g in groups for s in g.samples for v in s.versions.tolist()}
        assert versions == {max(0, k - config.max_staleness)}


@given(**runs)
@settings(deadline=None, max_examples=30)
def test_without_dynamic_sampling_every_draw_keeps_the_place_of_its_own_number(
    without_signal: float, seed: int, **changes: float
) -> None:
    config = replace(DYNAMIC, schedule="lockstep", dynamic_sampling=False, **changes)
    done = Simulation(config, random.Random(seed), without_signal).run()
    size = config.prompts_per_batch
    assert done.problems() == [[str(k * size + i) for i in range(size)] for k in range(NUM_BATCHES)]


def test_stop_ends_the_run_with_the_reason_once_the_bound_is_reached() -> None:
    config = replace(DYNAMIC, max_generated=2.0, without_signal="stop")
    with pytest.raises(
        UserError, match=r"max_generated=2: 8 groups were generated for the 4 places of batch 0, and still"
    ):
        Simulation(config, random.Random(0), without_signal=1.0).run()
    Simulation(config, random.Random(0), without_signal=0.0).run()


def test_stragglers_are_replaced_until_their_bound_and_then_raised() -> None:
    places = Places(replace(DYNAMIC, dynamic_sampling=False, max_stragglers=2), AdvantageConfig(), NUM_BATCHES)
    assert [places.start() for _ in range(5)] == [0, 1, 2, 3, 4]
    assert places.finish(1, Straggler("late")) == []
    assert places.finish(3, Straggler("late")) == []
    assert places.finish(4, Straggler("late")) == []  # of batch 1
    assert [places.start() for _ in range(3)] == [1, 3, 4]
    assert places.row() == {"sampling/replaced_stragglers": 3}
    with pytest.raises(Straggler, match="very late") as caught:
        places.finish(1, Straggler("very late"))
    assert caught.value.__notes__ == ["controller.max_stragglers=2 of batch 0 had been replaced before it"]


def test_a_straggler_in_lockstep_is_replaced_in_the_next_round_and_takes_nothing_from_the_bound() -> None:
    config = replace(DYNAMIC, schedule="lockstep", prompts_per_batch=2, max_generated=1.5, max_stragglers=1)
    places = Places(config, AdvantageConfig(), NUM_BATCHES)
    assert (places.startable(), places.start(), places.start(), places.startable()) == (2, 0, 1, 0)
    assert places.finish(1, Straggler("late")) == []
    assert places.startable() == 0
    assert places.finish(0, group(0, 0, signal=False)) == []
    assert (places.start(), places.start(), places.startable()) == (0, 1, 0)  # round two
    dull = group(2, 0, signal=False)
    assert places.finish(0, dull) == []
    assert places.finish(1, group(3, 0, signal=True))[-1] == (0, dull)  # three were generated: it stays
    assert places.startable() == 2  # batch 1


@given(stop_after=st.integers(0, 60), schedule=st.sampled_from(["free", "lockstep"]), seed=st.integers(0, 99))
@settings(deadline=None, max_examples=40)
def test_restored_places_go_on_where_they_were(stop_after: int, schedule: str, seed: int) -> None:
    def play(steps: int, cut: bool) -> list[tuple[int, str]]:
        places, choose = (
            Places(replace(DYNAMIC, schedule=schedule), AdvantageConfig(), NUM_BATCHES),
            random.Random(seed),
        )
        running: dict[int, int] = {}
        kept: list[tuple[int, str]] = []
        for step in range(steps):
            if cut and step == stop_after:
                state = wire.decode(wire.encode(places.state()), PlacesState)
                places = Places(replace(DYNAMIC, schedule=schedule), AdvantageConfig(), NUM_BATCHES)
                places.restore(state, running)
            if places.startable() and len(running) < 6 and choose.random() < 0.6:
                running[places.start()] = step
            elif running:
                place = choose.choice(sorted(running))
                accepted = places.finish(place, group(running.pop(place), 0, signal=choose.random() < 0.4))
                kept += [(place, g.problem.id) for place, g in accepted]
        return kept

    assert play(80, cut=True) == play(80, cut=False)


@given(st.lists(st.floats(-2, 2, width=32), min_size=2, max_size=8))
def test_a_group_has_signal_exactly_if_its_advantages_are_not_all_zero(rewards: list[float]) -> None:
    made = group(0, 0, signal=True)
    values = np.array(rewards, dtype=np.float32)
    made = Group(made.problem, (made.samples[0],) * len(rewards), values)
    assert group_has_signal(made, AdvantageConfig()) == bool(
        group_advantages(values, np.ones(len(values), np.bool_), AdvantageConfig()).any()
    )
