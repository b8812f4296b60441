"""The fleet with replicas that are fakes at the HTTP level: order of a publication, membership, failures."""

import asyncio
import json

import pytest

from a3po_megatron.rollout import publication
from a3po_megatron.rollout.client import PartialGeneration
from a3po_megatron.rollout.control import ReplicaError, encode_update
from a3po_megatron.rollout.publication import PublicationError
from a3po_megatron.rollout.transfer_messages import GROUP_BROKEN
from tests.unit.rollout.fleet_of_fakes import MANIFEST, SAMPLING, Setup


def test_a_publication_pauses_all_then_updates_then_finishes_all_then_resumes(tmp_path):
    async def run():
        setup = Setup(tmp_path, "a", "b")
        assert await setup.register("a", "b") == ["current", "current"]
        begun = await setup.publish(1)
        return setup, begun

    setup, begun = asyncio.run(run())
    order = [call.partition("/")[2].partition("?")[0] for call in setup.calls]
    steps = [
        "pause",
        "init_weight_transfer_engine",
        "start_weight_update",
        "update_weights",
        "finish_weight_update",
        "resume",
    ]
    positions = [[i for i, call in enumerate(order) if call == step] for step in steps]
    assert [len(p) for p in positions] == [2] * len(steps)
    assert max(positions[0]) < min(positions[1]), "all are paused before one loads"
    assert max(positions[3]) < min(positions[4]), "all have received before one finishes"
    assert max(positions[4]) < min(positions[5]), "all have finished before one resumes"
    assert (begun["version"], begun["members"], begun["failed"]) == (1, ["a", "b"], {})
    assert setup.fleet.version == 1
    assert setup.replicas["a"].updates[0]["version"] == 1


def test_ranks_follow_the_actor_in_member_order(tmp_path):
    async def run():
        setup = Setup(tmp_path, "a", "b", "c")
        await setup.register("a", world_size=2)
        await setup.register("b", "c")
        return setup, await setup.publish(1)

    setup, begun = asyncio.run(run())
    assert begun["rendezvous"]["world_size"] == 5
    assert [setup.replicas[name].joins[0]["first_rank"] for name in "abc"] == [1, 3, 4]
    assert {setup.replicas[name].joins[0]["store"] for name in "abc"} == {begun["rendezvous"]["store"]}


def test_the_group_is_made_once_for_a_membership_and_anew_for_the_next(tmp_path):
    async def run():
        setup = Setup(tmp_path, "a", "b")
        await setup.register("a")
        epochs = [(await setup.publish(version))["epoch"] for version in (1, 2)]
        await setup.register("b")
        epochs.append((await setup.publish(3))["epoch"])
        await setup.fleet.deregister("b", "gone")
        epochs.append((await setup.publish(4))["epoch"])
        return setup, epochs

    setup, epochs = asyncio.run(run())
    assert epochs == [1, 1, 2, 3]
    assert len(setup.replicas["a"].joins) == 3
    assert len({join["store"] for join in setup.replicas["a"].joins}) == 3


@pytest.mark.parametrize(("kv_on_update", "query"), [("rebuild", "clear_cache=true"), ("keep", "clear_cache=false")])
def test_the_cache_of_requests_in_flight_is_rebuilt_or_kept(tmp_path, kv_on_update, query):
    async def run():
        setup = Setup(tmp_path, "a", kv_on_update=kv_on_update)
        await setup.register("a")
        await setup.publish(1)
        return setup.calls

    assert asyncio.run(run())[0] == f"a/pause?mode=keep&{query}"


def test_a_late_joiner_answers_only_after_a_publication(tmp_path):
    async def run():
        setup = Setup(tmp_path, "a", "late")
        await setup.register("a")
        await setup.publish(1)
        assert await setup.register("late") == ["behind"]
        assert not setup.fleet.needs_publication
        for i in range(4):
            await setup.fleet.generate([1], SAMPLING, f"early{i}")
        assert not setup.replicas["late"].requests
        await setup.publish(2)
        assert await setup.register("late") == ["current"]
        await asyncio.gather(*[setup.fleet.generate([2 + i], SAMPLING, f"later{i}") for i in range(4)])
        return setup

    setup = asyncio.run(run())
    assert len(setup.replicas["late"].requests) == 2


def test_the_status_shows_a_slot_that_its_supervisor_retired(tmp_path):
    async def run():
        setup = Setup(tmp_path, "a")
        await setup.register("a")
        await setup.fleet.deregister("n-0", "retired: failed 4 times")
        return setup.fleet.status()

    status = asyncio.run(run())
    assert status["fenced"] == {"n-0": "retired: failed 4 times"}
    assert set(status["replicas"]) == {"a"}


def test_a_fleet_that_lost_all_replicas_asks_for_a_publication(tmp_path):
    async def run():
        setup = Setup(tmp_path, "a", "b")
        await setup.register("a")
        await setup.publish(1)
        await setup.fleet.deregister("a", "killed")
        await setup.register("b")
        assert setup.fleet.needs_publication
        waiting = asyncio.create_task(setup.fleet.generate([1], SAMPLING, "waits"))
        await setup.publish(2)
        return (await waiting).versions

    assert set(asyncio.run(run())) == {2}


def test_requests_go_to_the_least_loaded_replica(tmp_path):
    async def run():
        setup = Setup(tmp_path, "a", "b", "c")
        await setup.register("a", "b", "c")
        await asyncio.gather(*[setup.fleet.generate([i], SAMPLING, f"r{i}") for i in range(9)])
        return [len(replica.requests) for replica in setup.replicas.values()]

    assert asyncio.run(run()) == [3, 3, 3]


def test_a_response_survives_the_death_of_its_replica_and_keeps_its_tokens(tmp_path):
    async def run():
        setup = Setup(tmp_path, "a", "b")
        await setup.register("a", "b")
        setup.replicas["a"].dies_after = 5
        partial = PartialGeneration()
        result = await setup.fleet.generate([1, 2], SAMPLING, "r", partial)
        return setup, result, partial

    setup, result, partial = asyncio.run(run())
    assert setup.replicas["b"].requests[0]["token_ids"] == [1, 2] + [7] * 5
    assert len(result.token_ids) == len(partial.token_ids) == 20
    assert "connection lost" in setup.fleet.status()["fenced"]["a"]


def test_a_request_that_fails_everywhere_does_not_take_the_whole_fleet_down(tmp_path):
    async def run():
        setup = Setup(tmp_path, *"abcde")
        await setup.register(*"abcde")
        for replica in setup.replicas.values():
            replica.dies_after = 0
        with pytest.raises(ReplicaError, match="request r failed on 3 replicas"):
            await setup.fleet.generate([1], SAMPLING, "r")
        return setup.fleet.status()["replicas"]

    assert len(asyncio.run(run())) == 2


@pytest.mark.parametrize(
    "step", ["/pause", "/start_weight_update", "/update_weights", "/finish_weight_update", "/resume"]
)
def test_a_member_that_fails_a_step_is_dropped_and_the_others_go_on(tmp_path, step):
    async def run():
        setup = Setup(tmp_path, "a", "b")
        await setup.register("a", "b")
        setup.replicas["b"].broken.add(step)
        outcome = await setup.publish(1)
        assert await setup.register("b") == ["fenced"]
        return setup, outcome

    setup, outcome = asyncio.run(run())
    assert setup.fleet.version == 1
    assert outcome["members"] == ["a"]
    assert "is broken" in setup.fleet.status()["fenced"]["b"]
    if step != "/pause":
        assert f"{step} is broken" in outcome["failed"]["b"]


def test_a_publication_that_reaches_nobody_changes_no_version(tmp_path):
    async def run():
        setup = Setup(tmp_path, "a", "b")
        await setup.register("a")
        setup.replicas["a"].broken.add("/update_weights")
        outcome = await setup.publish(1)
        assert outcome["again"]
        assert "is broken" in outcome["failed"]["a"]
        assert setup.fleet.version == 0
        with pytest.raises(PublicationError, match=r"version 1 waited 0.3 s for a replica; .*is broken"):
            await setup.publish(1)
        await setup.register("b")
        return await setup.publish(1)

    outcome = asyncio.run(run())
    assert (outcome["members"], outcome["again"]) == (["b"], False)


def test_weights_that_no_replica_takes_end_the_publication_at_the_third_attempt(tmp_path):
    async def run():
        setup = Setup(tmp_path, *"abc")
        for name in "ab":
            await setup.register(name)
            setup.replicas[name].broken.add("/update_weights")
            assert (await setup.publish(1))["again"]
        await setup.register("c")
        setup.replicas["c"].broken.add("/update_weights")
        with pytest.raises(PublicationError, match=r"version 1 reached no replica in 3 attempts: .*is broken"):
            await setup.publish(1)

    asyncio.run(run())


def test_survivors_of_a_broken_group_stay_paused_and_are_filled_under_a_new_epoch(tmp_path):
    async def run():
        setup = Setup(tmp_path, "a", "b", "c")
        await setup.register("a", "b", "c")
        setup.replicas["a"].breaks = "/update_weights"
        setup.replicas["b"].broken.add("/update_weights")
        first = await setup.publish(1)  # c has got everything before the group broke
        resumed = [call for call in setup.calls if call.endswith("/resume")]
        second = await setup.publish(1)
        return setup, first, resumed, second

    setup, first, resumed, second = asyncio.run(run())
    assert first["again"]
    assert not resumed
    assert "is broken" in first["failed"]["b"]
    assert second["epoch"] == first["epoch"] + 1
    assert sorted(second["members"]) == ["a", "c"]
    assert [len(setup.replicas[name].updates) for name in "ac"] == [1, 1]
    assert setup.replicas["a"].version == setup.replicas["c"].version == "1"
    assert setup.fleet.version == 1


def test_a_survivor_of_several_workers_is_restarted(tmp_path):
    async def run():
        setup = Setup(tmp_path, "a", "b")
        await setup.register("a", world_size=2)
        await setup.register("b")
        setup.replicas["a"].breaks = setup.replicas["b"].breaks = "/update_weights"
        first = await setup.publish(1)
        return setup, first, await setup.publish(1)

    setup, first, second = asyncio.run(run())
    assert first["again"]
    assert set(first["failed"]) == {"a"}
    assert GROUP_BROKEN in setup.fleet.status()["fenced"]["a"]
    assert (second["members"], second["again"]) == (["b"], False)


def test_the_manifest_is_encoded_once_for_all_replicas(tmp_path, monkeypatch):
    encoded: list[bytes] = []

    def encode(*arguments) -> bytes:
        encoded.append(encode_update(*arguments))
        return encoded[-1]

    monkeypatch.setattr(publication, "encode_update", encode)

    async def run():
        setup = Setup(tmp_path, "a", "b", "c")
        await setup.register("a", "b", "c")
        await setup.publish(1)
        return [setup.replicas[name].updates for name in "abc"]

    assert asyncio.run(run()) == [[json.loads(encoded[0])["update_info"]]] * 3
    assert len(encoded) == 1
    assert json.loads(encoded[0])["update_info"].items() >= {**MANIFEST, "version": 1, "folder": ""}.items()


def test_an_nccl_group_is_asked_for_an_id_once_an_epoch(tmp_path):
    async def run():
        setup, wanted = Setup(tmp_path, "a", "b"), []
        await setup.register("a")

        async def publish(version: int) -> dict:
            plan = await setup.fleet.begin_publication(version, MANIFEST, "nccl")
            wanted.append(plan.unique_id_wanted)
            if plan.unique_id_wanted:
                plan = await setup.fleet.begin_publication(version, MANIFEST, "nccl", f"id{version}")
                assert not plan.unique_id_wanted
            return await setup.fleet.finish_publication(version)

        await publish(1)
        await publish(2)
        await setup.register("b")
        await publish(3)
        return setup, wanted

    setup, wanted = asyncio.run(run())
    assert wanted == [True, False, True]
    assert [join["unique_id"] for join in setup.replicas["a"].joins] == ["id1", "id3"]
    assert {join["transfer"] for join in setup.replicas["b"].joins} == {"nccl"}


def test_a_replica_that_dies_while_it_receives_ends_the_wait_for_it(tmp_path):
    async def run():
        setup = Setup(tmp_path, "a", transfer_timeout_s=60.0)
        await setup.register("a")

        async def never(replica, *arguments):
            await asyncio.sleep(60)

        for replica in setup.fleet._replicas:
            replica.client.update_weights = never
        await setup.fleet.begin_publication(1, MANIFEST)
        await setup.fleet.deregister("a", "killed by SIGKILL")
        async with asyncio.timeout(2):
            assert (await setup.fleet.finish_publication(1)).again

    asyncio.run(run())


def test_publications_do_not_overlap(tmp_path):
    async def run():
        setup = Setup(tmp_path, "a")
        await setup.register("a")
        await setup.fleet.begin_publication(1, MANIFEST)
        with pytest.raises(PublicationError, match="publication of version 1 is not finished"):
            await setup.fleet.begin_publication(2, MANIFEST)
        with pytest.raises(PublicationError, match="version 2 cannot be finished"):
            await setup.fleet.finish_publication(2)
        await setup.fleet.finish_publication(1)

    asyncio.run(run())


def test_a_publication_names_the_reason_for_which_a_member_was_dropped(tmp_path):
    async def run():
        setup = Setup(tmp_path, "a", "b", transfer_timeout_s=60.0)
        await setup.register("a", "b")

        async def never(*arguments):
            await asyncio.sleep(60)

        fleet = {replica.client.name: replica for replica in setup.fleet._replicas}
        fleet["a"].client.update_weights = never
        await setup.fleet.begin_publication(1, MANIFEST)
        await setup.fleet.deregister("a", "killed by SIGKILL")
        async with asyncio.timeout(20):
            return await setup.fleet.finish_publication(1)

    failed = asyncio.run(run()).failed
    assert failed == {"a": "replica a was dropped: killed by SIGKILL"}


def test_a_name_that_another_server_bears_is_refused_and_the_first_one_stays(tmp_path):
    async def run():
        setup = Setup(tmp_path, "a", "b")
        await setup.register("a")
        second = await setup.fleet.register("a", "http://b", 1)
        assert await setup.register("a") == ["current"], "its heartbeats go on"
        return second, setup.fleet.status()

    second, status = asyncio.run(run())
    assert second["state"] == "fenced"
    assert "a at http://b bears the name of the server at http://a" in second["reason"]
    assert {name: replica["url"] for name, replica in status["replicas"].items()} == {"a": "http://a"}


def test_a_response_over_a_publication_has_both_versions_and_early_labels_read_at_once_are_not_too_new(tmp_path):
    async def run():
        setup, partial = Setup(tmp_path, "a"), PartialGeneration()
        await setup.register("a")
        call = asyncio.create_task(setup.fleet.generate([1], SAMPLING, "r", partial))
        while len(partial.token_ids) < 5:
            await asyncio.sleep(0)
        await setup.fleet.begin_publication(1, MANIFEST)
        early = list(partial.versions)
        await setup.fleet.finish_publication(1)
        return early, await call

    early, result = asyncio.run(run())
    assert set(result.versions) == {0, 1}
    assert all(label <= truth for label, truth in zip(early, result.versions, strict=False))


def test_without_a_replica_a_request_waits_and_then_says_so(tmp_path):
    async def run():
        setup = Setup(tmp_path, "a", request_timeout_s=0.2)
        with pytest.raises(ReplicaError, match=r"request r waited 0.2 s: no replica with version 0"):
            await setup.fleet.generate([1], SAMPLING, "r")

    asyncio.run(run())
