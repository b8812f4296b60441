"""The pool's side of one worker: start the process, exchange frames with it under a deadline, end it with what it started.

The process itself is `worker.py`. Knows no verdicts and no threads: what a failure is worth is the pool's business.
"""

import contextlib
import os
import select
import signal
import subprocess
import sys
import time
from pathlib import Path

import msgspec

from a3po_megatron.reward.worker import LENGTH, Answer

SOURCE_ROOT = Path(__file__).resolve().parents[2]
START_TIMEOUT_S = 300.0  # of a worker: it imports sympy, in 2 s on an idle machine
EXIT_TIMEOUT_S = 5.0  # between the end of a worker's pipes and its own
END_TIMEOUT_S = 30.0  # for a killed process to be gone: the system may hold it
POLL_S = 0.01
MAX_ANSWER_BYTES = 1 << 20


class WorkerFailed(Exception):
    """A worker is gone; the message says how."""


class WorkerProcess:
    """One process and its pipes. Used by one thread, except for `kill`."""

    def __init__(self, memory_bytes: int, user_path: str) -> None:
        paths = [str(SOURCE_ROOT), os.environ.get("PYTHONPATH", "")]
        environment = {
            **os.environ,
            "PYTHONPATH": os.pathsep.join(path for path in paths if path),
            "OMP_NUM_THREADS": "1",
        }
        command = [sys.executable, "-m", "a3po_megatron.reward.worker", str(os.getpid()), str(memory_bytes), user_path]
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=environment,
            bufsize=0,
            start_new_session=True,  # what a user's function starts is killed with the worker
        )
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._in, self._out = self._process.stdin.fileno(), self._process.stdout.fileno()
        os.set_blocking(self._in, False)

    @property
    def pid(self) -> int:
        """The process id."""
        return self._process.pid

    def wait_ready(self) -> None:
        """Wait until the imports are done."""
        self._receive(time.monotonic() + START_TIMEOUT_S)

    def ask(self, body: bytes, timeout_s: float) -> Answer:
        """Send one request and return the answer. Raises TimeoutError, or WorkerFailed if the process ended."""
        deadline = time.monotonic() + timeout_s
        self._send(LENGTH.pack(len(body)) + body, deadline)
        return msgspec.msgpack.decode(self._receive(deadline), type=Answer)

    def kill(self) -> None:
        """SIGKILL to the process and to what it started; nothing happens if it has been waited for."""
        if self._process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)

    def end(self) -> None:
        """Kill, wait, close the pipes: nothing of the process is left, unless the system itself holds it."""
        self.kill()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(END_TIMEOUT_S)
        for stream in (self._process.stdin, self._process.stdout):
            if stream is not None:
                stream.close()

    def _send(self, data: bytes, deadline: float) -> None:
        view = memoryview(data)
        while view:
            self._wait(self._in, select.POLLOUT, deadline)
            try:
                view = view[os.write(self._in, view) :]
            except BlockingIOError:
                continue
            except OSError:
                raise WorkerFailed(self._exit()) from None

    def _receive(self, deadline: float) -> bytes:
        (length,) = LENGTH.unpack(self._read(LENGTH.size, deadline))
        if length > MAX_ANSWER_BYTES:
            raise WorkerFailed(f"it announced an answer of {length} bytes")
        return self._read(length, deadline)

    def _read(self, count: int, deadline: float) -> bytes:
        data = bytearray()
        while len(data) < count:
            self._wait(self._out, select.POLLIN, deadline)
            part = os.read(self._out, count - len(data))
            if not part:
                raise WorkerFailed(self._exit())
            data += part
        return bytes(data)

    def _wait(self, descriptor: int, event: int, deadline: float) -> None:
        poll = select.poll()
        poll.register(descriptor, event)
        if not poll.poll(max(0.0, deadline - time.monotonic()) * 1000):
            raise TimeoutError

    def _exit(self) -> str:
        """Return how the process ended, whose pipes have closed; one that closed them and lives on is not waited for."""
        deadline = time.monotonic() + EXIT_TIMEOUT_S
        while os.waitid(os.P_PID, self._process.pid, os.WEXITED | os.WNOWAIT | os.WNOHANG) is None:
            if time.monotonic() > deadline:
                return f"it closed its pipes and was still there after {EXIT_TIMEOUT_S:g} s"
            time.sleep(POLL_S)
        self.kill()  # what it started, before it is waited for: after that its group has no name
        return f"exit code {self._process.wait(END_TIMEOUT_S)}"  # at once: it has ended
