"""The supervisor as a process, with stand-ins for vLLM and the controller: restarts, exit codes, nothing left over."""

import asyncio
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from a3po_megatron.config.rollout import RolloutConfig
from a3po_megatron.errors import UserError
from a3po_megatron.rollout.process_group import shared_memory_of
from a3po_megatron.rollout.server import hold_free_port, hold_port, port_of
from recipes import rollout
from tests.fake_controller import FakeController

RUN_SUPERVISOR = Path(__file__).with_name("run_supervisor.py")
TOKEN = "secret"
QUICK = [
    "rollout.heartbeat_s=0.1",
    "rollout.stop_timeout_s=1",
    "rollout.startup_timeout_s=60",
    "rollout.max_restarts=2",
]
DEADLINE_S = 60.0  # generous: the machine may be busy
PROCESSES = 2  # of one stand-in: itself and its child


@pytest.fixture
def controller() -> Iterator[FakeController]:
    with FakeController(TOKEN) as fake:
        yield fake


class Running:
    """A supervisor process and what it started."""

    def __init__(self, folder: Path, url: str, mode: str, *overrides: str) -> None:
        (folder / "config.yaml").write_text(f"run: {{dir: {folder}}}\n")
        self.log = folder / "supervisor.log"
        command = [sys.executable, str(RUN_SUPERVISOR), mode, str(folder / "config.yaml"), *QUICK, *overrides]
        with self.log.open("wb") as output:
            self.process = subprocess.Popen(
                [*command, "--controller", url, "--node", "n"],
                env=os.environ | {"A3PO_TOKEN": TOKEN},
                stdout=output,
                stderr=output,
            )
        self.family: set[psutil.Process] = set()
        self.shared_memory: set[Path] = set()  # that the family mapped: names of other programs come and go

    def look(self) -> list[psutil.Process]:
        """Return the supervisor's descendants now, and remember them and their shared memory."""
        now = psutil.Process(self.process.pid).children(recursive=True)
        self.family |= set(now)
        self.shared_memory |= shared_memory_of(process.pid for process in now)
        return now

    def wait(self) -> int:
        """Return the exit code and check that no process and no shared memory is left."""
        deadline = time.monotonic() + DEADLINE_S
        while self.process.poll() is None:
            assert time.monotonic() < deadline, self.log.read_text()
            self.look()
            time.sleep(0.02)
        left = [process for process in self.family if process.is_running() and process.status() != psutil.STATUS_ZOMBIE]
        assert not left
        assert not [path for path in self.shared_memory if path.exists()]
        return self.process.returncode

    @property
    def last_line(self) -> str:
        return self.log.read_text().strip().splitlines()[-1]


@pytest.fixture
def start(tmp_path, controller) -> Iterator:
    started: list[Running] = []

    def run(mode: str, *overrides: str) -> Running:
        started.append(Running(tmp_path, controller.url, mode, *overrides))
        return started[-1]

    yield run
    for running in started:
        if running.process.poll() is None:
            running.process.terminate()
            running.process.wait(DEADLINE_S)


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 0), (signal.SIGINT, 130)])
def test_a_signal_ends_the_servers_and_everything_they_started(start, controller, number, code):
    running = start("good", "rollout.num_servers=2")
    controller.wait(lambda: set(controller.registered) == {"n-0.0", "n-1.0"}, DEADLINE_S)
    assert len(running.look()) == 2 * PROCESSES
    assert controller.registered["n-0.0"]["world_size"] == 1
    running.process.send_signal(number)
    assert running.wait() == code


def test_a_server_that_ignores_the_request_to_end_is_killed(start, controller):
    running = start("stubborn")
    controller.wait(lambda: controller.registered, DEADLINE_S)
    running.look()
    running.process.terminate()
    running.process.terminate()  # an impatient second one must not leave anything behind
    assert running.wait() == 0


def test_a_killed_server_is_reported_restarted_and_registered_under_a_new_name(start, controller):
    running = start("good")
    controller.wait(lambda: "n-0.0" in controller.registered, DEADLINE_S)
    running.look()
    (server,) = psutil.Process(running.process.pid).children()
    server.kill()
    controller.wait(lambda: "n-0.1" in controller.registered, DEADLINE_S)
    assert controller.deregistered == {"n-0.0": "n-0.0 killed by SIGKILL"}
    assert len(running.look()) == PROCESSES, "the child of the killed server is gone too"
    running.process.terminate()
    assert running.wait() == 0


def test_a_stopped_server_is_found_killed_and_replaced(start, controller):
    running = start("good", "rollout.stall_timeout_s=1")
    controller.wait(lambda: "n-0.0" in controller.registered, DEADLINE_S)
    running.look()
    (server,) = psutil.Process(running.process.pid).children()
    server.suspend()
    controller.wait(lambda: "n-0.1" in controller.registered, DEADLINE_S)
    assert "does not answer: replica n-0.0 at" in controller.deregistered["n-0.0"]
    assert "no answer to 'health' within 1 s" in controller.deregistered["n-0.0"]
    assert not server.is_running()
    running.process.terminate()
    assert running.wait() == 0


def test_a_port_that_is_taken_at_the_start_is_a_wrong_setting(start):
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = other.getsockname()[1]
        running = start("good", f"rollout.base_port={port}")
        assert running.wait() == 2
    assert f"rollout.base_port={port}: 127.0.0.1:{port} cannot be used for server 0" in running.last_line


def test_a_controller_that_is_no_url_is_refused_before_any_server_starts(tmp_path):
    (tmp_path / "config.yaml").write_text("run: {dir: nowhere}\n")
    with pytest.raises(UserError, match=r"--controller 127\.0\.0\.1:8500: expected a URL such as http://"):
        rollout.main([str(tmp_path / "config.yaml"), "--controller", "127.0.0.1:8500"])


def test_a_port_that_is_taken_at_a_restart_is_waited_for():
    async def run() -> tuple[int, int]:
        with socket.socket() as other:
            other.bind(("127.0.0.1", 0))
            other.listen()
            port = other.getsockname()[1]
            config = RolloutConfig(base_port=port)
            with pytest.raises(UserError, match="cannot be used for server 0"):
                await hold_free_port(config, 0, wait_s=0.0)
            waiting = asyncio.create_task(hold_free_port(config, 0, wait_s=30.0))
            await asyncio.sleep(0.5)
            assert not waiting.done()
        with await waiting as held:
            return port, port_of(held)

    port, found = asyncio.run(run())
    assert found == port


def test_a_port_is_kept_from_others_until_its_server_has_bound_it():
    with hold_port(RolloutConfig(), 0) as held:
        address = ("127.0.0.1", port_of(held))
        with socket.socket() as other, pytest.raises(OSError, match="in use"):
            other.bind(address)
        with socket.create_server(address), socket.create_connection(address, timeout=10):  # with SO_REUSEADDR, as vLLM
            pass


def test_a_port_is_held_while_its_server_starts(start):
    running = start("sleeps")
    deadline = time.monotonic() + DEADLINE_S
    while not (servers := running.look()):
        assert time.monotonic() < deadline, running.log.read_text()
        time.sleep(0.02)
    address = ("127.0.0.1", int(servers[0].cmdline()[-2]))
    with socket.socket() as other, pytest.raises(OSError, match="in use"):
        other.bind(address)
    running.process.terminate()
    assert running.wait() == 0


def test_a_server_that_the_controller_dropped_is_restarted(start, controller):
    running = start("good")
    controller.wait(lambda: "n-0.0" in controller.registered, DEADLINE_S)
    controller.fenced.add("n-0.0")
    controller.wait(lambda: "n-0.1" in controller.registered, DEADLINE_S)
    assert "dropped by the controller: weights did not arrive" in running.log.read_text()
    running.process.terminate()
    assert running.wait() == 0


def test_a_server_that_keeps_dying_ends_the_supervisor_with_its_own_words(start):
    running = start("dies")
    assert running.wait() == 1
    assert "server 0 of n failed 3 times within 600 s (rollout.max_restarts=2)" in running.last_line
    assert "RuntimeError: no weights in this folder" in running.last_line


def test_a_server_that_keeps_dying_is_retired_and_the_others_are_looked_after_as_before(start, controller):
    running = start("first_dies", "rollout.num_servers=2")
    controller.wait(lambda: "n-0" in controller.deregistered and "n-1.0" in controller.registered, DEADLINE_S)
    said = "server 0 of n failed 3 times within 600 s (rollout.max_restarts=2); the last time: "
    assert controller.deregistered["n-0"].startswith(f"retired: {said}")
    assert f"RETIRED: {said}" in running.log.read_text()
    assert "1 of 2 servers are left" in running.log.read_text()
    running.look()
    (server,) = psutil.Process(running.process.pid).children()
    server.kill()
    controller.wait(lambda: "n-1.1" in controller.registered, DEADLINE_S)
    running.look()
    running.process.terminate()
    assert running.wait() == 0


def test_a_supervisor_without_a_controller_stops(start, controller):
    running = start("good", "rollout.controller_timeout_s=0.5")
    controller.wait(lambda: controller.registered, DEADLINE_S)
    running.look()
    controller.stop()
    assert running.wait() == 1
    assert "has not answered for" in running.last_line
    assert "rollout.controller_timeout_s=0.5" in running.last_line


def test_a_wrong_token_is_said_at_once(start, controller, monkeypatch):
    monkeypatch.setattr(sys.modules[__name__], "TOKEN", "another")
    running = start("good")
    assert running.wait() == 1
    assert "/replicas/register answered 401" in running.last_line


@pytest.mark.parametrize(
    ("override", "reason"),
    [
        ("rollout.top_p=0.9", "rollout.top_p=0.9: it reshapes"),
        ("rollout.tempature=1", "unknown key 'rollout.tempature'"),
    ],
)
def test_a_wrong_setting_is_exit_code_2_and_one_line(start, override, reason):
    running = start("good", override)
    assert running.wait() == 2
    assert reason in running.last_line
    assert len(running.log.read_text().strip().splitlines()) == 1


def test_servers_of_a_supervisor_that_was_killed_end_by_themselves(start, controller):
    running = start("good")
    controller.wait(lambda: controller.registered, DEADLINE_S)
    family = running.look()
    assert len(family) == PROCESSES
    running.process.kill()
    deadline = time.monotonic() + DEADLINE_S
    while any(process.is_running() and process.status() != psutil.STATUS_ZOMBIE for process in family):
        assert time.monotonic() < deadline
        time.sleep(0.1)
    assert running.shared_memory
    assert not [path for path in running.shared_memory if path.exists()]
