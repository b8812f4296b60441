"""ASGI middleware that refuses all requests without the run's token: the controller's, and that of every vLLM server.

vLLM's own `--api-key` guards only a few prefixes; its control routes (pause, weights, `/collective_rpc`) would stay
open to anybody who reaches the port.
"""

import os
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

from a3po_megatron.rollout import orphan_watch
from a3po_megatron.run_token import TOKEN_VARIABLE, bears_token

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]


class RequireToken:
    """Lets a request pass only with the header `Authorization: Bearer TOKEN`; no route and no method is exempt."""

    def __init__(self, app: App, token: str) -> None:
        self._app = app
        self._token = token

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass the request on or answer 401 (websocket: refuse the handshake), in time that does not tell how much is right."""
        if scope["type"] == "lifespan" or bears_token(scope["headers"], self._token):
            await self._app(scope, receive, send)
        elif scope["type"] == "websocket":
            await receive()  # the handshake, which must be read before it is refused
            await send({"type": "websocket.close", "code": 1008, "reason": "token missing or wrong"})
        else:
            headers = [(b"content-type", b"application/json"), (b"www-authenticate", b"Bearer")]
            await send({"type": "http.response.start", "status": 401, "headers": headers})
            await send({"type": "http.response.body", "body": b'{"error": "the run\'s token is missing or wrong"}'})


class RequireTokenOfRun(RequireToken):
    """As vLLM loads it by name: the token is in the environment. It also starts the watch that ends an orphaned server."""

    def __init__(self, app: App) -> None:
        token = os.environ.get(TOKEN_VARIABLE, "")
        if not token:
            raise RuntimeError(
                f"environment variable {TOKEN_VARIABLE} is empty: a server without the run's token is not started"
            )
        super().__init__(app, token)
        orphan_watch.start_if_asked()
