"""The loop with a fake fleet and a fake actor over the real HTTP app, in both schedules."""

import asyncio
import json
import random
import re
import threading
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from a3po_megatron import wire
from a3po_megatron.controller.snapshot import Snapshot
from a3po_megatron.errors import first_cause
from a3po_megatron.records import Batch
from a3po_megatron.rollout.client import Generation
from tests.fakes.fleet import FakeFleet
from tests.fakes.run import act, make_controller, next_batch, post, publish, register, running, whole_run

pytestmark = pytest.mark.timeout(60)


class JitteryFleet(FakeFleet):
    """Answers in another order every time."""

    async def generate(self, *args: Any, **kwargs: Any) -> Generation:
        await asyncio.sleep(random.Random().uniform(0, 0.01))
        return await super().generate(*args, **kwargs)


def rows(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def versions(batch: Batch) -> set[int]:
    return {version for sample in batch.samples for version in sample.versions.tolist()}


def as_bytes(batches: Sequence[Batch]) -> list[bytes]:
    return [wire.encode(batch) for batch in batches]


def test_a_free_run_trains_every_batch_within_the_staleness_bound(tmp_path: Path) -> None:
    controller = make_controller(tmp_path, JitteryFleet(), num_steps=6, max_staleness=2)

    async def train(version: int, batch: Batch) -> None:
        await asyncio.sleep(0.03)

    batches = whole_run(controller, train)
    assert [len(batch.samples) for batch in batches] == [12] * 6
    for version, batch in enumerate(batches):
        assert min(versions(batch)) >= version - 2
    assert max(version - min(versions(batch)) for version, batch in enumerate(batches)) > 0  # it did run ahead
    assert controller.version == 6
    assert controller.accepted == 18  # nothing is generated that nobody consumes


@pytest.mark.parametrize("lag", [0, 1, 3])
def test_in_lockstep_two_runs_give_the_same_bytes_and_exactly_the_lag(tmp_path: Path, lag: int) -> None:
    def run(name: str) -> list[Batch]:
        controller = make_controller(tmp_path / name, JitteryFleet(), 6, schedule="lockstep", max_staleness=lag)
        return whole_run(controller)

    first, second = run("first"), run("second")
    assert as_bytes(first) == as_bytes(second)
    assert [versions(batch) for batch in first] == [{max(0, k - lag)} for k in range(6)]
    assert as_bytes(first)[0] != as_bytes(first)[1]
    for step in range(6):
        name = f"samples/step_{step:06d}.jsonl"
        assert (tmp_path / "first" / name).read_bytes() == (tmp_path / "second" / name).read_bytes()


def test_another_seed_gives_other_samples(tmp_path: Path) -> None:
    a = whole_run(make_controller(tmp_path / "a", FakeFleet(), 2, schedule="lockstep", seed=0))
    b = whole_run(make_controller(tmp_path / "b", FakeFleet(), 2, schedule="lockstep", seed=1))
    assert as_bytes(a) != as_bytes(b)


def test_a_problem_asked_again_in_the_next_epoch_is_sampled_with_other_seeds(tmp_path: Path) -> None:
    batches = whole_run(make_controller(tmp_path, FakeFleet(), num_steps=14, schedule="lockstep"))  # 6 epochs of 7
    responses: dict[str, set[str]] = {}
    for batch in batches:
        for start in range(0, len(batch.samples), 4):
            group = batch.samples[start : start + 4]
            responses.setdefault(group[0].problem_id, set()).add(str([s.response_ids.tolist() for s in group]))
    assert all(len(different) > 1 for different in responses.values())


@pytest.mark.parametrize("schedule", ["free", "lockstep"])
def test_generation_goes_on_to_its_bound_while_the_actor_trains(tmp_path: Path, schedule: str) -> None:
    controller = make_controller(tmp_path, FakeFleet(token_s=0.001), 6, schedule=schedule, max_staleness=2)

    async def train(version: int, batch: Batch) -> None:
        # No call reaches the controller before all groups that this version may generate are finished.
        while controller.accepted < min(version + 3, 6) * 3:
            await asyncio.sleep(0.001)

    whole_run(controller, train)
    assert max(row["rollout/generating_while_training"] for row in rows(tmp_path / "metrics.jsonl")) > 0.3


def test_requests_in_flight_go_on_over_a_publication_and_their_tokens_have_both_versions(tmp_path: Path) -> None:
    async def main() -> None:
        fleet = FakeFleet()
        fleet.hold = lambda request_id: request_id.startswith(("draw3-", "draw4-", "draw5-"))  # the second batch
        controller = make_controller(tmp_path, fleet, 6, max_staleness=1)
        async with asyncio.timeout(30), running(controller) as (client, _):
            await register(client)
            assert await next_batch(client, 0) is not None
            await publish(client, 1)
            fleet.release.set()
            batch = await next_batch(client, 1)
        assert batch is not None
        assert all(s.versions.tolist() == [0] + [1] * (len(s.versions) - 1) for s in batch.samples)

    asyncio.run(main())


def test_rows_samples_and_evaluations_can_be_read(tmp_path: Path) -> None:
    controller = make_controller(tmp_path, FakeFleet(), num_steps=5, eval_every=2, eval_holds_publication="always")
    batches = whole_run(controller)
    metrics = rows(tmp_path / "metrics.jsonl")
    assert [(row["step"], row["version"], row["loss"], row["grad_norm"]) for row in metrics] == [
        (k, k, 0.5, None) for k in range(5)
    ]
    assert [row.get("eval/accuracy") for row in metrics] == [1.0, None, 1.0, None, 1.0]
    for row, batch in zip(metrics, batches, strict=True):
        ages = [row["version"] - v for s in batch.samples for v in s.versions.tolist()]
        assert row["reward/mean"] == pytest.approx(batch.rewards.mean())
        assert (row["staleness/mean"], row["staleness/max"]) == (pytest.approx(np.mean(ages)), max(ages))
        assert row["staleness/overdue_tokens"] == 0
        assert row["rollout/tokens_per_s"] >= 0
    evaluations = rows(tmp_path / "evals.jsonl")
    assert [(e["version"], e["num_problems"], e["accuracy"], e["standard_error"]) for e in evaluations] == [
        (version, 10, 1.0, 0.0) for version in (0, 2, 4, 5)
    ]
    for evaluation in evaluations:
        assert evaluation["oldest_version"] == evaluation["newest_version"] == evaluation["version"]
        assert evaluation["sets"]["arithmetic"]["pass@1"] == {"value": 1.0, "standard_error": 0.0}
        answers = rows(tmp_path / "samples" / f"eval_{evaluation['version']:06d}.jsonl")
        assert [(answer["reward"], answer["set"]) for answer in answers] == [(1.0, "arithmetic")] * 10
    samples = rows(tmp_path / "samples" / "step_000003.jsonl")
    assert len(samples) == 12
    for line, sample, reward in zip(samples, batches[3].samples, batches[3].rewards, strict=True):
        assert line["prompt"] == f"{sample.problem_id}="
        right = f"{sum(map(int, sample.problem_id.split('+')))}<eos>"
        assert (line["reward"] == 1.0) == (line["response"] == right) == (reward == 1)
        assert sum(count for _, count in line["versions"]) == len(sample.response_ids)


def test_shuffled_rewards_teach_nothing_but_have_the_same_mean(tmp_path: Path) -> None:
    plain = whole_run(make_controller(tmp_path / "a", FakeFleet(), 4, schedule="lockstep"))
    control = whole_run(make_controller(tmp_path / "b", FakeFleet(), 4, schedule="lockstep", shuffle=True))
    for a, b in zip(plain, control, strict=True):
        assert wire.encode(a.samples) == wire.encode(b.samples)
        assert sorted(a.rewards) == sorted(b.rewards)
    assert any(a.rewards.tolist() != b.rewards.tolist() for a, b in zip(plain, control, strict=True))


@pytest.mark.parametrize("schedule", ["free", "lockstep"])
def test_the_first_publication_waits_for_the_evaluation_of_the_initial_weights(tmp_path: Path, schedule: str) -> None:
    async def main() -> None:
        fleet = FakeFleet(token_s=0.02)
        controller = make_controller(
            tmp_path, fleet, 6, schedule=schedule, max_eval_problems=30, max_concurrent_evals=2
        )
        async with asyncio.timeout(30), running(controller) as (client, _):
            await register(client)
            assert await next_batch(client, 0) is not None
            assert 0 not in controller.evaluations.results
            await publish(client, 1)
            evaluation = controller.evaluations.results[0].row()
            assert (evaluation["num_problems"], evaluation["newest_version"]) == (30, 0)
            assert fleet.calls[0] == "begin 1 w"

    asyncio.run(main())


def hold_evaluations_from(version: int, fleet: FakeFleet) -> list[str]:
    """Let no response of an evaluation that began at `version` or later go on after its first token; return who waits."""
    waiting: list[str] = []

    def hold(request_id: str) -> bool:
        holds = request_id.startswith("eval") and int(request_id[4:].split("-")[0]) >= version
        waiting.extend([request_id] if holds else [])
        return holds

    fleet.hold = hold
    return waiting


def test_in_a_free_run_training_goes_on_during_an_evaluation_whose_answers_then_name_all_their_versions(
    tmp_path: Path,
) -> None:
    async def main() -> None:
        fleet = FakeFleet()
        waiting = hold_evaluations_from(2, fleet)
        controller = make_controller(tmp_path, fleet, 6, eval_every=2, eval_samples=3, eval_temperature=1.0)

        async def train(version: int, batch: Batch) -> None:
            while version == 2 and len(waiting) < 30:
                await asyncio.sleep(0.001)
            if version == 5:  # steps 2, 3 and 4 went on: the evaluation of version 2 has not ended
                assert sorted(controller.evaluations.results) == [0]
                fleet.release.set()
                while 2 not in controller.evaluations.results:
                    await asyncio.sleep(0.001)

        async with asyncio.timeout(30), running(controller) as (client, run):
            await register(client)
            await act(client, train)
            await run

    asyncio.run(main())
    first, spanning, *_, last = evaluations = rows(tmp_path / "evals.jsonl")
    assert (spanning["version"], spanning["oldest_version"], spanning["newest_version"]) == (2, 2, 5)
    assert [e["version"] for e in evaluations if e["version"] in (3, 4)] == []  # were due while another went on
    assert (first["oldest_version"], first["newest_version"]) == (0, 0)
    assert (last["version"], last["oldest_version"], last["newest_version"]) == (6, 6, 6)
    assert {"pass@1", "pass@3", "avg@3"} <= spanning.keys()
    answers = rows(tmp_path / "samples" / "eval_000002.jsonl")
    assert [answer["sample"] for answer in answers] == [0, 1, 2] * 10
    assert [answer["versions"][0] for answer in answers] == [[2, 1]] * 30
    assert {answer["versions"][-1][0] for answer in answers} == {5}
    column = [row.get("eval/version") for row in rows(tmp_path / "metrics.jsonl")]
    assert (column[0], column[1:5]) == (0, [None] * 4)
    assert column[5] == 2  # in the row of the step in which it ended


def test_an_evaluation_that_must_have_one_version_holds_every_publication(tmp_path: Path) -> None:
    async def main() -> None:
        fleet = FakeFleet()
        hold_evaluations_from(2, fleet)
        controller = make_controller(tmp_path, fleet, 6, schedule="lockstep", eval_every=2)
        async with asyncio.timeout(30), running(controller) as (client, _):
            await register(client)
            actor = asyncio.create_task(act(client))
            while controller.version < 2:
                await asyncio.sleep(0.001)
            assert (await asyncio.wait((actor,), timeout=0.3))[1] == {actor}
            assert controller.version == 2
            fleet.release.set()
            await actor

    asyncio.run(main())
    assert all(e["oldest_version"] == e["newest_version"] == e["version"] for e in rows(tmp_path / "evals.jsonl"))


def test_a_snapshot_holds_cursor_buffer_and_the_tokens_of_unfinished_responses(tmp_path: Path) -> None:
    async def main() -> None:
        fleet = FakeFleet()
        controller = make_controller(tmp_path, fleet, 6, max_staleness=1, max_eval_problems=0)
        async with asyncio.timeout(30), running(controller) as (client, _):
            await register(client)
            while len(controller.buffer) < 6:
                await asyncio.sleep(0.001)
            assert await next_batch(client, 0) is not None
            drawn = fleet.tokens_drawn
            fleet.hold = lambda request_id: True  # the groups that start now
            await publish(client, 1)
            while fleet.tokens_drawn < drawn + 12:
                await asyncio.sleep(0.001)
            snapshot = wire.decode(wire.encode(controller.snapshot()), Snapshot)
        assert (snapshot.version, snapshot.num_taken, snapshot.cursor["index"]) == (1, 3, 9)
        assert [index for index, _ in snapshot.waiting] == [3, 4, 5]
        assert [len(group.samples) for _, group in snapshot.waiting] == [4, 4, 4]
        assert [(group.place, group.draw_index) for group in snapshot.unfinished] == [(6, 6), (7, 7), (8, 8)]
        assert (snapshot.places.next_place, snapshot.places.open) == (9, ())
        for group in snapshot.unfinished:
            for response in group.responses:
                assert len(response.response_ids) == len(response.behavior_logprobs) == 1
                assert response.versions.tolist() == [1]

    asyncio.run(main())


def test_a_failing_background_task_ends_the_run_with_its_own_traceback(tmp_path: Path) -> None:
    async def main() -> BaseException:
        fleet = FakeFleet()
        fleet.failure = RuntimeError("replica melted")
        controller = make_controller(tmp_path, fleet)
        async with asyncio.timeout(30), running(controller) as (client, run):
            await register(client)
            await asyncio.wait((run,))
            error = run.exception()
            assert error is not None
            return first_cause(error)

    cause = asyncio.run(main())
    assert (type(cause), str(cause)) == (RuntimeError, "replica melted")
    frames = []
    trace = cause.__traceback__
    while trace is not None:
        frames.append(trace.tb_frame.f_code.co_name)
        trace = trace.tb_next
    assert "generate" in frames


@pytest.mark.parametrize(
    ("setting", "registers", "message"),
    [
        ("first_replica_timeout_s", False, "waited 0.2 s for the first rollout replica to register"),
        ("group_timeout_s", True, r"waited 0.2 s .* responses to problem '\d+\+\d+'; tokens .*: \[1, 1, 1, 1\]"),
        ("actor_timeout_s", True, "waited 0.2 s for the actor's next call at version 0"),
        ("evaluation_timeout_s", True, r"waited 0.2 s .* for 10 responses to 10 problems; 0 came"),
    ],
)
def test_every_wait_has_a_deadline_and_names_what_it_waited_for(
    tmp_path: Path, setting: str, registers: bool, message: str
) -> None:
    async def main() -> None:
        fleet = FakeFleet()
        fleet.hold = {
            "group_timeout_s": lambda request_id: request_id.startswith("draw"),
            "evaluation_timeout_s": lambda request_id: request_id.startswith("eval"),
        }.get(setting, fleet.hold)
        controller = make_controller(tmp_path, fleet, **{setting: 0.2})
        async with asyncio.timeout(30), running(controller) as (client, run):
            if registers:
                await register(client)
            await asyncio.wait((run,))
            error = run.exception()
            assert error is not None
            raise first_cause(error)

    with pytest.raises(TimeoutError, match=message):
        asyncio.run(main())


@pytest.mark.parametrize("schedule", ["free", "lockstep"])
def test_a_publication_does_not_wait_for_a_version_that_no_replica_can_get_any_more(
    tmp_path: Path, schedule: str
) -> None:
    async def main() -> None:
        fleet = FakeFleet()
        fleet.hold = lambda request_id: request_id.startswith(("eval", "draw3-"))
        controller = make_controller(tmp_path, fleet, 6, schedule=schedule, max_staleness=1)
        async with asyncio.timeout(30), running(controller) as (client, _):
            await register(client)
            assert await next_batch(client, 0) is not None
            manifest = {"names": ["w"], "dtypes": ["float32"], "shapes": [[2, 3]]}
            begin = asyncio.create_task(post(client, "/publish/begin", version=1, **manifest))
            while controller._actor_calls == 0:
                await asyncio.sleep(0.001)
            assert fleet.calls == []
            fleet.needs_publication = True
            await register(client)  # a heartbeat
            answer = await begin
            if schedule == "free":
                assert answer.status_code == 200, "the evaluation goes on with the next version"
            else:
                assert answer.status_code == 409
                reason = r"1 groups must come from version 0 .*which every replica has lost.*keep_published=true"
                assert re.search(reason, answer.json()["error"])

    asyncio.run(main())


def test_files_for_people_are_written_beside_the_loop(tmp_path: Path) -> None:
    controller = make_controller(tmp_path, FakeFleet(), num_steps=2)
    threads: dict[str, set[str]] = {}
    for name in ("write_samples", "write_evaluation"):
        write = getattr(controller.parts.files, name)

        def spy(*arguments: Any, write: Any = write, name: str = name) -> None:
            threads.setdefault(name, set()).add(threading.current_thread().name)
            write(*arguments)

        setattr(controller.parts.files, name, spy)
    whole_run(controller)
    assert set(threads) == {"write_samples", "write_evaluation"}
    assert threading.main_thread().name not in set.union(*threads.values())


def test_an_actor_that_stops_early_ends_the_run_after_a_last_evaluation(tmp_path: Path) -> None:
    async def main() -> None:
        controller = make_controller(tmp_path, FakeFleet(token_s=0.002), 6, eval_every=0)
        async with asyncio.timeout(30), running(controller) as (client, run):
            await register(client)
            assert await next_batch(client, 0) is not None
            await publish(client, 1)
            await post(client, "/done", reason="time is up")
            await run
            assert (await post(client, "/batch", version=1)).status_code == 410
            assert sorted(controller.evaluations.results) == [0, 1]

    asyncio.run(main())


def test_the_actor_may_come_before_the_fleet(tmp_path: Path) -> None:
    async def main() -> list[Batch]:
        controller = make_controller(tmp_path, FakeFleet(), 3)
        async with asyncio.timeout(30), running(controller) as (client, run):
            actor = asyncio.create_task(act(client))
            await asyncio.sleep(0.3)
            assert not actor.done()
            await register(client)
            batches = await actor
            await run
            return batches

    assert len(asyncio.run(main())) == 3


def test_an_evaluation_in_the_middle_that_takes_too_long_is_given_up_and_training_goes_on(tmp_path: Path) -> None:
    said: list[str] = []

    async def main() -> None:
        fleet = FakeFleet()
        fleet.hold = lambda request_id: request_id.startswith("eval2-")
        controller = make_controller(tmp_path, fleet, 6, eval_every=2, evaluation_timeout_s=5.0)
        controller.evaluations.parts = replace(controller.parts, say=said.append)

        async def train(version: int, batch: Batch) -> None:
            while version == 5 and not any("given up" in line for line in said):
                await asyncio.sleep(0.01)

        async with asyncio.timeout(50), running(controller) as (client, run):
            await register(client)
            await act(client, train)
            await run

    asyncio.run(main())
    assert any(line.startswith("evaluation of version 2 given up: waited 5 s") for line in said)
    evaluated = [row["version"] for row in rows(tmp_path / "evals.jsonl")]
    assert (evaluated[0], evaluated[-1]) == (0, 6)
    assert 2 not in evaluated
