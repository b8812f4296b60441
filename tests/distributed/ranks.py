"""A pool of forked processes that serve as actor ranks for one distributed test after another."""

import contextlib
import gc
import json
import os
import selectors
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

COLLECTIVE_TIMEOUT = timedelta(seconds=60)
TEST_TIMEOUT_S = 150.0  # below pytest's own (conftest.py), so that ranks are ended before pytest gives up
MAX_THREADS = 150  # of a rank between tests: a handful, and those of the groups that megatron's globals still name
STRAGGLER_S = 3.0  # what is left to the other ranks once one has failed


class RankPool:
    """Forked ranks with a joined process group; each executes the same test body at the same time.

    Messages to a rank are lines of JSON: which collected test, and the folder it may share. Answers are lines of JSON: the
    traceback, or null.
    """

    def __init__(self, size: int, items: Sequence[pytest.Item]) -> None:
        """Import the engines here, once, then fork `size` ranks that inherit them and the collected tests."""
        import_engines()
        self.size = size
        self._folder = tempfile.TemporaryDirectory(prefix="ranks-")
        self._ranks: list[_Rank] = []
        for rank in range(size):
            self._ranks.append(_fork(rank, size, items, f"{self._folder.name}/store", self._ranks))

    def run(self, item: int, shared_folder: Path | None) -> str | None:
        """Run test number `item` on every rank. Returns None, or why it failed; then the pool is closed."""
        message = json.dumps({"item": item, "shared_folder": str(shared_folder) if shared_folder else None})
        try:
            for rank in self._ranks:
                rank.requests.write(message + "\n")
                rank.requests.flush()
            failure = self._collect()
        except BrokenPipeError:
            failure = "a rank had ended after the test before"
        if failure:
            self.close()
        return failure

    def close(self) -> None:
        """End the ranks: those that wait leave by themselves at the end of their input, others are killed."""
        for rank in self._ranks:
            with contextlib.suppress(BrokenPipeError):
                rank.requests.close()
        deadline = time.monotonic() + STRAGGLER_S
        for rank in self._ranks:
            while not rank.reaped() and time.monotonic() < deadline:
                time.sleep(0.01)
            if not rank.reaped():
                os.kill(rank.pid, signal.SIGKILL)
                os.waitpid(rank.pid, 0)
            rank.answers.close()
        self._ranks = []
        self._folder.cleanup()

    def _collect(self) -> str | None:
        """Wait for every rank's answer; after a first failure the others have little time left."""
        waiting = selectors.DefaultSelector()
        for number, rank in enumerate(self._ranks):
            waiting.register(rank.answers, selectors.EVENT_READ, number)
        deadline, failures = time.monotonic() + TEST_TIMEOUT_S, []
        while waiting.get_map() and (left := deadline - time.monotonic()) > 0:
            for key, _ in waiting.select(left):
                line = self._ranks[key.data].answers.readline()
                waiting.unregister(key.fileobj)
                failure = json.loads(line) if line else "the process ended"
                if failure:
                    failures.append(f"rank {key.data}:\n{failure}")
                    deadline = min(deadline, time.monotonic() + STRAGGLER_S)
        silent = [str(key.data) for key in waiting.get_map().values()]
        if silent:
            failures.append(f"ranks {', '.join(silent)} gave no answer in time")
        return "\n".join(failures) or None


class _Rank:
    def __init__(self, pid: int, requests: Any, answers: Any) -> None:
        self.pid, self.requests, self.answers = pid, requests, answers
        self._reaped = False

    def reaped(self) -> bool:
        if not self._reaped:
            self._reaped = os.waitpid(self.pid, os.WNOHANG)[0] == self.pid
        return self._reaped


def import_engines() -> None:
    """Import what the tests use, so that forked ranks share it: about ten seconds, once."""
    import torch

    torch.set_num_threads(1)
    import transformers
    from transformers.models.llama import modeling_llama  # noqa: F401
    from transformers.models.qwen2 import modeling_qwen2  # noqa: F401
    from transformers.models.qwen3 import modeling_qwen3  # noqa: F401
    from transformers.models.qwen3_moe import modeling_qwen3_moe  # noqa: F401

    import a3po_megatron.actor.actor
    import a3po_megatron.actor.checkpoint_writer  # noqa: F401

    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    gc.freeze()  # what has been imported stays; `collect` need not look at it


def _fork(rank: int, size: int, items: Sequence[pytest.Item], store: str, earlier: "Sequence[_Rank]") -> _Rank:
    request_read, request_write = os.pipe()
    answer_read, answer_write = os.pipe()
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            os.close(request_write)
            os.close(answer_read)
            for other in earlier:  # held open here, an earlier rank would not see that this pytest has ended
                os.close(other.requests.fileno())
            _serve(rank, size, items, store, os.fdopen(request_read), os.fdopen(answer_write, "w"))
            code = 0
        except BaseException:
            traceback.print_exc()
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(code)  # leave without pytest's own exit handlers
    os.close(request_read)
    os.close(answer_write)
    return _Rank(pid, os.fdopen(request_write, "w"), os.fdopen(answer_read))


def _serve(rank: int, size: int, items: Sequence[pytest.Item], store: str, requests: Any, answers: Any) -> None:
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(size))
    join(f"file://{store}", rank, size)
    for line in requests:
        request = json.loads(line)
        failure = None
        try:
            item = items[request["item"]]
            assert isinstance(item, pytest.Function)
            arguments = dict(item.callspec.params) if hasattr(item, "callspec") else {}
            if request["shared_folder"]:
                arguments["shared_folder"] = Path(request["shared_folder"])
            item.obj(**arguments)
            collect()
        except BaseException:
            failure = traceback.format_exc()
        answers.write(json.dumps(failure) + "\n")
        answers.flush()


def collect() -> None:
    """Free the models of the test that has ended, and check that their process groups went with them.

    A group's threads end with the last reference to it, and a model holds references in cycles. Left alone, a hundred tests
    make thousands of threads that take turns on two cores.
    """
    gc.collect()
    threads = len(os.listdir("/proc/self/task"))
    assert threads < MAX_THREADS, (
        f"{threads} threads are left after the test: something refers to process groups of old layouts"
    )


def join(init_method: str, rank: int, size: int) -> None:
    """Join the default process group on the device that the tests use here: GPUs where each rank has one, else CPUs."""
    import torch
    import torch.distributed as dist

    from a3po_megatron.actor import device as devices
    from tests.distributed.layouts import test_device

    torch.set_num_threads(1)
    device = devices.choose_device(test_device())
    devices.prepare_megatron(device)
    dist.init_process_group(
        devices.backend_of(device), init_method=init_method, rank=rank, world_size=size, timeout=COLLECTIVE_TIMEOUT
    )
