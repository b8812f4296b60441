"""The controller's side of registration, in a thread: remembers what supervisors say."""

import threading
import time
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import msgspec


class FakeController:
    """Answers /replicas/register and /replicas/deregister; use as a context manager."""

    def __init__(self, token: str) -> None:
        self.registered: dict[str, dict[str, Any]] = {}  # name -> message, in order of first arrival
        self.deregistered: dict[str, str] = {}  # name -> reason
        self.fenced: set[str] = set()  # names to answer `fenced`
        outer = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = msgspec.msgpack.decode(self.rfile.read(int(self.headers["Content-Length"])))
                if self.headers["Authorization"] != f"Bearer {token}":
                    self.send_response(401)
                    self.end_headers()
                    return
                answer = {"state": "current", "reason": ""}
                if self.path == "/replicas/deregister":
                    outer.deregistered[body["name"]] = body["reason"]
                elif body["name"] in outer.fenced:
                    answer = {"state": "fenced", "reason": "weights did not arrive"}
                else:
                    outer.registered.setdefault(body["name"], body)
                encoded = msgspec.msgpack.encode(answer)
                self.send_response(200)
                self.send_header("Content-Length", str(len(encoded)))
                self.end_headers()
                self.wfile.write(encoded)

            def log_message(self, *arguments: object) -> None:
                """Stay quiet."""

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_port}"

    def __enter__(self) -> "FakeController":
        threading.Thread(target=self._server.serve_forever, daemon=True).start()
        return self

    def __exit__(self, *arguments: object) -> None:
        self.stop()

    def stop(self) -> None:
        """Stop listening, as a controller that died."""
        self._server.shutdown()
        self._server.server_close()

    def wait(self, condition: Callable[[], object], timeout_s: float) -> None:
        """Wait until `condition` holds; fail after `timeout_s` saying what was heard."""
        deadline = time.monotonic() + timeout_s
        while not condition():
            assert time.monotonic() < deadline, f"heard {self.registered} and {self.deregistered}"
            time.sleep(0.05)
