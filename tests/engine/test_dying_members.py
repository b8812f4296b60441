"""A member that dies or hangs while weights arrive: the others are filled, the run goes on, the replica comes back current.

Replicas are processes with the real receiver over real gloo; what they lack is a model.
"""

import asyncio
import signal
import time
from contextlib import ExitStack

import pytest
import torch

from a3po_megatron.config.rollout import RolloutConfig
from a3po_megatron.rollout import publication
from a3po_megatron.rollout.fleet import Fleet
from a3po_megatron.rollout.publication import PublicationError
from tests.fakes.replica_processes import ReplicaProcess, Sender
from tools.replica_stand_in import Fault, digest_of

pytestmark = pytest.mark.timeout(120)

NUM_TENSORS = 6
LIMITS = {"transfer_timeout_s": 2.0, "control_timeout_s": 5.0, "startup_timeout_s": 20.0, "probe_max_change": 0.0}


def tensors_of(version: int) -> list[tuple[str, torch.Tensor]]:
    """Return a model of one bucket a tensor."""
    generator = torch.Generator().manual_seed(version)
    return [(f"w{i}", torch.randn(100 + i, 5, generator=generator)) for i in range(NUM_TENSORS)]


class Run:
    """A fleet of stand-ins; a context."""

    def __init__(self, folder, **changes) -> None:
        config = RolloutConfig(**(LIMITS | {"bucket_bytes": 2000} | changes))
        self.fleet = Fleet(config, "token", folder)
        self.sender = Sender(self.fleet, config.transfer_timeout_s)
        self.replicas: dict[str, ReplicaProcess] = {}
        self._stack = ExitStack()

    def __enter__(self) -> "Run":
        return self

    def __exit__(self, *_: object) -> None:
        self.sender.close()
        self._stack.close()

    async def add(self, name: str, fault: Fault | None = None) -> str:
        replica = await asyncio.to_thread(ReplicaProcess, fault)
        self.replicas[name] = self._stack.enter_context(replica)
        return (await self.fleet.register(name, replica.url, 1))["state"]

    async def becomes_current(self, name: str) -> None:
        async with asyncio.timeout(60):
            while (await self.fleet.register(name, self.replicas[name].url, 1))["state"] != "current":
                await asyncio.sleep(0.02)

    def has(self, name: str, version: int) -> bool:
        weights = self.replicas[name].weights()
        return (weights["version"], weights["digest"]) == (str(version), digest_of(tensors_of(version)))


@pytest.mark.parametrize("after_tensors", [0, NUM_TENSORS // 2, NUM_TENSORS - 1], ids=["first", "middle", "last"])
def test_a_replica_killed_in_an_update_leaves_the_others_filled_in_the_same_publication(tmp_path, after_tensors):
    async def run() -> None:
        with Run(tmp_path) as these:
            fault = Fault(signal.SIGKILL, 2, after_tensors)
            for name in "abc":
                await these.add(name, fault if name == "b" else None)
            await these.sender.publish(tensors_of(1), 1)
            outcome = await these.sender.publish(tensors_of(2), 2)
            assert these.replicas["b"].was_killed
            assert sorted(outcome.members) == ["a", "c"]
            assert "b" in outcome.failed
            assert these.has("a", 2)
            assert these.has("c", 2)
            assert await these.add("b2") == "behind"
            await these.becomes_current("b2")  # without another publication
            assert these.has("b2", 2)
            assert (await these.sender.publish(tensors_of(3), 3)).members == ["a", "c", "b2"]
            assert all(these.has(name, 3) for name in ("a", "c", "b2"))
            await these.fleet.aclose()

    asyncio.run(run())


def test_a_replica_that_hangs_in_an_update_is_dropped_at_the_deadline_and_the_others_are_filled(tmp_path):
    async def run() -> None:
        with Run(tmp_path, control_timeout_s=2.0) as these:
            for name in "abc":
                await these.add(name, Fault(signal.SIGSTOP, 1, 3) if name == "a" else None)
            began = time.monotonic()
            outcome = await these.sender.publish(tensors_of(1), 1)
            assert time.monotonic() - began < 40  # 2 s of transfer, 2 s of grace, and a busy machine
            assert sorted(outcome.members) == ["b", "c"]
            assert set(outcome.failed) == {"a"}
            assert these.has("b", 1)
            assert these.has("c", 1)
            await these.fleet.aclose()

    asyncio.run(run())


def test_a_member_that_dies_before_the_group_meets_costs_one_deadline(tmp_path, monkeypatch):
    async def run() -> None:
        with Run(tmp_path) as these:
            await these.add("a")
            await these.add("b")
            pause = publication.stop_for_update

            async def pause_and_die(replica, config) -> None:
                await pause(replica, config)
                if replica.client.name == "b":
                    these.replicas["b"].process.kill()

            monkeypatch.setattr(publication, "stop_for_update", pause_and_die)
            outcome = await these.sender.publish(tensors_of(1), 1)
            assert outcome.members == ["a"]
            assert these.has("a", 1)
            await these.fleet.aclose()

    asyncio.run(run())


@pytest.mark.parametrize("keep", [True, False], ids=["kept", "not kept"])
def test_a_publication_that_all_replicas_die_in_waits_for_a_restarted_one(tmp_path, keep):
    async def run() -> None:
        with Run(tmp_path, keep_published=keep) as these:
            await these.add("a", Fault(signal.SIGKILL, 1, 2))
            publishing = asyncio.create_task(these.sender.publish(tensors_of(1), 1))
            await asyncio.to_thread(lambda: these.replicas["a"].was_killed)
            await these.add("a2")
            outcome = await publishing
            assert outcome.members == ["a2"]
            assert these.has("a2", 1)
            await these.fleet.aclose()

    asyncio.run(run())


def test_when_all_replicas_are_lost_between_publications_a_restarted_one_is_current_before_its_first_request(tmp_path):
    async def run() -> None:
        with Run(tmp_path) as these:
            await these.add("a")
            await these.sender.publish(tensors_of(1), 1)
            await these.sender.publish(tensors_of(2), 2)
            await these.fleet.deregister("a", "killed")
            assert await these.add("b") == "behind"
            assert not these.fleet.needs_publication
            await these.becomes_current("b")
            assert these.has("b", 2)
            order = [call for call in these.replicas["b"].weights()["calls"] if call != "/weights"]
            assert order == ["/pause", "/start_weight_update", "/update_weights", "/finish_weight_update", "/resume"]
            await these.fleet.aclose()
            assert not list(tmp_path.glob("published/*"))

    asyncio.run(run())


def damage(folder, kind: str) -> None:
    file = sorted(folder.glob("published/version_*/bucket_*.safetensors"))[2]
    content = bytearray(file.read_bytes())
    if kind == "truncated":
        del content[-7:]
    elif kind == "flipped":
        content[-9] ^= 4
    if kind == "version":
        manifest = file.with_name("manifest.json")
        manifest.write_text(manifest.read_text().replace('"version": 1', '"version": 8'))
    else:
        file.write_bytes(content)


@pytest.mark.parametrize(
    ("kind", "reason"),
    [("truncated", "cut off"), ("flipped", "damaged: crc32"), ("version", "expected weights of version 1")],
)
def test_damaged_files_are_refused_and_the_next_publication_mends_the_replica_that_comes_then(tmp_path, kind, reason):
    async def run() -> None:
        with Run(tmp_path) as these:
            await these.add("a")
            await these.sender.publish(tensors_of(1), 1)
            damage(tmp_path, kind)
            await these.add("b")
            async with asyncio.timeout(60):
                while "b" not in these.fleet.status()["fenced"]:
                    await asyncio.sleep(0.02)
            assert reason in these.fleet.status()["fenced"]["b"]
            assert these.fleet.status()["replicas"]["a"]["state"] == "current"
            for name in ("b2", "b3"):
                assert await these.add(name) == "behind"
            assert not these.fleet._publications.keeps_current
            assert (await these.sender.publish(tensors_of(2), 2)).members == ["a", "b2", "b3"]
            assert these.has("b2", 2)
            await these.add("b4")
            await these.becomes_current("b4")
            assert these.has("b4", 2)
            await these.fleet.aclose()

    asyncio.run(run())


def test_files_alone_publish_too_and_one_bad_reader_does_not_touch_the_others(tmp_path):
    async def run() -> None:
        with Run(tmp_path) as these:
            await these.add("a")
            await these.add("b", Fault(signal.SIGKILL, 2, 2))
            for version in (1, 2):
                outcome = await these.sender.publish(tensors_of(version), version, "file")
            assert outcome.members == ["a"]
            assert "b" in outcome.failed
            assert these.has("a", 2)
            await these.fleet.aclose()

    asyncio.run(run())


def test_a_group_that_breaks_at_every_attempt_ends_the_publication_with_the_reason(tmp_path):
    async def run() -> None:
        with Run(tmp_path, startup_timeout_s=1.0) as these:
            for name in "abc":
                await these.add(name, Fault(signal.SIGKILL, 1, 2))
            with pytest.raises(PublicationError, match=r"version 1 (reached no replica in 3 attempts|waited 1 s)"):
                await these.sender.publish(tensors_of(1), 1)
            assert these.fleet.version == 0
            await these.fleet.aclose()

    asyncio.run(run())
