"""Replicas that come late are filled from the kept files: beside publications, beside each other, and not from damaged files."""

import asyncio
from collections.abc import Callable

import pytest

from a3po_megatron.rollout.transfer_messages import FILES_UNUSABLE, version_folder
from tests.unit.rollout.fleet_of_fakes import MANIFEST, Setup

pytestmark = pytest.mark.timeout(60)


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(20):
        while not condition():
            await asyncio.sleep(0.001)


def state(setup: Setup, name: str) -> str:
    replicas = setup.fleet.status()["replicas"]
    return replicas[name]["state"] if name in replicas else "fenced"


async def live(tmp_path, *late: str, **config) -> Setup:
    """Return a fleet whose one replica, a, has version 1, which lies there as files too."""
    setup = Setup(tmp_path, "a", *late, **config)
    await setup.register("a")
    assert (await setup.publish(1, kept=True))["members"] == ["a"]
    return setup


def test_damaged_files_cost_one_newcomer_and_the_next_one_waits_for_the_next_publication(tmp_path):
    async def run() -> None:
        setup = await live(tmp_path, "b", "c")
        setup.replicas["b"].cannot_read = setup.replicas["c"].cannot_read = True
        await setup.register("b")
        await until(lambda: state(setup, "b") == "fenced")
        assert FILES_UNUSABLE in setup.fleet.status()["fenced"]["b"]
        assert await setup.register("c") == ["behind"]
        assert not setup.fleet.needs_publication
        await setup.fleet.deregister("a", "killed")
        assert setup.fleet.needs_publication, "nobody can get the version from the files"
        assert (await setup.publish(1))["members"] == ["c"]
        assert setup.replicas["c"].updates[0]["folder"] == "", "it never read them"

    asyncio.run(run())


def test_a_publication_goes_on_without_a_newcomer_that_hangs_while_it_is_filled(tmp_path):
    async def run() -> None:
        setup = await live(tmp_path, "b", "c")
        setup.replicas["b"].may_read.clear()
        await setup.register("b", "c")
        await until(lambda: state(setup, "c") == "current")  # beside b, not after it
        await until(lambda: bool(setup.replicas["b"].updates))
        assert (await setup.publish(2, kept=True))["members"] == ["a", "c"]
        setup.replicas["b"].may_read.set()
        await until(lambda: setup.replicas["b"].version == "1")
        assert await setup.register("b") == ["behind"], "it has an old version"
        assert (await setup.publish(3))["members"] == ["a", "b", "c"]
        assert state(setup, "b") == "current"

    asyncio.run(run())


def test_when_all_are_being_filled_a_publication_waits_for_one_of_them(tmp_path):
    async def run() -> None:
        setup = await live(tmp_path, "b", "c")
        setup.replicas["b"].may_read.clear()
        setup.replicas["c"].may_read.clear()
        await setup.fleet.deregister("a", "killed")
        await setup.register("b", "c")
        publishing = asyncio.create_task(setup.publish(2))
        await until(lambda: all(setup.replicas[name].updates for name in "bc"))
        setup.replicas["c"].may_read.set()
        assert (await publishing)["members"] == ["c"]
        assert setup.replicas["c"].version == "2"

    asyncio.run(run())


def test_files_stay_as_long_as_somebody_reads_them(tmp_path):
    async def run() -> None:
        setup = await live(tmp_path, "b")
        folders = [version_folder(tmp_path / "rendezvous" / "published", version) for version in range(4)]
        for folder in folders:
            folder.mkdir(parents=True)
        setup.replicas["b"].may_read.clear()
        await setup.register("b")
        await until(lambda: bool(setup.replicas["b"].updates))
        assert setup.replicas["b"].updates[0]["folder"] == str(folders[1])
        await setup.publish(2, kept=True)
        await setup.publish(3, kept=True)
        await until(lambda: not folders[2].exists())
        assert folders[1].exists()
        assert folders[3].exists()
        setup.replicas["b"].may_read.set()
        await until(lambda: not folders[1].exists())
        await setup.fleet.aclose()
        assert not folders[3].exists()

    asyncio.run(run())


@pytest.mark.parametrize(("readers_fail", "rewritten"), [("all", True), ("one", False)])
def test_files_that_nobody_could_read_are_written_again_at_the_next_attempt(tmp_path, readers_fail, rewritten):
    async def run() -> None:
        setup = Setup(tmp_path, "a", "b", "c")
        await setup.register("a", "b")
        setup.replicas["a"].cannot_read = True
        setup.replicas["b"].cannot_read = readers_fail == "all"
        outcome = await setup.publish(1, "file", kept=True)
        assert outcome["again"] == (readers_fail == "all")
        assert "a" in outcome["failed"]
        await setup.register("c")
        plan = await setup.fleet.begin_publication(1, MANIFEST, "file")
        assert bool(plan.keep_in) == rewritten
        await setup.fleet.finish_publication(1, kept=rewritten)
        await until(lambda: state(setup, "c") == "current")

    asyncio.run(run())
