"""The loop with groups that teach nothing and groups that hang, on the fake fleet, in both schedules."""

import asyncio
import json
import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from a3po_megatron import wire
from a3po_megatron.data.arithmetic import decode_ids
from a3po_megatron.errors import UserError, first_cause
from a3po_megatron.records import Batch, Int32
from a3po_megatron.rollout.client import Generation, PartialGeneration, RequestOverdue
from a3po_megatron.rollout.control import ReplicaError
from a3po_megatron.rollout.sampling import SamplingSettings
from tests.fakes.fleet import FakeFleet
from tests.fakes.run import make_controller, register, running, whole_run
from tests.unit.test_controller_loop import JitteryFleet

pytestmark = pytest.mark.timeout(60)
RIGHT = next(seed for seed in range(99) if np.random.default_rng(seed).integers(2) == 0)  # FakeFleet answers right


class EasyFleet(JitteryFleet):
    """Always right where `a` is below `easy_below`, so such groups have no signal."""

    def __init__(self, easy_below: int) -> None:
        super().__init__()
        self.easy_below = easy_below

    async def generate(
        self,
        prompt_ids: Sequence[int] | Int32,
        sampling: SamplingSettings,
        request_id: str,
        partial: PartialGeneration | None = None,
    ) -> Generation:
        if sampling.seed is not None and int(decode_ids(prompt_ids).split("+")[0]) < self.easy_below:
            sampling = replace(sampling, seed=RIGHT)
        return await super().generate(prompt_ids, sampling, request_id, partial)


def rows(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (path / "metrics.jsonl").read_text().splitlines()]


def dull_groups(batches: Sequence[Batch]) -> list[int]:
    return [int((batch.advantages.reshape(-1, 4) == 0).all(axis=1).sum()) for batch in batches]


@pytest.mark.parametrize("schedule", ["free", "lockstep"])
def test_groups_without_signal_are_replaced_and_counted(tmp_path: Path, schedule: str) -> None:
    settings = {"schedule": schedule, "max_generated": 20.0}
    plain = whole_run(make_controller(tmp_path / "plain", EasyFleet(10), 6, schedule=schedule))
    controller = make_controller(tmp_path / "dynamic", EasyFleet(10), 6, dynamic_sampling=True, **settings)
    batches = whole_run(controller)
    assert sum(dull_groups(plain)) > 0
    assert dull_groups(batches) == [0] * 6
    assert [len(batch.samples) for batch in batches] == [12] * 6
    assert controller.accepted == 18
    assert not controller.running
    metrics = rows(tmp_path / "dynamic")
    rejected = sum(row["sampling/rejected_groups"] for row in metrics)
    assert rejected == controller.parts.source.state()["index"] - 18 > 0
    assert all(0 <= row["sampling/without_signal"] < 1 for row in metrics if row["sampling/without_signal"] is not None)
    assert "sampling/rejected_groups" not in rows(tmp_path / "plain")[0]


@pytest.mark.parametrize("lag", [0, 2])
def test_in_lockstep_two_runs_with_replacements_give_the_same_bytes_and_exactly_the_lag(
    tmp_path: Path, lag: int
) -> None:
    def run(name: str) -> list[Batch]:
        settings = {"schedule": "lockstep", "max_staleness": lag, "dynamic_sampling": True, "max_generated": 3.0}
        return whole_run(make_controller(tmp_path / name, EasyFleet(10), 6, **settings))

    first, second = run("first"), run("second")
    assert [wire.encode(batch) for batch in first] == [wire.encode(batch) for batch in second]
    versions = [{v for s in batch.samples for v in s.versions.tolist()} for batch in first]
    assert versions == [{max(0, k - lag)} for k in range(6)]
    assert sum(row["sampling/rejected_groups"] for row in rows(tmp_path / "first")) > 0


@pytest.mark.parametrize("schedule", ["free", "lockstep"])
def test_data_without_any_signal_is_trained_on_after_the_bound(tmp_path: Path, schedule: str) -> None:
    settings = {"schedule": schedule, "dynamic_sampling": True, "max_generated": 2.0}
    controller = make_controller(tmp_path, EasyFleet(100), 4, **settings)
    assert dull_groups(whole_run(controller)) == [3] * 4
    assert controller.parts.source.state()["index"] == 4 * 6
    metrics = rows(tmp_path)
    assert sum(row["sampling/rejected_groups"] for row in metrics) == 12
    assert sum(row["sampling/kept_without_signal"] for row in metrics) == 12


def ended_by(run_dir: Path, fleet: FakeFleet, **settings: Any) -> BaseException:
    async def main() -> BaseException:
        controller = make_controller(run_dir, fleet, **settings)
        async with asyncio.timeout(30), running(controller) as (client, run):
            await register(client)
            await asyncio.wait((run,))
            error = run.exception()
            assert error is not None
            return first_cause(error)

    return asyncio.run(main())


def test_or_stops_the_run_with_the_reason(tmp_path: Path) -> None:
    settings = {"dynamic_sampling": True, "max_generated": 2.0, "without_signal": "stop"}
    error = ended_by(tmp_path, EasyFleet(100), **settings)
    assert isinstance(error, UserError)
    assert re.match(
        r"controller.max_generated=2: 6 groups were generated for the 3 places of batch \d, and", str(error)
    )


@pytest.mark.parametrize("schedule", ["free", "lockstep"])
@pytest.mark.parametrize("dynamic", [False, True])
def test_a_group_that_hangs_is_replaced_and_counted(tmp_path: Path, schedule: str, dynamic: bool) -> None:
    fleet = FakeFleet()
    fleet.hold = lambda request_id: request_id in ("draw1-sample2", "draw4-sample0")
    # On a machine that stalls, groups that are only slow are replaced too: hence the generous bound, and >= below.
    settings = {"schedule": schedule, "max_stragglers": 99, "group_timeout_s": 0.5, "dynamic_sampling": dynamic}
    batches = whole_run(make_controller(tmp_path, fleet, 6, **settings))
    assert [len(batch.samples) for batch in batches] == [12] * 6
    assert sum(row["sampling/replaced_stragglers"] for row in rows(tmp_path)) >= 2


class ImpatientFleet(FakeFleet):
    """Gives up the responses for which `hold` is true, or fails all at once."""

    also_fails = False

    async def generate(
        self,
        prompt_ids: Sequence[int] | Int32,
        sampling: SamplingSettings,
        request_id: str,
        partial: PartialGeneration | None = None,
    ) -> Generation:
        if self.hold(request_id):
            raise RequestOverdue(f"request {request_id} waited 600 s: no replica with version 0 is there")
        if self.also_fails and request_id.startswith("draw"):
            raise ReplicaError("failed on 3 replicas")
        return await super().generate(prompt_ids, sampling, request_id, partial)


@pytest.mark.parametrize("schedule", ["free", "lockstep"])
def test_a_group_whose_response_the_fleet_gave_up_is_a_straggler(tmp_path: Path, schedule: str) -> None:
    fleet = ImpatientFleet()
    fleet.hold = lambda request_id: request_id in ("draw1-sample2", "draw4-sample0")
    batches = whole_run(make_controller(tmp_path, fleet, 6, schedule=schedule, max_stragglers=2))
    assert [len(batch.samples) for batch in batches] == [12] * 6
    assert sum(row["sampling/replaced_stragglers"] for row in rows(tmp_path)) == 2


def test_a_straggler_that_the_fleet_gave_up_says_for_what_it_waited(tmp_path: Path) -> None:
    fleet = ImpatientFleet()
    fleet.hold = lambda request_id: request_id.startswith("draw")
    error = ended_by(tmp_path, fleet, max_stragglers=1)
    assert isinstance(error, TimeoutError)
    assert re.match(
        r"waited too long \(request draw\d-sample\d waited 600 s: no replica .* is there\) for .* problem '", str(error)
    )
    assert error.__notes__ == ["controller.max_stragglers=1 of batch 0 had been replaced before it"]


def test_a_failure_beside_a_response_that_was_given_up_is_no_straggler(tmp_path: Path) -> None:
    fleet = ImpatientFleet()
    fleet.also_fails = True
    fleet.hold = lambda request_id: request_id.endswith("sample3")
    error = ended_by(tmp_path, fleet, max_stragglers=99)
    assert isinstance(error, ReplicaError)
    assert not isinstance(error, RequestOverdue)


def test_an_evaluation_in_the_middle_whose_response_was_given_up_is_given_up_too(tmp_path: Path) -> None:
    fleet = ImpatientFleet()
    fleet.hold = lambda request_id: request_id == "eval2-3-0"
    controller = make_controller(tmp_path, fleet, 6, eval_every=2, eval_holds_publication="always")
    said: list[str] = []
    controller.evaluations.parts = replace(controller.parts, say=said.append)
    assert len(whole_run(controller)) == 6
    assert sorted(controller.evaluations.results) == [0, 4, 6]
    assert any(
        re.match(r"evaluation of version 2 given up: \d of 10 responses came: request eval2-3-0 waited", line)
        for line in said
    )


def test_one_straggler_more_than_the_bound_ends_the_run(tmp_path: Path) -> None:
    fleet = FakeFleet()
    fleet.hold = lambda request_id: request_id.startswith("draw")
    error = ended_by(tmp_path, fleet, max_stragglers=2, group_timeout_s=0.2)
    assert isinstance(error, TimeoutError)
    assert "waited 0.2 s (controller.group_timeout_s) for the responses to problem" in str(error)
    assert error.__notes__ == ["controller.max_stragglers=2 of batch 0 had been replaced before it"]
