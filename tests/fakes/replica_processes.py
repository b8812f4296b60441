"""Replicas that are processes with the real receiver of weights, and an actor's end for them, for tests of publications."""

import asyncio
import multiprocessing
import signal
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import httpx
import torch

from a3po_megatron.rollout.buckets import TensorSpec, manifest_of
from a3po_megatron.rollout.fleet import Fleet
from a3po_megatron.rollout.rendezvous import join_group
from a3po_megatron.rollout.transfer_group import SENDER_RANK, GroupBroken
from a3po_megatron.rollout.weight_sender import Sent, WeightSender
from tools.replica_stand_in import HOST, Fault, serve

Tensors = Sequence[tuple[str, torch.Tensor]]
_forkserver = multiprocessing.get_context("forkserver")  # torch is imported once for all stand-ins
_forkserver.set_forkserver_preload(["tools.replica_stand_in"])


class ReplicaProcess:
    """One stand-in. A context that leaves nothing running."""

    def __init__(self, fault: Fault | None = None) -> None:
        here, there = _forkserver.Pipe()
        self.process = _forkserver.Process(target=serve, args=(there, fault), daemon=True)
        self.process.start()
        assert here.poll(60), "the stand-in did not start"
        self.url = f"http://{HOST}:{here.recv()}"

    def __enter__(self) -> "ReplicaProcess":
        return self

    def __exit__(self, *_: object) -> None:
        self.process.kill()
        self.process.join(10)

    def weights(self) -> dict[str, Any]:
        """Return version, digest and the calls so far."""
        return httpx.get(f"{self.url}/weights", timeout=30, trust_env=False).json()

    @property
    def was_killed(self) -> bool:
        self.process.join(10)
        return self.process.exitcode == -signal.SIGKILL


class Sender:
    """The actor's end of publications: joins, sends, and sends again as long as the fleet says so."""

    def __init__(self, fleet: Fleet, timeout_s: float) -> None:
        self._fleet, self._timeout_s = fleet, timeout_s
        self._sender: WeightSender | None = None
        self.epoch = 0
        self.outcomes: list[dict[str, Any]] = []

    async def publish(
        self, tensors: Tensors, version: int, transfer: Any = "gloo", kind: type[WeightSender] = WeightSender
    ) -> dict[str, Any]:
        """Publish `tensors`; return the last outcome. `kind`: of the sender, for faults of its own."""
        specs = specs_of(tensors)
        while True:
            plan = await self._fleet.begin_publication(version, manifest_of(specs), transfer)
            sent = await asyncio.to_thread(self._attempt, plan, specs, tensors, version, kind)
            self.outcomes.append(await self._fleet.finish_publication(version, sent.error, sent.kept))
            if not self.outcomes[-1].again:
                return self.outcomes[-1]

    def _attempt(
        self,
        plan: dict[str, Any],
        specs: Sequence[TensorSpec],
        tensors: Tensors,
        version: int,
        kind: type[WeightSender],
    ) -> Sent:
        if not plan.members:
            return Sent()
        keep_in = Path(plan.keep_in) if plan.keep_in else None
        try:
            if plan.rendezvous["transfer"] == "file":
                self._sender = kind(None)
            elif self._sender is None or plan.epoch != self.epoch:
                self.close()
                self._sender = kind(join_group(plan.rendezvous, SENDER_RANK, self._timeout_s, HOST))
                self.epoch = plan.epoch
        except GroupBroken as error:
            return Sent(error=str(error))
        sent = self._sender.send(specs, tensors, version, plan.bucket_bytes, keep_in)
        if sent.error:
            self.close()
        return sent

    def close(self) -> None:
        if self._sender is not None:
            self._sender.close()
            self._sender = None


def specs_of(tensors: Tensors) -> list[TensorSpec]:
    """Return what `tensors` are, without the data."""
    return [TensorSpec(name, str(t.dtype).removeprefix("torch."), tuple(t.shape)) for name, t in tensors]
