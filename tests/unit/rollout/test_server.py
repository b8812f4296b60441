"""One server process: what it says when it does not come up, and that ending it ends."""

import asyncio
import os
import signal
import sys
from pathlib import Path

import pytest

from a3po_megatron.config.rollout import RolloutConfig
from a3po_megatron.rollout import server as module
from a3po_megatron.rollout.client import ReplicaClient
from a3po_megatron.rollout.server import Server, ServerFailed
from tests.unit.rollout.fake_replica import FakeReplica

pytestmark = pytest.mark.timeout(60)


def started(tmp_path: Path, code: str) -> Server:
    return Server("s", "http://s", [sys.executable, "-c", code], dict(os.environ), tmp_path / "log")


def test_a_server_that_answers_but_does_not_generate_fails_at_the_deadline_of_the_start(tmp_path):
    async def run():
        replica, config = FakeReplica("s"), RolloutConfig(startup_timeout_s=0.5, request_timeout_s=3600.0)
        replica.hangs = True
        client = ReplicaClient("s", "http://s", "secret", config, transport=replica)
        server = started(tmp_path, "import time; time.sleep(600)")
        try:
            async with asyncio.timeout(30):
                with pytest.raises(ServerFailed, match=r"answers but does not generate: .* for a response of up to 2"):
                    await server.wait_ready(client, config)
        finally:
            await server.stop(5.0)

    asyncio.run(run())


STUBBORN = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print(flush=True); time.sleep(600)"


def test_a_server_that_still_starts_is_not_waited_for_as_one_that_serves_is(tmp_path, monkeypatch):
    """As vLLM, which heeds no signal while it starts."""
    monkeypatch.setattr(module, "STARTING_STOP_S", 0.1)

    async def run() -> None:
        server = started(tmp_path, STUBBORN)
        async with asyncio.timeout(30):
            while not (tmp_path / "log").read_bytes():  # now it ignores SIGTERM
                await asyncio.sleep(0.01)
            await server.stop(3600.0)
        assert server.exit_reason() == "killed by SIGKILL"

    asyncio.run(run())


def test_a_server_that_serves_has_its_time_to_end(tmp_path, monkeypatch):
    monkeypatch.setattr(module, "STARTING_STOP_S", 0.0)

    async def run() -> None:
        client = ReplicaClient("s", "http://s", "secret", RolloutConfig(), transport=FakeReplica("s"))
        code = "import signal, sys, time; signal.signal(signal.SIGTERM, lambda *_: (time.sleep(0.5), sys.exit(7)))"
        server = started(tmp_path, f"{code}; print(flush=True); time.sleep(600)")
        async with asyncio.timeout(30):
            while not (tmp_path / "log").read_bytes():
                await asyncio.sleep(0.01)
            await server.wait_ready(client, RolloutConfig())
            await server.stop(3600.0)
        assert server.exit_reason() == "exited with code 7"

    asyncio.run(run())


def test_processes_that_cannot_be_killed_are_left_with_a_line_that_names_them(tmp_path, monkeypatch):
    """Stands in for a process that the system holds (state D): signals do nothing."""
    monkeypatch.setattr(module, "KILL_WAIT_S", 0.2)
    sent: list[signal.Signals] = []
    monkeypatch.setattr(module, "_signal_group", lambda group, number: sent.append(number))
    said: list[str] = []

    async def run() -> int:
        server = started(tmp_path, "import time; time.sleep(600)")
        try:
            async with asyncio.timeout(30):
                await server.stop(0.1, said.append)
        finally:
            os.killpg(server.pid, signal.SIGKILL)
        return server.pid

    pid = asyncio.run(run())
    assert sent == [signal.SIGTERM, signal.SIGKILL]
    assert len(said) == 1
    assert f"server s: processes [{pid}] are still there 0.2 s after SIGKILL" in said[0]


def test_the_last_words_are_of_this_start_and_of_the_end_of_a_long_log(tmp_path, monkeypatch):
    monkeypatch.setattr(module, "LOG_TAIL_BYTES", 1000)

    async def run(code: str) -> str:
        server = started(tmp_path, code)
        async with asyncio.timeout(30):
            while server.exit_reason() is None:
                await asyncio.sleep(0.01)
        return server.last_words()

    first = asyncio.run(run("import sys; print('OldError: out of memory'); sys.exit(1)"))
    assert first.startswith("OldError: out of memory (log: ")
    second = asyncio.run(
        run("print('line'); print('EarlyError'); print(1000 * 'x\\n'); print('LateError'); print('end')")
    )
    assert second.startswith("LateError (log: ")
    third = asyncio.run(run("print('fine'); print('end')"))
    assert third.startswith("fine | end (log: ")
