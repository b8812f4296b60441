"""What a supervisor says to the controller: this server serves, this server is gone."""

import time
from typing import Any

import httpx
import msgspec


class ControllerRefused(RuntimeError):
    """The controller answered that the request is wrong (token, route, body): trying again is of no use."""


class ControllerLink:
    """HTTP with msgpack bodies and the run's token. Remembers since when the controller has been silent."""

    def __init__(
        self, url: str, token: str, timeout_s: float, transport: httpx.AsyncBaseTransport | None = None
    ) -> None:
        """`timeout_s` is the deadline of one call."""
        self.url: str = url
        self._silent_since: float | None = None
        self._http = httpx.AsyncClient(
            base_url=url,
            headers={"Authorization": f"Bearer {token}", "Content-Type": "application/msgpack"},
            timeout=timeout_s,
            transport=transport,
            trust_env=False,
        )

    @property
    def silent_for_s(self) -> float:
        """Seconds since the first of the calls in a row that found no controller; 0 while it answers."""
        return 0.0 if self._silent_since is None else time.monotonic() - self._silent_since

    async def register(self, name: str, url: str, world_size: int) -> str | None:
        """Announce a server that generates, or repeat it as a heartbeat. Returns why, if the controller dropped it.

        Raises httpx.TransportError when the controller cannot be reached, ControllerRefused when it refuses.
        """
        answer = await self._post("/replicas/register", {"name": name, "url": url, "world_size": world_size})
        return str(answer.get("reason", "no reason given")) if answer.get("state") == "fenced" else None

    async def deregister(self, name: str, reason: str) -> None:
        """Say that a server is gone. Raises like `register`."""
        await self._post("/replicas/deregister", {"name": name, "reason": reason})

    async def aclose(self) -> None:
        """Close the connection."""
        await self._http.aclose()

    async def _post(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        try:
            response = await self._http.post(path, content=msgspec.msgpack.encode(body))
        except httpx.TransportError:
            self._silent_since = self._silent_since or time.monotonic()
            raise
        self._silent_since = None
        if response.is_error:
            raise ControllerRefused(
                f"controller at {self.url}: {path} answered {response.status_code}: {response.text.strip()[:300]}"
            )
        return msgspec.msgpack.decode(response.content, type=dict[str, Any]) if response.content else {}
