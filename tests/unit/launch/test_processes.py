"""Roles as processes: ended in order, with everything they started, and nothing else."""

import socket
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from a3po_megatron.config.rollout import RolloutConfig
from a3po_megatron.errors import UserError
from a3po_megatron.launch.ports import check_port, check_server_ports, free_port
from a3po_megatron.launch.processes import Roles

SLEEPER = "import time; print('up', flush=True); time.sleep(600)"
# Writes its name when it is told to end, and ends as if it had no handler.
WITNESS = """
import os, signal, sys, time
def end(number, _):
    with open(sys.argv[2], "a") as file:
        print(sys.argv[1], file=file)
    signal.signal(number, signal.SIG_DFL)
    os.kill(os.getpid(), number)
signal.signal(signal.SIGTERM, end)
print("up", flush=True)
time.sleep(600)
"""
STUBBORN = (
    "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('up', flush=True); time.sleep(600)"
)
# Like torchrun and our supervisor: its child is in a session of its own, and maps shared memory.
PARENT = """
import subprocess, sys, time
child = '''
import mmap, os, sys, time
with open(sys.argv[1], "w+b") as file:
    file.truncate(4096)
    memory = mmap.mmap(file.fileno(), 4096)
print(os.getpid(), flush=True)
time.sleep(600)
'''
subprocess.Popen([sys.executable, "-c", child, sys.argv[1]], start_new_session=True)
time.sleep(600)
"""


@pytest.fixture
def roles(tmp_path: Path):
    started = Roles(tmp_path / "logs", {})
    yield started
    started.stop([], hurry=lambda: True)


def wait_for_line(log: Path) -> str:
    deadline = time.monotonic() + 60
    while not log.exists() or not log.read_text().endswith("\n"):
        assert time.monotonic() < deadline, f"nothing in {log}"
        time.sleep(0.02)
    return log.read_text().strip()


def is_alive(pid: int) -> bool:
    return psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE


def test_roles_end_in_the_given_order(roles, tmp_path):
    ends = tmp_path / "ends"
    for name in ("first", "second"):
        wait_for_line(roles.start(name, ["-c", WITNESS, name, str(ends)], stop_s=30).log)
    roles.stop(["second", "first"])
    assert ends.read_text().split() == ["second", "first"]
    assert {role.ending() for role in roles.ended()} == {
        "the first was killed by SIGTERM",
        "the second was killed by SIGTERM",
    }


def test_a_role_that_does_not_end_is_killed_after_its_deadline(roles):
    wait_for_line(roles.start("stubborn", ["-c", STUBBORN], stop_s=0.3).log)
    roles.stop(["stubborn"])
    assert [role.exit_code for role in roles.ended()] == [-9]


def test_what_a_killed_role_had_started_in_another_session_ends_with_its_shared_memory(roles, tmp_path):
    memory = Path("/dev/shm") / f"a3po-test-{tmp_path.name}-{time.monotonic_ns()}"
    role = roles.start("parent", ["-c", PARENT, str(memory)], stop_s=5)
    child = int(wait_for_line(role.log))
    assert memory.exists()
    role.process.kill()
    role.process.wait()
    assert is_alive(child)
    assert [role.ending() for role in roles.ended()] == ["the parent was killed by SIGKILL"]
    roles.stop(["parent"])
    assert not is_alive(child)
    assert not memory.exists()


def test_processes_of_others_are_left_alone(tmp_path):
    other = subprocess.Popen([sys.executable, "-c", SLEEPER], stdout=subprocess.DEVNULL)
    try:
        roles = Roles(tmp_path / "logs", {})
        wait_for_line(roles.start("role", ["-c", SLEEPER], stop_s=30).log)
        roles.stop(["role"])
        assert other.poll() is None
    finally:
        other.kill()
        other.wait()


def test_a_role_that_a_signal_killed_is_named_before_those_that_failed_because_of_it(roles):
    failed = roles.start("actor", ["-c", "raise SystemExit(1)"], stop_s=1)
    killed = roles.start("controller", ["-c", SLEEPER], stop_s=1)
    failed.process.wait()
    killed.process.kill()
    killed.process.wait()
    assert [role.name for role in roles.ended()] == ["controller", "actor"]


def test_the_end_of_a_log_leaves_out_empty_lines(roles):
    role = roles.start("talker", ["-c", "print('a\\n\\nb\\nc\\n')"], stop_s=1)
    role.process.wait()
    assert role.last_lines(2) == ["b", "c"]


def test_a_port_in_use_is_named_with_its_setting():
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(
            UserError, match=rf"controller.port={port}: cannot listen on 127.0.0.1:{port}: Address already"
        ):
            check_port("controller.port", "127.0.0.1", port)
        with pytest.raises(UserError, match=rf"rollout.base_port={port}"):
            check_server_ports(RolloutConfig(base_port=port))
    check_port("controller.port", "127.0.0.1", free_port("controller.port", "127.0.0.1"))
    check_server_ports(RolloutConfig())
