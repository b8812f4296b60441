"""Stands in for a vLLM server in tests of the supervisor: python fake_server.py PORT MODE.

Starts a child process, as vLLM does, maps shared memory, answers readiness. Modes: `good`, `stubborn` (ignores
SIGTERM), `dies` (exits with an error while starting), `sleeps` (never gets as far as its port), `hangs` (answers the probe, no
other request).
"""

import json
import os
import signal
import subprocess
import sys
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[3]))

from a3po_megatron.rollout import orphan_watch

CHOICE = {
    "token_ids": [1, 2],
    "logprobs": {"content": [{"token_id": 1, "logprob": -1.0}, {"token_id": 2, "logprob": -1.0}]},
    "finish_reason": "length",
    "weight_versions": [{"version": "0", "start": 0, "end": 2}],
}
METRICS = "".join(
    f'vllm:{name}{{engine="0"}} 0.0\n'
    for name in (
        "num_requests_running",
        "num_requests_waiting",
        "num_preemptions_total",
        "prompt_tokens_total",
        "generation_tokens_total",
    )
)


class Handler(BaseHTTPRequestHandler):
    """Answers every request with what readiness needs."""

    def do_GET(self) -> None:
        self._answer(METRICS if self.path == "/metrics" else json.dumps({"world_size": 1}))

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"]))
        if self.path == "/inference/v1/generate":
            if sys.argv[2] == "hangs" and b"probe-" not in body:
                time.sleep(600)
            self._answer(f"data: {json.dumps({'choices': [CHOICE]})}\n\ndata: [DONE]\n\n")
        else:
            self._answer("{}")

    def _answer(self, body: str) -> None:
        known = self.headers["Authorization"] == f"Bearer {os.environ['A3PO_TOKEN']}"
        self.send_response(200 if known else 401)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body.encode())

    def log_message(self, *arguments: object) -> None:
        """Stay quiet."""


def start_child(memory: Path) -> None:
    """Start a child that shares memory with nobody to remove it, as vLLM's workers do, and wait until it has mapped it."""
    memory.write_bytes(bytes(1024))
    code = "import mmap, sys, time; f = open(sys.argv[1], 'r+b'); m = mmap.mmap(f.fileno(), 0); print(flush=True); time.sleep(600)"
    child = subprocess.Popen([sys.executable, "-c", code, str(memory)], stdout=subprocess.PIPE)
    assert child.stdout is not None
    child.stdout.readline()


def main() -> None:
    """Serve until killed."""
    port, mode = int(sys.argv[1]), sys.argv[2]
    if mode == "dies":
        sys.exit("RuntimeError: no weights in this folder")
    if mode == "sleeps":
        time.sleep(600)
    if mode == "stubborn":
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    orphan_watch.start_if_asked()
    start_child(Path(f"/dev/shm/a3po-fake-{os.getpid()}"))
    ThreadingHTTPServer(("127.0.0.1", port), Handler).serve_forever()


if __name__ == "__main__":
    main()
