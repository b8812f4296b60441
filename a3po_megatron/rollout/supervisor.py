"""Keeps the vLLM servers of one node alive and the controller informed.

Each slot goes round by itself:
    start -> ready (it has generated) -> register -> watch ... dead, or dropped by the controller -> end it -> start
A slot that had to restart too often is retired, and the others go on.

The supervisor itself ends when it is asked to, when no slot is left, or when the controller is gone.
However it ends, its servers end first.
"""

import asyncio
import signal
import time
from collections import deque
from collections.abc import Awaitable, Callable, Coroutine
from pathlib import Path
from typing import Any, Protocol

import httpx

from a3po_megatron.config.address import url_of
from a3po_megatron.config.rollout import RolloutConfig
from a3po_megatron.errors import UserError
from a3po_megatron.rollout.client import ReplicaClient
from a3po_megatron.rollout.control import ReplicaError
from a3po_megatron.rollout.controller_link import ControllerRefused
from a3po_megatron.rollout.server import Server, ServerFailed, hold_free_port, port_of
from a3po_megatron.rollout.server_args import server_command, server_environment

DYING_S = 1.0  # for a server that no longer answers to be gone


class SupervisorFailed(RuntimeError):
    """The node cannot serve any longer; the message is the reason."""


class Link(Protocol):
    """What a supervisor says to whoever asks its servers: the controller, or an evaluation in this process."""

    @property
    def url(self) -> str:
        """Where the other end is, for messages."""
        ...

    @property
    def silent_for_s(self) -> float:
        """Seconds since the first of the calls in a row that found nobody."""
        ...

    async def register(self, name: str, url: str, world_size: int) -> str | None:
        """Announce a server that generates, or repeat it as a heartbeat. Returns why, if it was dropped."""
        ...

    async def deregister(self, name: str, reason: str) -> None:
        """Say that a server is gone."""
        ...

    async def aclose(self) -> None:
        """Close the connection."""
        ...


class Supervisor:
    """The servers of one node. `node` makes replica names unique in the run; `say` prints one line for people."""

    def __init__(
        self,
        config: RolloutConfig,
        model_path: str,
        seed: int,
        token: str,
        controller: Link,
        log_dir: Path,
        node: str,
        device: str,
        say: Callable[[str], None],
    ) -> None:
        self._config = config
        self._model_path = model_path
        self._seed = seed
        self._token = token
        self._controller = controller
        self._log_dir = log_dir
        self._node = node
        self._device = device
        self._say = say
        self._stop_signal: signal.Signals | None = None
        self._slots_left = config.num_servers
        self._last_words = ""  # of the slot that was retired last

    async def run(self) -> signal.Signals:
        """Serve until SIGTERM or SIGINT and return which. Raises SupervisorFailed or UserError. Leaves no server."""
        loop = asyncio.get_running_loop()
        work = asyncio.create_task(self._serve())

        def stop(number: signal.Signals) -> None:
            if self._stop_signal is None:
                self._stop_signal = number
                work.cancel()

        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, stop, number)
        try:
            await work
        except asyncio.CancelledError:
            if self._stop_signal is None:
                raise
        except ExceptionGroup as group:
            raise _first(group) from group
        finally:
            for number in (signal.SIGTERM, signal.SIGINT):
                loop.remove_signal_handler(number)
            await self._controller.aclose()
        assert self._stop_signal is not None, "slots never end by themselves"
        return self._stop_signal

    async def _serve(self) -> None:
        async with asyncio.TaskGroup() as slots:
            for slot in range(self._config.num_servers):
                slots.create_task(self._keep_alive(slot))
        raise SupervisorFailed(self._last_words)

    async def _keep_alive(self, slot: int) -> None:
        """Run server after server in this slot until too many have failed within the window; then retire it."""
        failures: deque[float] = deque()
        attempt = 0
        while True:
            reason = await self._serve_once(slot, attempt)
            attempt += 1
            failures.append(time.monotonic())
            while failures[0] < time.monotonic() - self._config.restart_window_s:
                failures.popleft()
            if len(failures) > self._config.max_restarts:
                await self._retire(slot, len(failures), reason)
                return
            self._say(f"server {slot}: {reason}; starting it again ({len(failures)} of {self._config.max_restarts})")

    async def _retire(self, slot: int, failures: int, reason: str) -> None:
        """Say here and to the controller that this slot starts no more servers."""
        self._slots_left -= 1
        self._last_words = (
            f"server {slot} of {self._node} failed {failures} times within {self._config.restart_window_s:g} s "
            f"(rollout.max_restarts={self._config.max_restarts}); the last time: {reason}"
        )
        self._say(f"RETIRED: {self._last_words}; {self._slots_left} of {self._config.num_servers} servers are left")
        await self._tell_controller(self._controller.deregister(f"{self._node}-{slot}", f"retired: {self._last_words}"))

    async def _serve_once(self, slot: int, attempt: int) -> str:
        """Start one server on its port, register it, watch it, end it. Returns why it had to end."""
        try:
            held = await hold_free_port(self._config, slot, self._config.startup_timeout_s if attempt else 0.0)
        except UserError as error:
            if attempt == 0:
                raise  # a wrong setting; later it is somebody else's program, and this slot's trouble only
            return str(error)
        with held:
            return await self._serve_at(port_of(held), slot, f"{self._node}-{slot}.{attempt}")

    async def _serve_at(self, port: int, slot: int, name: str) -> str:
        config = self._config
        gpus = (
            tuple(range(slot * config.tensor_parallel, (slot + 1) * config.tensor_parallel))
            if self._device == "cuda"
            else ()
        )
        started = time.monotonic()
        server = Server(
            name,
            url_of(config.host, port),
            server_command(config, self._model_path, self._device, port, self._seed + slot),
            server_environment(config, self._token, self._device, gpus),
            self._log_dir / f"rollout_{self._node}-{slot}.log",
        )
        client = ReplicaClient(name, server.url, self._token, config)
        try:
            world_size = await server.wait_ready(client, config)
            self._say(
                f"server {slot} ({name}, process {server.pid}) generates at {server.url} "
                f"after {time.monotonic() - started:.1f} s"
            )
            return await self._watch(server, client, world_size)
        except ServerFailed as error:
            return str(error)
        finally:
            await client.aclose()
            await _to_the_end(server.stop(config.stop_timeout_s, self._say))

    async def _watch(self, server: Server, client: ReplicaClient, world_size: int) -> str:
        """Register the server, again as a heartbeat, until it dies or the controller drops it; return the reason."""
        while True:
            reason = await self._illness(server, client)
            if reason is not None:
                await self._tell_controller(self._controller.deregister(server.name, reason))
                return reason
            dropped = await self._tell_controller(self._controller.register(server.name, server.url, world_size))
            if dropped is not None:
                return f"{server.name} was dropped by the controller: {dropped}"
            await asyncio.sleep(self._config.heartbeat_s)

    async def _illness(self, server: Server, client: ReplicaClient) -> str | None:
        try:
            await client.health(self._config.stall_timeout_s)
        except ReplicaError as error:
            died = await server.exit_reason_within(DYING_S)
            return f"{server.name} {died or f'does not answer: {error}'}"
        return None

    async def _tell_controller(self, call: Awaitable[str | None]) -> str | None:
        """Await one message to the controller. A silent controller is an error only after `controller_timeout_s`."""
        try:
            return await call
        except ControllerRefused as error:
            raise SupervisorFailed(str(error)) from error
        except httpx.TransportError as error:
            silence = self._controller.silent_for_s
            if silence > self._config.controller_timeout_s:
                raise SupervisorFailed(
                    f"controller at {self._controller.url} has not answered for {silence:.0f} s "
                    f"(rollout.controller_timeout_s={self._config.controller_timeout_s:g}): "
                    f"{type(error).__name__} {error}"
                ) from error
            return None


def _first(group: ExceptionGroup) -> Exception:
    """Return the first failure of a task group: the reason for which the others were cancelled."""
    error = group.exceptions[0]
    assert not isinstance(error, ExceptionGroup), "slots are not nested"
    return error


async def _to_the_end(work: Coroutine[Any, Any, None]) -> None:
    """Await `work` even when this task is cancelled meanwhile; the cancellation goes on afterwards."""
    task, cancelled = asyncio.ensure_future(work), False
    while not task.done():
        try:
            await asyncio.shield(task)
        except asyncio.CancelledError:
            cancelled = True
    task.result()
    if cancelled:
        raise asyncio.CancelledError
