"""Nobody passes without the run's token: HTTP of any method, websockets, whatever the path."""

import asyncio

import pytest

from a3po_megatron.rollout.middleware import TOKEN_VARIABLE, RequireTokenOfRun

TOKEN = "secret"


async def application(scope, receive, send) -> None:
    """Answer everything, as the routes behind the middleware would."""
    await send({"type": "passed"})


def ask(kind: str, headers: list[tuple[bytes, bytes]], monkeypatch) -> list[dict]:
    monkeypatch.setenv(TOKEN_VARIABLE, TOKEN)
    sent: list[dict] = []

    async def send(message) -> None:
        sent.append(message)

    async def receive() -> dict:
        return {"type": "websocket.connect"}

    asyncio.run(RequireTokenOfRun(application)({"type": kind, "path": "/any", "headers": headers}, receive, send))
    return sent


@pytest.mark.parametrize("kind", ["http", "websocket"])
def test_the_token_opens(kind, monkeypatch):
    assert ask(kind, [(b"authorization", b"Bearer secret")], monkeypatch) == [{"type": "passed"}]


@pytest.mark.parametrize(
    "headers",
    [
        [],
        [(b"authorization", b"Bearer wrong")],
        [(b"authorization", b"Bearer secret2")],
        [(b"authorization", b"Bearer ")],
        [(b"authorization", b"Basic secret")],
        [(b"authorization", b"Bearer secret"), (b"authorization", b"Bearer wrong")],
        [(b"authorization", b"Bearer wrong"), (b"authorization", b"Bearer secret")],
        [(b"x-authorization", b"Bearer secret")],
    ],
)
def test_anything_else_is_refused(headers, monkeypatch):
    start, body = ask("http", headers, monkeypatch)
    assert start["status"] == 401
    assert b"token" in body["body"]
    assert ask("websocket", headers, monkeypatch)[0]["type"] == "websocket.close"


def test_a_server_without_a_token_does_not_start(monkeypatch):
    monkeypatch.delenv(TOKEN_VARIABLE, raising=False)
    with pytest.raises(RuntimeError, match="A3PO_TOKEN is empty"):
        RequireTokenOfRun(application)
