"""A replica without a model: the control routes of a vLLM server in front of the real receiver of weights. No vllm.

For the benchmark of publications and for tests of what happens when a member dies. Besides vLLM's routes, `GET /weights` tells
the version, a digest of the tensors that came last, and how many seconds each call took; `POST /receive_raw` measures the wire.
"""

import hashlib
import json
import os
import signal
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from multiprocessing.connection import Connection
from typing import Any

import torch

from a3po_megatron.rollout import buckets
from a3po_megatron.rollout.weight_receiver import Incoming, Tensors, WeightReceiver

HOST = "127.0.0.1"
COUNTERS = ("num_requests_running", "num_requests_waiting", "num_preemptions", "prompt_tokens", "generation_tokens")
IDLE = "".join(f"vllm:{name} 0\n" for counter in COUNTERS for name in (counter, f"{counter}_total"))  # of /metrics


@dataclass(frozen=True)
class Fault:
    """`number` (SIGKILL, SIGSTOP) hits this process when so many tensors of version `version` have arrived."""

    number: signal.Signals
    version: int
    after_tensors: int


@dataclass
class StandIn:
    """The state of one replica."""

    fault: Fault | None = None
    receiver: WeightReceiver = field(default_factory=WeightReceiver)
    model: dict[str, torch.Tensor] = field(default_factory=dict)
    version: str = "0"
    receiving: int = 0
    seconds: dict[str, float] = field(default_factory=dict)
    calls: list[str] = field(default_factory=list)
    loading_s: float = 0.0

    def answer(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        """Do what the route asks; an exception is the server's 500."""
        began = time.perf_counter()
        self.calls.append(path)
        if path == "/init_weight_transfer_engine":
            info = body["init_info"]
            self.receiver.join(info, info["first_rank"], info["timeout_s"], HOST)
        elif path == "/update_weights":
            self._update(body["update_info"])
        elif path == "/finish_weight_update":
            self.version = body["weight_version"]
        elif path == "/receive_raw":
            self._receive_raw(body["sizes"])
        elif path == "/weights":
            return {"version": self.version, "digest": self._digest(), "seconds": self.seconds, "calls": self.calls}
        self.seconds[path] = time.perf_counter() - began
        return {"world_size": 1}

    def _receive_raw(self, sizes: list[int]) -> None:
        """Receive so many buffers from the weight group and do nothing with them: what the wire alone costs."""
        group = self.receiver._group
        assert group is not None
        buffer = torch.empty(max(sizes), dtype=torch.uint8)
        for size in sizes:
            group.broadcast(buffer[:size], "receiving raw bytes").wait()

    def _update(self, info: dict[str, Any]) -> None:
        specs = buckets.read_manifest({key: info[key] for key in ("names", "dtypes", "shapes")})
        self.receiving, self.loading_s = info["version"], 0.0
        incoming = Incoming(info["version"], specs, info["bucket_bytes"], info.get("folder", ""))
        self.receiver.receive(incoming, self._load)
        self.seconds["load"] = self.loading_s

    def _load(self, tensors: Tensors) -> None:
        for name, tensor in self._with_fault(tensors):
            began = time.perf_counter()
            if name not in self.model:
                self.model[name] = torch.empty_like(tensor)
            self.model[name].copy_(tensor)
            self.loading_s += time.perf_counter() - began

    def _with_fault(self, tensors: Tensors) -> Iterator[tuple[str, torch.Tensor]]:
        count = 0
        while True:
            fault = self.fault
            if fault and fault.version == self.receiving and fault.after_tensors == count:
                self.fault = None
                os.kill(os.getpid(), fault.number)
            try:
                yield next(tensors)
            except StopIteration:
                return
            count += 1

    def _digest(self) -> str:
        return digest_of(list(self.model.items()))


def digest_of(tensors: list[tuple[str, torch.Tensor]]) -> str:
    """Return a digest of names and bits, in this order."""
    digest = hashlib.sha256()
    for name, tensor in tensors:
        digest.update(name.encode())
        digest.update(tensor.detach().contiguous().view(-1).view(torch.uint8).numpy())
    return digest.hexdigest()


def serve(port_to: Connection, fault: Fault | None = None) -> None:
    """Serve on a free port, which is sent over `port_to`, until the process is killed."""
    torch.set_num_threads(1)
    stand_in = StandIn(fault)

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            if self.path == "/metrics":
                self._send(200, IDLE)
            else:
                self._answer({})

        def do_POST(self) -> None:
            self._answer(json.loads(self.rfile.read(int(self.headers["Content-Length"])) or b"{}"))

        def _answer(self, body: dict[str, Any]) -> None:
            try:
                status, answer = 200, json.dumps(stand_in.answer(self.path.partition("?")[0], body))
            except Exception as error:
                status, answer = 500, f"{type(error).__name__}: {error}"
            self._send(status, answer)

        def _send(self, status: int, answer: str) -> None:
            self.send_response(status)
            self.send_header("Content-Length", str(len(answer.encode())))
            self.end_headers()
            self.wfile.write(answer.encode())

        def log_message(self, *_: object) -> None:
            """Stay quiet."""

    server = ThreadingHTTPServer((HOST, 0), Handler)
    port_to.send(server.server_port)
    port_to.close()
    server.serve_forever()
