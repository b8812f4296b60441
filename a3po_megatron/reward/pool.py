"""Worker processes that judge answers under a deadline that really ends them.

    judge() --> queue of N threads --> pipe --> worker process (sympy lives there)
                       |                            |
                       +--- deadline: SIGKILL ------+   then another worker

A thread writes one request and waits for one answer; past the deadline it kills its worker by pid and starts another for the
next request. Nothing here uses signals of this process, and nothing runs on the caller's event loop.
"""

import asyncio
import threading
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from types import TracebackType
from typing import Self

import msgspec

from a3po_megatron.config.reward import RewardPoolConfig
from a3po_megatron.errors import UserError
from a3po_megatron.records import Verdict
from a3po_megatron.reward.base import RewardError
from a3po_megatron.reward.worker import Request
from a3po_megatron.reward.worker_process import START_TIMEOUT_S, WorkerFailed, WorkerProcess


class WorkerPool:
    """`config.num_workers` processes, started when they are first needed. Safe to use from any thread or event loop."""

    def __init__(self, config: RewardPoolConfig, user_path: str = "") -> None:
        """`user_path`: `package.module:function` that a worker imports when it starts; empty for none."""
        self.config = config
        self._user_path = user_path
        self.restarts = 0  # workers that had to be killed or died
        self._threads = ThreadPoolExecutor(config.num_workers, thread_name_prefix="reward")
        self._own = threading.local()
        self._workers: set[WorkerProcess] = set()
        self._lock = threading.Lock()
        self._closed = False

    def submit(self, request: Request) -> Future[Verdict]:
        """Return the future verdict on one request. It raises RewardError where the response is not to blame."""
        length = len(request.response)
        if length > self.config.max_response_chars:
            refused: Future[Verdict] = Future()
            limit = self.config.max_response_chars
            refused.set_result(Verdict(0.0, f"the response has {length} characters, more than {limit}"))
            return refused
        return self._threads.submit(self._judge, request)

    async def judge(self, requests: Sequence[Request]) -> list[Verdict]:
        """Return the verdicts in the order of the requests, without holding up the event loop."""
        return list(await asyncio.gather(*(asyncio.wrap_future(self.submit(request)) for request in requests)))

    def judge_now(self, requests: Sequence[Request]) -> list[Verdict]:
        """Return the verdicts in the order of the requests; blocks."""
        return [future.result() for future in [self.submit(request) for request in requests]]

    def pids(self) -> list[int]:
        """Return the process ids of the workers that live."""
        with self._lock:
            return [worker.pid for worker in self._workers]

    def close(self) -> None:
        """End all workers; requests in work get RewardError."""
        self._closed = True
        with self._lock:
            workers = list(self._workers)
        for worker in workers:
            worker.kill()
        self._threads.shutdown(wait=True, cancel_futures=True)
        for worker in workers:
            worker.end()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _judge(self, request: Request) -> Verdict:
        worker = self._worker()
        try:
            answer = worker.ask(msgspec.msgpack.encode(_encodable(request)), self.config.timeout_s)
        except TimeoutError:
            self._drop(worker)
            return Verdict(0.0, f"not judged within {self.config.timeout_s:g} s (reward.pool.timeout_s)")
        except WorkerFailed as error:
            self._drop(worker)
            if self._closed:
                raise RewardError("the worker pool was closed") from None
            return Verdict(0.0, f"the worker ended over this answer: {error}")
        if answer.ends:
            self._drop(worker)
        if answer.error:
            raise RewardError(answer.error)
        return answer.verdict or Verdict(1.0, "comparable")

    def _worker(self) -> WorkerProcess:
        """Return this thread's worker, started now if it has none."""
        worker: WorkerProcess | None = getattr(self._own, "worker", None)
        if worker is None:
            worker = WorkerProcess(self.config.memory_bytes, self._user_path)
            with self._lock:
                self._workers.add(worker)
                if self._closed:
                    worker.kill()
            self._own.worker = worker
            try:
                worker.wait_ready()
            except TimeoutError:
                self._drop(worker)
                raise RewardError(f"waited {START_TIMEOUT_S:g} s for a reward worker to import its libraries") from None
            except WorkerFailed as error:
                self._drop(worker)
                raise RewardError(f"a reward worker did not start: {error}; its stderr says why") from None
        return worker

    def _drop(self, worker: WorkerProcess) -> None:
        self._own.worker = None
        worker.end()
        with self._lock:
            self._workers.discard(worker)
            self.restarts += 1


def check_golds(pool: WorkerPool, answers: Sequence[tuple[str, str]]) -> None:
    """Raise UserError for the first (problem id, answer) that no response could be compared with."""
    futures = [pool.submit(Request("gold", answer, "")) for _, answer in answers]
    for (problem_id, answer), future in zip(answers, futures, strict=True):
        try:
            verdict = future.result()
        except RewardError as error:
            reason = str(error)
        else:
            reason = "" if verdict.reward == 1.0 else verdict.reason
        if reason:
            raise UserError(
                f"data: problem {problem_id}: the answer {answer[:80]!r} cannot be judged: {reason}; correct or drop the row"
            )


def _encodable(request: Request) -> Request:
    """Return the request without lone surrogates, which are no text: each becomes `?`."""
    fields = {
        name: getattr(request, name).encode("utf-8", "replace").decode()
        for name in ("answer", "response", "problem_id")
    }
    return msgspec.structs.replace(request, **fields)
