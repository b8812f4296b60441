"""What of the NCCL group runs without a GPU: the same functions, over a communicator that stands in for vLLM's."""

import threading
import time

import pytest
import torch

from a3po_megatron.config.rollout import RolloutConfig
from a3po_megatron.rollout import nccl_group
from a3po_megatron.rollout.buckets import TensorSpec
from a3po_megatron.rollout.nccl_group import NcclGroup
from a3po_megatron.rollout.rendezvous import choose_transfer
from a3po_megatron.rollout.transfer_group import GroupBroken
from a3po_megatron.rollout.weight_receiver import Incoming, WeightReceiver
from a3po_megatron.rollout.weight_sender import WeightSender

SPECS = tuple(TensorSpec(f"w{i}", "bfloat16", (40, 3 + i)) for i in range(4))
TENSORS = [(spec.name, torch.randn(spec.shape).bfloat16()) for spec in SPECS]


class Wire:
    """What rank 0 sent, for ranks that ask later."""

    def __init__(self) -> None:
        self.sent: list[torch.Tensor] = []


class FakeCommunicator:
    device = torch.device("cpu")

    def __init__(self, wire: Wire, rank: int) -> None:
        self.wire, self.rank, self.taken, self.destroyed = wire, rank, 0, 0

    def broadcast(self, tensor, src, stream=None) -> None:
        assert src == 0
        if self.rank == 0:
            self.wire.sent.append(tensor.clone())
        else:
            tensor.copy_(self.wire.sent[self.taken])
            self.taken += 1

    def destroy(self) -> None:
        self.destroyed += 1


def test_weights_pass_the_group_bit_for_bit_and_a_new_epoch_destroys_the_old_communicator(monkeypatch):
    wire, made = Wire(), []

    def connect(unique_id: bytes, rank: int, world_size: int, device: torch.device) -> FakeCommunicator:
        assert (unique_id, world_size) == (b"the id", 2)
        assert device == torch.device("cuda", 3), "the GPU of the worker, not that of the thread which joins"
        made.append(FakeCommunicator(wire, rank))
        return made[-1]

    here = threading.get_ident()
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 3 if threading.get_ident() == here else 0)
    monkeypatch.setattr(nccl_group, "connect_vllm", connect)
    rendezvous = {"transfer": "nccl", "unique_id": "dGhlIGlk", "world_size": 2, "store": ""}
    sender, receiver = WeightSender(NcclGroup(b"the id", 0, 2, 5.0)), WeightReceiver()
    receiver.join(rendezvous, 1, 5.0, "127.0.0.1")
    sender.send(SPECS, TENSORS, 1, bucket_bytes=300)
    received = receiver.receive(Incoming(1, SPECS, 300), list)
    assert all(torch.equal(a, b) for (_, a), (_, b) in zip(received, TENSORS, strict=True))
    receiver.join(rendezvous, 1, 5.0, "127.0.0.1")
    sender.close()
    receiver.leave()
    assert [communicator.destroyed for communicator in made] == [1, 1, 1]


def test_members_that_do_not_come_are_given_up_at_the_deadline_and_one_that_comes_later_is_destroyed():
    come = threading.Event()
    late = FakeCommunicator(Wire(), 0)

    def connect(unique_id: bytes, rank: int, world_size: int) -> FakeCommunicator:
        come.wait(60)
        return late

    with pytest.raises(GroupBroken, match=r"rank 0 waited up to 0.2 s for the 1 other members .*they did not all come"):
        NcclGroup(b"id", 0, 2, 0.2, connect)
    come.set()
    deadline = time.monotonic() + 30
    while not late.destroyed and time.monotonic() < deadline:
        time.sleep(0.01)
    assert late.destroyed == 1


def test_a_broadcast_that_does_not_end_is_aborted_at_the_deadline():
    communicator = FakeCommunicator(Wire(), 0)
    group = NcclGroup(b"id", 0, 2, 0.2, lambda *of: communicator)
    pending = nccl_group._NcclPending(group, lambda: False, "sending bucket 1", 0.2)
    with pytest.raises(GroupBroken, match=r"sending bucket 1: not done within 0.2 s; the communicator was aborted"):
        pending.wait()
    assert communicator.destroyed == 1
    with pytest.raises(GroupBroken, match="was closed"):
        group.broadcast(torch.zeros(8, dtype=torch.uint8), "sending bucket 2")


class FailingCommunicator(FakeCommunicator):
    def broadcast(self, tensor, src, stream=None) -> None:
        raise RuntimeError("NCCL error: unhandled system error")


def test_an_error_of_nccl_or_of_the_gpu_is_a_broken_group():
    failing = FailingCommunicator(Wire(), 0)
    group = NcclGroup(b"id", 0, 2, 0.2, lambda *of: failing)
    with pytest.raises(GroupBroken, match="sending bucket 1: NCCL or the GPU failed: NCCL error: unhandled"):
        group.broadcast(torch.zeros(8, dtype=torch.uint8), "sending bucket 1")

    def query() -> bool:
        raise RuntimeError("CUDA error: an illegal memory access")

    with pytest.raises(GroupBroken, match="sending bucket 2: NCCL or the GPU failed: CUDA error"):
        nccl_group._NcclPending(group, query, "sending bucket 2", 0.2).wait()
    assert failing.destroyed == 1
    sender = WeightSender(NcclGroup(b"id", 0, 2, 0.2, lambda *of: FailingCommunicator(Wire(), 0)))
    assert "NCCL error" in sender.send(SPECS, TENSORS, 1, bucket_bytes=300).error, "the run goes on"


def test_auto_takes_nccl_where_actor_and_rollout_have_gpus():
    assert choose_transfer(RolloutConfig(), "cpu") == "gloo"
    assert choose_transfer(RolloutConfig(), "cuda") == "nccl"
    assert choose_transfer(RolloutConfig(device="cpu"), "cuda") == "gloo"
    assert choose_transfer(RolloutConfig(weight_transfer="file"), "cuda") == "file"
