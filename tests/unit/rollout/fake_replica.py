"""A vLLM server at the HTTP level: the routes that we use, answered from memory."""

import asyncio
import json
from collections.abc import AsyncIterator

import httpx

from a3po_megatron.rollout.transfer_messages import FILES_UNUSABLE, GROUP_BROKEN


class FakeReplica(httpx.AsyncBaseTransport):
    """Generates token 7 again and again under its current version, one stream event a token."""

    def __init__(self, name: str, calls: list[str] | None = None) -> None:
        self.name = name
        self.calls = calls if calls is not None else []  # shared by replicas, to see the order of calls
        self.version = "0"
        self.broken: set[str] = set()  # paths that answer 500
        self.probe: list[float | None] = [-1.0, -2.0]  # its log-probabilities of the probe's prompt
        self.breaks = ""  # path that answers, once, that the weight group broke
        self.dies_after: int | None = None  # tokens of a response
        self.hangs = False  # generates no more, and does not say so
        self.garbage: bytes | None = None  # the answer to every generate request
        self.aborts = 0  # pauses that aborted what ran
        self.num_running = 0
        self.num_tokens = 0
        self.num_waiting = 0  # what its metrics say
        self.cannot_read = False  # finds the files of every version damaged
        self.may_read = asyncio.Event()  # cleared: reads files for ever
        self.may_read.set()
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
        if path == "/metrics":
            return httpx.Response(200, text=self._metrics())
        if path == "/collective_rpc":
            return httpx.Response(200, json={"results": [self.probe]})
        if path == "/inference/v1/generate":
            self.requests.append(body)
            if self.garbage is not None:
                return httpx.Response(200, content=self.garbage)
            return httpx.Response(200, content=self._stream(body))
        self.calls.append(f"{self.name}{path}")
        if path == "/pause":
            self.running.clear()
            self.aborts += request.url.params["mode"] == "abort"
            self.calls[-1] += f"?{request.url.query.decode()}"
        elif path == "/resume":
            self.running.set()
        elif path == "/init_weight_transfer_engine":
            self.joins.append(body["init_info"])
        elif path == "/update_weights":
            self.updates.append(body["update_info"])
            if body["update_info"]["folder"]:
                await self.may_read.wait()
                if self.cannot_read:
                    return httpx.Response(500, text=f"call failed: {FILES_UNUSABLE}: damaged")
        elif path == "/finish_weight_update":
            self.version = body["weight_version"]
        return httpx.Response(200, json={"world_size": 1})

    def _metrics(self) -> str:
        values = {"num_requests_running": self.num_running, "num_requests_waiting": self.num_waiting}
        values |= {"num_preemptions_total": 0, "prompt_tokens_total": 0, "generation_tokens_total": self.num_tokens}
        return "# TYPE whatever\n" + "".join(f'vllm:{name}{{engine="0"}} {value}.0\n' for name, value in values.items())

    async def _stream(self, body: dict) -> AsyncIterator[bytes]:
        self.num_running += 1
        async for event in self._events(body):
            self.num_running -= "finish_reason" in event  # now: the client reads no further
            yield f"data: {json.dumps({'choices': [event]})}\n\n".encode()
            await asyncio.sleep(0)
        yield b"data: [DONE]\n\n"

    async def _events(self, body: dict) -> AsyncIterator[dict]:
        spans: list[dict] = []
        count = body["sampling_params"]["max_tokens"]
        aborts = self.aborts
        for index in range(count):
            while not self.running.is_set() and self.aborts == aborts:
                await asyncio.sleep(0)
            if self.aborts != aborts and index:
                yield {"token_ids": [], "logprobs": None, "finish_reason": "abort", "weight_versions": spans}
                return
            await self.running.wait()
            if self.hangs:
                await asyncio.sleep(600)
            if index == self.dies_after:
                raise httpx.ReadError("connection lost")
            self.num_tokens += 1
            if not spans or spans[-1]["version"] != self.version:
                spans.append({"version": self.version, "start": index, "end": index})
            spans[-1]["end"] = index + 1
            choice = {"token_ids": [7], "logprobs": {"content": [{"token_id": 7, "logprob": -0.5}]}}
            if index == count - 1:
                choice |= {"finish_reason": "length", "weight_versions": spans}
            yield choice
