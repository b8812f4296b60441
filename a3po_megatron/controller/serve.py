"""Runs the loop and its HTTP app together; whichever of them ends first, or a signal, ends both."""

import asyncio
import contextlib
import signal
import socket
from collections.abc import Iterator

import uvicorn

from a3po_megatron.controller.app import create_app
from a3po_megatron.controller.loop import Controller
from a3po_megatron.errors import UserError

GOODBYE_S = 2  # for answers that are on their way when the server ends
# Longer than a training step: closing an idle connection just as the actor uses it again would look like a crash.
KEEP_ALIVE_S = 86400


class RunStopped(Exception):
    """A signal ended the run before the actor was done."""


async def serve(controller: Controller, token: str, listener: socket.socket) -> None:
    """Answer on `listener` until the run has ended well.

    Raises RunStopped on SIGINT or SIGTERM, and whatever a background task died of.
    """
    server = _Server(
        uvicorn.Config(
            create_app(controller, token),
            lifespan="off",
            access_log=False,
            log_level="warning",
            timeout_graceful_shutdown=GOODBYE_S,
            timeout_keep_alive=KEEP_ALIVE_S,
        )
    )
    got_signal: asyncio.Future[signal.Signals] = asyncio.get_running_loop().create_future()
    web = asyncio.create_task(server.serve(sockets=[listener]), name="HTTP server")
    run = asyncio.create_task(controller.run(), name="controller")
    try:
        with _signals_to(got_signal):
            await asyncio.wait((web, run, got_signal), return_when=asyncio.FIRST_COMPLETED)
    finally:
        server.should_exit = True
        run.cancel()
        await asyncio.wait((web, run), timeout=2 * GOODBYE_S)
        listener.close()
    if got_signal.done():
        raise RunStopped(f"stopped by {got_signal.result().name} at version {controller.version}")
    if not run.cancelled():
        run.result()
        return
    web.result()
    raise RuntimeError("the HTTP server ended by itself")


def bind(host: str, port: int) -> socket.socket:
    """Return a listening socket. Raises UserError if the address cannot be used."""
    try:
        return socket.create_server((host, port), backlog=128)
    except OSError as error:
        raise UserError(
            f"controller.port={port}: cannot listen on {host}:{port}: {error.strerror}; "
            "stop the program that uses it or choose another controller.port"
        ) from None


class _Server(uvicorn.Server):
    """uvicorn without its own signal handlers: signals end the run, not only the server."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


@contextlib.contextmanager
def _signals_to(future: asyncio.Future[signal.Signals]) -> Iterator[None]:
    loop = asyncio.get_running_loop()

    def resolve(number: signal.Signals) -> None:
        if not future.done():
            future.set_result(number)

    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, resolve, number)
    try:
        yield
    finally:
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.remove_signal_handler(number)
