"""The connection under httpx, by aiohttp: its parser is compiled, and a piece of a response costs a third of httpcore's time.

The controller reads every token of the fleet in one process, so what a piece costs is what bounds the fleet. Everything else
sees httpx: requests, responses, its errors.
"""

from collections.abc import AsyncIterator

import aiohttp
import httpx
from yarl import URL

READ_BYTES = 2**14  # buffered of one response, twice at most, before its server must wait; thousands are read at once


class AiohttpTransport(httpx.AsyncBaseTransport):
    """One session per event loop, made at the first request. No limit on connections, no proxy, no redirects."""

    def __init__(self) -> None:
        self._session: aiohttp.ClientSession | None = None

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        """Send `request`; the response's body is read as it is asked for. Raises httpx.TransportError."""
        if self._session is None:
            self._session = aiohttp.ClientSession(
                # A connection of its own for each request: a server closes one after an error, or when it was idle, and a
                # request that it is too late for looks like a dead replica.
                connector=aiohttp.TCPConnector(limit=0, force_close=True),
                timeout=aiohttp.ClientTimeout(total=None),  # the callers have deadlines
                cookie_jar=aiohttp.DummyCookieJar(),
                auto_decompress=False,
                read_bufsize=READ_BYTES,
            )
        limit = aiohttp.ClientTimeout(total=None, sock_connect=request.extensions.get("timeout", {}).get("connect"))
        try:
            response = await self._session.request(
                request.method,
                URL(str(request.url), encoded=True),
                headers=[
                    (name.decode(), value.decode()) for name, value in request.headers.raw if name.lower() != b"host"
                ],
                data=await request.aread(),
                timeout=limit,
                allow_redirects=False,
            )
        except aiohttp.ServerTimeoutError as error:
            raise httpx.ConnectTimeout(str(error), request=request) from error
        except aiohttp.ClientConnectorError as error:
            raise httpx.ConnectError(str(error), request=request) from error
        except (aiohttp.ClientError, OSError) as error:
            raise httpx.RemoteProtocolError(str(error) or type(error).__name__, request=request) from error
        return httpx.Response(response.status, headers=list(response.raw_headers), stream=_Body(response))

    async def aclose(self) -> None:
        """Close every connection."""
        if self._session is not None:
            await self._session.close()


class _Body(httpx.AsyncByteStream):
    def __init__(self, response: aiohttp.ClientResponse) -> None:
        self._response = response

    async def __aiter__(self) -> AsyncIterator[bytes]:
        try:
            async for data in self._response.content.iter_any():
                yield data
        except (aiohttp.ClientError, OSError) as error:
            raise httpx.ReadError(str(error) or type(error).__name__) from error

    async def aclose(self) -> None:
        if not self._response.content.at_eof():
            self._response.close()  # the server sees it and aborts the request
        self._response.release()
