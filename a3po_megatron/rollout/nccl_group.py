"""The weight group in GPU memory: vLLM's own NCCL communicator, joined by a unique id. Torch; vllm only once one is made.

vLLM's engines for NCCL meet in an open TCPStore and unpickle what they find there. Here rank 0 makes the id, and it reaches
the members through the controller and the replicas' routes, all of which ask for the run's token. NCCL itself waits for ever
for a member that died: every wait here polls, and at its deadline aborts the communicator.
"""

import threading
import time
from collections.abc import Callable
from functools import partial
from typing import Any, Protocol

import torch

from a3po_megatron.rollout.transfer_group import SENDER_RANK, GroupBroken, Pending

POLL_S = 0.001


class Communicator(Protocol):
    """The part of vLLM's `PyNcclCommunicator` that is used."""

    device: torch.device

    def broadcast(self, tensor: torch.Tensor, src: int, stream: Any = None) -> None:
        """Enqueue a broadcast of `tensor` from rank `src`."""

    def destroy(self) -> None:
        """Abort what is under way (ncclCommAbort) and free the communicator; returns within seconds."""


Connect = Callable[[bytes, int, int], Communicator]  # (unique id, rank, world size)


class NcclGroup:
    """One membership. `close` destroys the communicator, so that a new epoch leaks none."""

    def __init__(
        self, unique_id: bytes, rank: int, world_size: int, timeout_s: float, connect: Connect | None = None
    ) -> None:
        """Join as `rank`, with the current GPU, and wait for the others. `connect`: for tests without a GPU."""
        self._timeout_s = timeout_s
        if connect is None:  # the GPU is asked for here: in another thread the current one is 0
            connect = partial(connect_vllm, device=torch.device("cuda", torch.cuda.current_device()))
        self._communicator: Communicator | None = _connect_by(connect, unique_id, rank, world_size, timeout_s)
        self.device = self._communicator.device
        self._stream: Any = torch.cuda.Stream(self.device) if self.device.type == "cuda" else None

    def broadcast(self, flat: torch.Tensor, what: str) -> Pending:
        """Enqueue on a stream of its own, after what the current stream has written."""
        if self._communicator is None:
            raise GroupBroken(f"{what}: this weight group was closed")
        try:
            return _NcclPending(self, self._enqueue(self._communicator, flat), what, self._timeout_s)
        except RuntimeError as error:
            raise _failed(what, error) from error

    def _enqueue(self, communicator: Communicator, flat: torch.Tensor) -> Callable[[], bool]:
        """Return what tells whether the broadcast is done."""
        if self._stream is None:
            communicator.broadcast(flat, SENDER_RANK)
            return lambda: True
        self._stream.wait_stream(torch.cuda.current_stream(self.device))
        communicator.broadcast(flat, SENDER_RANK, self._stream)
        flat.record_stream(self._stream)
        done = torch.cuda.Event()
        done.record(self._stream)
        return done.query

    def close(self) -> None:
        """Abort and free the communicator."""
        if self._communicator is not None:
            self._communicator.destroy()
            self._communicator = None


class _NcclPending:
    def __init__(self, group: NcclGroup, is_done: Callable[[], bool], what: str, timeout_s: float) -> None:
        self._group, self._is_done, self._what, self._timeout_s = group, is_done, what, timeout_s
        self._deadline = time.monotonic() + timeout_s

    def wait(self) -> None:
        while not self._asks_done():
            if time.monotonic() > self._deadline:
                self._group.close()
                raise GroupBroken(f"{self._what}: not done within {self._timeout_s:g} s; the communicator was aborted")
            time.sleep(POLL_S)

    def _asks_done(self) -> bool:
        try:
            return self._is_done()
        except RuntimeError as error:
            self._group.close()
            raise _failed(self._what, error) from error


def _failed(what: str, error: RuntimeError) -> GroupBroken:
    return GroupBroken(f"{what}: NCCL or the GPU failed: {error}")


def new_unique_id() -> bytes:
    """Return a fresh ncclUniqueId. The process that makes it must be the group's rank 0: NCCL listens there."""
    from vllm.distributed.device_communicators.pynccl_wrapper import NCCLLibrary

    return bytes(byte & 0xFF for byte in NCCLLibrary().ncclGetUniqueId().internal)


def connect_vllm(unique_id: bytes, rank: int, world_size: int, device: torch.device) -> Communicator:
    """Join by vLLM's communicator on a GPU; blocks until every member is there."""
    from vllm.distributed.device_communicators.pynccl import PyNcclCommunicator

    return PyNcclCommunicator.from_unique_id_bytes(unique_id, rank, world_size, device)


def _connect_by(connect: Connect, unique_id: bytes, rank: int, world_size: int, timeout_s: float) -> Communicator:
    """Run `connect`, which cannot be interrupted, in a thread, and give it up at the deadline."""
    made: list[Communicator] = []
    errors: list[Exception] = []
    given_up = threading.Event()

    def work() -> None:
        try:
            communicator = connect(unique_id, rank, world_size)
        except Exception as error:
            errors.append(error)
            return
        made.append(communicator)
        if given_up.is_set():
            communicator.destroy()

    thread = threading.Thread(target=work, name="join NCCL group", daemon=True)
    thread.start()
    thread.join(timeout_s)
    if made:
        return made[0]
    given_up.set()
    for late in made:
        late.destroy()
    reason = str(errors[0]) if errors else "they did not all come"
    raise GroupBroken(
        f"rank {rank} waited up to {timeout_s:g} s for the {world_size - 1} other members of the weight group: {reason}"
    )
