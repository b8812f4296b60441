"""A vLLM server at the HTTP level: the routes that we use, answered from memory."""

import asyncio
import json
from collections.abc import AsyncIterator

import httpx

from a3po_megatron.rollout.transfer_messages import GROUP_BROKEN


class FakeReplica(httpx.AsyncBaseTransport):
    """Generates token 7 again and again under its current version, one stream event a token."""

    def __init__(self, name: str, calls: list[str] | None = None) -> None:
        self.name = name
        self.calls = calls if calls is not None else []  # shared by replicas, to see the order of calls
        self.version = "0"
        self.broken: set[str] = set()  # paths that answer 500
        self.breaks = ""  # path that answers, once, that the weight group broke
        self.dies_after: int | None = None  # tokens of a response
        self.running = asyncio.Event()
        self.running.set()
        self.requests: list[dict] = []
        self.updates: list[dict] = []
        self.joins: list[dict] = []

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        """Answer one request."""
        path = request.url.path
        body = json.loads(await request.aread() or b"{}")
        if path in self.broken:
            return httpx.Response(500, text=f"{path} is broken")
        if path == self.breaks:
            self.breaks = ""
            return httpx.Response(500, text=f"call failed: {GROUP_BROKEN}: a member died")
        if path == "/inference/v1/generate":
            self.requests.append(body)
            return httpx.Response(200, content=self._stream(body))
        self.calls.append(f"{self.name}{path}")
        if path == "/pause":
            self.running.clear()
            self.calls[-1] += f"?{request.url.query.decode()}"
        elif path == "/resume":
            self.running.set()
        elif path == "/init_weight_transfer_engine":
            self.joins.append(body["init_info"])
        elif path == "/update_weights":
            self.updates.append(body["update_info"])
        elif path == "/finish_weight_update":
            self.version = body["weight_version"]
        return httpx.Response(200, json={"world_size": 1})

    async def _stream(self, body: dict) -> AsyncIterator[bytes]:
        spans: list[dict] = []
        count = body["sampling_params"]["max_tokens"]
        for index in range(count):
            await self.running.wait()
            if index == self.dies_after:
                raise httpx.ReadError("connection lost")
            if not spans or spans[-1]["version"] != self.version:
                spans.append({"version": self.version, "start": index, "end": index})
            spans[-1]["end"] = index + 1
            choice = {"token_ids": [7], "logprobs": {"content": [{"token_id": 7, "logprob": -0.5}]}}
            if index == count - 1:
                choice |= {"finish_reason": "length", "weight_versions": spans}
            yield f"data: {json.dumps({'choices': [choice]})}\n\n".encode()
            await asyncio.sleep(0)
        yield b"data: [DONE]\n\n"
