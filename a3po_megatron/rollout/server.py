"""One vLLM server process: start it, wait until it generates, end it with everything it started."""

import asyncio
import os
import signal
import socket
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

from a3po_megatron.config.rollout import RolloutConfig
from a3po_megatron.errors import UserError
from a3po_megatron.rollout.client import ReplicaClient
from a3po_megatron.rollout.control import ReplicaError
from a3po_megatron.rollout.process_group import group_members, shared_memory_of
from a3po_megatron.rollout.sampling import SamplingSettings

POLL_S = 0.2
STARTING_STOP_S = 2.0  # vLLM heeds SIGTERM once it has started, and a server that starts has nothing to bring to an end
KILL_WAIT_S = 30.0  # for killed processes to be gone: the system may hold them in a driver or a network file system
LOG_TAIL_BYTES = 2**18


class ServerFailed(RuntimeError):
    """A server did not come up; the message ends with what it wrote last."""


class Server:
    """A started server. It leads a process group of its own, so that ending the group ends whatever it started."""

    def __init__(self, name: str, url: str, command: list[str], environment: dict[str, str], log: Path) -> None:
        """Start `command`; its output is appended to `log`."""
        self.name = name
        self.url = url
        self._log = log
        self._has_started = False
        log.parent.mkdir(parents=True, exist_ok=True)
        with log.open("ab") as output:
            self._log_start = output.tell()
            self._process = subprocess.Popen(
                command, env=environment, stdin=subprocess.DEVNULL, stdout=output, stderr=output, start_new_session=True
            )

    @property
    def pid(self) -> int:
        """Process id of the server, which is its process group's id too."""
        return self._process.pid

    def exit_reason(self) -> str | None:
        """Return None while the server's process lives, else how it ended."""
        code = self._process.poll()
        if code is None:
            return None
        return f"killed by {signal.Signals(-code).name}" if code < 0 else f"exited with code {code}"

    async def exit_reason_within(self, wait_s: float) -> str | None:
        """Return `exit_reason`, which may come within `wait_s`: a process that dies closes its connections first."""
        deadline = time.monotonic() + wait_s
        while self.exit_reason() is None and time.monotonic() < deadline:
            await asyncio.sleep(POLL_S / 4)
        return self.exit_reason()

    async def wait_ready(self, client: ReplicaClient, config: RolloutConfig) -> int:
        """Wait until the server has really generated, and name its weights version 0. Returns its workers.

        Raises ServerFailed when it dies or is not ready within `startup_timeout_s`.
        """
        deadline = time.monotonic() + config.startup_timeout_s
        while True:
            reason = self.exit_reason()
            if reason is not None:
                raise ServerFailed(f"server {self.name} {reason} while starting: {self.last_words()}")
            try:
                await client.health(min(config.control_timeout_s, config.startup_timeout_s))
                break
            except ReplicaError as error:
                if time.monotonic() > deadline:
                    raise ServerFailed(
                        f"server {self.name} was not ready within {config.startup_timeout_s:g} s ({error}): "
                        f"{self.last_words()}"
                    ) from None
            await asyncio.sleep(POLL_S)
        try:
            await client.set_version(0)
            probe = SamplingSettings(temperature=1.0, max_tokens=2, ignore_eos=True)
            left_s = max(0.0, deadline - time.monotonic())
            await client.generate([0], probe, f"probe-{self.name}", timeout_s=left_s)
            world_size = await client.world_size()
        except ReplicaError as error:
            raise ServerFailed(f"server {self.name} answers but does not generate: {error}") from error
        self._has_started = True
        return world_size

    def last_words(self, num_lines: int = 5) -> str:
        """Return the end of the server's log in one line, errors first."""
        with self._log.open("rb") as log:
            log.seek(max(self._log_start, log.seek(0, os.SEEK_END) - LOG_TAIL_BYTES))
            text = log.read().decode(errors="replace")
        lines = [line.strip() for line in text.splitlines() if line.strip()]
        errors = [line for line in lines if "Error" in line]
        return f"{' | '.join((errors or lines)[-num_lines:])} (log: {self._log})"

    async def stop(self, timeout_s: float, say: Callable[[str], None] = print) -> None:
        """Ask the whole process group to end, kill it after `timeout_s`, and remove shared memory it left.

        One that has not started yet is killed after `STARTING_STOP_S` at the latest.
        What cannot be killed within `KILL_WAIT_S` is left to the system, with a line to `say`.
        """
        if not self._has_started:
            timeout_s = min(timeout_s, STARTING_STOP_S)
        shared = shared_memory_of(group_members(self.pid))
        _signal_group(self.pid, signal.SIGTERM)
        deadline, killed = time.monotonic() + timeout_s, False
        while self._process.poll() is None or group_members(self.pid):
            if time.monotonic() > deadline and killed:
                say(
                    f"server {self.name}: processes {group_members(self.pid)} are still there {KILL_WAIT_S:g} s after "
                    "SIGKILL and are left behind; the system holds them (ps: state D), and with them their GPUs"
                )
                break
            if time.monotonic() > deadline:
                shared |= shared_memory_of(group_members(self.pid))
                _signal_group(self.pid, signal.SIGKILL)
                deadline, killed = time.monotonic() + KILL_WAIT_S, True
            await asyncio.sleep(POLL_S / 4)
        for path in shared:
            path.unlink(missing_ok=True)


def choose_port(config: RolloutConfig, slot: int) -> int:
    """Return the port of server number `slot`: the configured one, or any free one. Raises UserError if it is taken."""
    with hold_port(config, slot) as held:
        return port_of(held)


def hold_port(config: RolloutConfig, slot: int) -> socket.socket:
    """Return a socket bound to the port of server number `slot`, as `choose_port`, which keeps the port from others.

    A server imports for seconds before it binds its port, and meanwhile the system would give a free one to whoever asks for any.
    The server itself can bind and listen: both set SO_REUSEADDR, and this socket never listens.
    """
    port = config.base_port + slot if config.base_port else 0
    held = socket.socket(socket.AF_INET6 if ":" in config.host else socket.AF_INET)
    held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        held.bind((config.host, port))
    except OSError as error:
        held.close()
        raise UserError(
            f"rollout.base_port={config.base_port}: {config.host}:{port} cannot be used for server {slot} "
            f"({error.strerror}); free it, choose another, or set rollout.base_port=0 for any free port"
        ) from None
    return held


async def hold_free_port(config: RolloutConfig, slot: int, wait_s: float) -> socket.socket:
    """Return `hold_port`, which may become free within `wait_s`: the last server's, or somebody's for a moment."""
    deadline = time.monotonic() + wait_s
    while True:
        try:
            return hold_port(config, slot)
        except UserError:
            if time.monotonic() >= deadline:
                raise
        await asyncio.sleep(POLL_S)


def port_of(held: socket.socket) -> int:
    """Return the port that a socket is bound to."""
    return int(held.getsockname()[1])


def _signal_group(group: int, number: signal.Signals) -> None:
    try:
        os.killpg(group, number)
    except ProcessLookupError:
        return  # all of it has ended
