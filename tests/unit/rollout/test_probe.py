"""Who fails the probe: garbage, one that differs from the others, and what follows for the run."""

import asyncio
import math
from types import SimpleNamespace

import pytest

from a3po_megatron.config.rollout import RolloutConfig
from a3po_megatron.rollout.control import ReplicaError
from a3po_megatron.rollout.probe import AGREEMENT, Probe
from a3po_megatron.rollout.publication import PublicationError
from tests.unit.rollout.fleet_of_fakes import Setup

pytestmark = pytest.mark.timeout(60)


def judge(probe: Probe, version: int, **answers: float) -> dict[str, str]:
    """Let the probe judge answers of two equal log-probabilities each."""
    probe._answers = {name: [answer, answer] for name, answer in answers.items()}
    return probe.judge(version)


@pytest.mark.parametrize(
    ("before", "answers", "failed"),
    [
        (None, {"a": -1.0}, set()),  # the first version: nothing to compare with
        (None, {"a": math.nan}, {"a"}),
        (-1.0, {"a": -3.9}, set()),
        (-1.0, {"a": -4.1}, {"a"}),
        (-1.0, {"a": -math.inf, "b": -1.1}, {"a"}),
        (None, {"a": -1.0, "b": -1.0, "c": -1.1}, {"c"}),  # the majority is right
        (-1.4, {"a": -1.0, "b": -1.2}, {"a"}),  # the one next to the version before is right
        (None, {"a": -1.0, "b": -1.2}, {"a", "b"}),  # nobody can tell
        (None, {"a": -1.0, "b": -1.0 - AGREEMENT["float32"] / 2}, set()),
    ],
)
def test_garbage_and_disagreement_fail(before, answers, failed):
    probe = Probe(RolloutConfig(probe_max_change=3.0))
    if before is not None:
        assert judge(probe, 1, a=before) == {}
    assert set(judge(probe, 2, **answers)) == failed


def test_a_replica_that_is_filled_later_must_answer_what_the_others_did():
    probe = Probe(RolloutConfig())
    assert judge(probe, 1, a=-1.0) == {}
    assert judge(probe, 1, b=-1.0) == {}
    assert set(judge(probe, 1, c=-1.1)) == {"c"}


def test_a_replica_that_fails_is_dropped_still_paused_and_the_others_go_on(tmp_path):
    async def run() -> None:
        setup = Setup(tmp_path, "a", "b", "c")
        await setup.register("a", "b", "c")
        await setup.publish(1)
        setup.replicas["b"].probe = [None, -2.0]
        outcome = await setup.publish(2)
        assert outcome["members"] == ["a", "c"]
        assert setup.fleet.status()["fenced"]["b"] == (
            "replica b failed the probe of version 2: its log-probabilities are not finite"
        )
        assert not setup.replicas["b"].running.is_set()
        assert setup.replicas["a"].running.is_set()
        await setup.fleet.aclose()

    asyncio.run(run())


def test_when_all_fail_the_publication_ends_at_once_and_the_version_stays(tmp_path):
    async def run() -> None:
        setup = Setup(tmp_path, "a", "b")
        await setup.register("a", "b")
        await setup.publish(1)
        for replica in setup.replicas.values():
            replica.probe = [-20.0, -20.0]
        with pytest.raises(PublicationError, match=r"version 2: every replica failed the probe: .* 18\.5 nats from"):
            await setup.publish(2)
        assert setup.fleet.version == 1
        await setup.fleet.aclose()

    asyncio.run(run())


def test_a_probe_that_is_switched_off_asks_nobody(tmp_path):
    async def run() -> None:
        setup = Setup(tmp_path, "a", probe_max_change=0.0)
        await setup.register("a")
        setup.replicas["a"].broken.add("/collective_rpc")
        assert (await setup.publish(1))["members"] == ["a"]
        await setup.fleet.aclose()

    asyncio.run(run())


def test_a_replica_that_is_filled_from_files_is_judged_apart_from_a_publication_under_way():
    async def run() -> None:
        probe, late = Probe(RolloutConfig()), SimpleNamespace(name="late", answer=[-1.0, -1.0])
        late.probe_logprobs = lambda: asyncio.sleep(0, late.answer)
        assert judge(probe, 2, a=-1.1) == {}
        probe._answers = {"member": [-20.0, -20.0]}
        await probe.check(SimpleNamespace(client=late), 1)  # an older version, and no word about the member
        assert probe.judge(2, {"b": [-1.1, -1.1]}) == {}, "the newer version stays what others are compared with"
        assert set(probe.judge(2)) == {"member"}
        late.answer = [-20.0, -20.0]
        with pytest.raises(ReplicaError, match="replica late failed the probe of version 1"):
            await probe.check(SimpleNamespace(client=late), 1)

    asyncio.run(run())
