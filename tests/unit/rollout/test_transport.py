"""A server may close a connection after any answer; the next call must not be the one that finds out."""

import asyncio

import pytest

from a3po_megatron.config.rollout import RolloutConfig
from a3po_megatron.rollout.control import ReplicaError, ServerControl

pytestmark = pytest.mark.timeout(60)


def test_no_call_goes_over_a_connection_that_the_server_may_be_closing():
    """uvicorn closes it after an error, without saying so in the answer. At worst it does so when the next request is there."""
    served = 0

    async def serve_one_request(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal served
        head = await reader.readuntil(b"\r\n\r\n")
        status = b"500 Internal Server Error" if head.startswith(b"POST /start") else b"200 OK"
        writer.write(b"HTTP/1.1 " + status + b"\r\nContent-Length: 2\r\n\r\n{}")
        await writer.drain()
        served += 1
        await reader.read(1)  # a second request on this connection, or its end
        writer.close()

    async def run() -> None:
        async with await asyncio.start_server(serve_one_request, "127.0.0.1", 0) as server:
            port = server.sockets[0].getsockname()[1]
            control = ServerControl("a", f"http://127.0.0.1:{port}", "token", RolloutConfig(control_timeout_s=20.0))
            await control.resume()
            with pytest.raises(ReplicaError, match="answered 500"):
                await control.start_weight_update()
            await control.pause("keep", clear_cache=True)
            await control.health()
            await control.aclose()

    asyncio.run(run())
    assert served == 4
