"""The sender and the receiver of weights over a real gloo group, two threads in one process."""

import os
import re
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from a3po_megatron.rollout import buckets
from a3po_megatron.rollout.buckets import TensorSpec
from a3po_megatron.rollout.rendezvous import join_group
from a3po_megatron.rollout.transfer_group import GlooGroup, GroupBroken
from a3po_megatron.rollout.transfer_messages import version_folder
from a3po_megatron.rollout.weight_receiver import Incoming, WeightReceiver
from a3po_megatron.rollout.weight_sender import WeightSender

HOST = "127.0.0.1"
SPECS = tuple(TensorSpec(f"w{i}", dtype, (50 + i, 3)) for i, dtype in enumerate(["float32", "bfloat16"] * 3))
TENSORS = [(spec.name, torch.randn(spec.shape).to(buckets.DTYPES[spec.dtype])) for spec in SPECS]


@pytest.fixture
def pool():
    with ThreadPoolExecutor(4) as executor:
        yield executor


def meet(pool, store: Path, receivers: int = 1, timeout_s: float = 10) -> tuple[WeightSender, list[WeightReceiver]]:
    world = 1 + receivers
    rendezvous = {"transfer": "gloo", "store": str(store), "world_size": world}

    def join(rank: int) -> WeightReceiver:
        receiver = WeightReceiver()
        receiver.join(rendezvous, rank, timeout_s, HOST)
        return receiver

    joined = [pool.submit(join, rank) for rank in range(1, world)]
    return WeightSender(join_group(rendezvous, 0, timeout_s, HOST)), [receiver.result() for receiver in joined]


def receive(receiver: WeightReceiver, version: int = 1, bucket_bytes: int = 1000) -> dict[str, torch.Tensor]:
    return receiver.receive(Incoming(version, SPECS, bucket_bytes), dict)


def test_all_receivers_get_the_tensors_bit_for_bit_version_after_version(pool, tmp_path):
    sender, groups = meet(pool, tmp_path / "store", receivers=2)
    for version in (1, 2, 3):
        received = [pool.submit(receives_all, group, version) for group in groups]
        assert sender.send(SPECS, TENSORS, version, bucket_bytes=1000).num_bytes >= sum(
            spec.num_bytes for spec in SPECS
        )
        assert all(result.result() for result in received)


def receives_all(receiver: WeightReceiver, version: int) -> bool:
    """Whether all tensors are right once the last has come. None is left afterwards: the next version gets their memory."""

    def load(stream) -> bool:
        tensors = dict(stream)
        return all(torch.equal(tensors[name], tensor) for name, tensor in TENSORS)

    return receiver.receive(Incoming(version, SPECS, 1000), load)


def test_the_sender_holds_two_buckets_not_the_model(pool, tmp_path):
    sender, (group,) = meet(pool, tmp_path / "store")
    result = pool.submit(receive, group)
    sender.send(SPECS, iter(TENSORS), 1, bucket_bytes=1000)
    result.result()
    assert sum(slot.buffer.numel() for slot in sender._slots) <= 2 * (1000 + buckets.ALIGNMENT + buckets.SEAL_BYTES)


def test_a_wrong_version_is_refused(pool, tmp_path):
    sender, (group,) = meet(pool, tmp_path / "store")
    result = pool.submit(receive, group, version=2)
    sender.send(SPECS, TENSORS, 1, bucket_bytes=1000)
    with pytest.raises(ValueError, match="expected weights of version 2"):
        result.result()


@pytest.mark.parametrize("tensors", [TENSORS[:-1], [*TENSORS, ("more", torch.zeros(1))]], ids=["too few", "too many"])
def test_a_sender_that_fails_makes_receivers_fail_at_once(pool, tmp_path, tensors):
    sender, (group,) = meet(pool, tmp_path / "store", timeout_s=100)
    result, began = pool.submit(receive, group), time.monotonic()
    with pytest.raises(ValueError, match="manifest"):
        sender.send(SPECS, tensors, 1, bucket_bytes=1000)
    with pytest.raises(RuntimeError, match=r"receiving .* of version 1"):
        result.result()
    assert time.monotonic() - began < 60


def test_a_receiver_that_leaves_makes_the_sender_fail_at_once(pool, tmp_path):
    sender, (group,) = meet(pool, tmp_path / "store", timeout_s=100)
    group.leave()
    began = time.monotonic()
    stream = iter(TENSORS)
    sent = sender.send(SPECS, stream, 1, 1000, keep_in=tmp_path / "published")
    assert re.search(r"sending .* of version 1", sent.error)
    assert next(stream, None) is None, "other ranks gather to the end"
    assert sent.kept, "late replicas get it all the same"
    assert time.monotonic() - began < 60


def test_waits_for_members_end_at_the_deadline_and_say_what_for(tmp_path):
    began = time.monotonic()
    with pytest.raises(RuntimeError, match="rank 0 waited up to 1 s for the 2 other members of the weight group"):
        GlooGroup(str(tmp_path / "store"), 0, 3, 1, HOST)
    assert time.monotonic() - began < 60


def test_a_silent_sender_is_an_error_at_the_deadline(pool, tmp_path):
    _sender, (group,) = meet(pool, tmp_path / "store", timeout_s=2)
    with pytest.raises(GroupBroken, match="receiving bucket 1"):
        receive(group)


class Unusable(Exception):
    """What a model says to weights that it cannot take."""


def test_a_receiver_that_cannot_use_the_weights_does_not_keep_them_from_the_others(pool, tmp_path):
    def refuse(tensors) -> None:
        next(tensors)
        raise Unusable

    sender, (good, bad) = meet(pool, tmp_path / "store", receivers=2)
    refused = pool.submit(bad.receive, Incoming(1, SPECS, 1000), refuse)
    received = pool.submit(receive, good)
    sender.send(SPECS, TENSORS, 1, bucket_bytes=1000)
    assert all(torch.equal(received.result()[name], tensor) for name, tensor in TENSORS)
    with pytest.raises(Unusable):
        refused.result()


def test_a_bucket_is_packed_while_the_one_before_it_is_on_the_wire():
    events: list[str] = []

    class SlowPending:
        def __init__(self, what: str) -> None:
            self.what = what

        def wait(self) -> None:
            events.append(self.what.replace("sending", "sent"))

    class SlowGroup:
        device = torch.device("cpu")

        def broadcast(self, flat, what):
            events.append(what)
            return SlowPending(what)

        def close(self) -> None:
            events.append("closed")

    def gathered():
        for name, tensor in TENSORS:
            events.append(f"gathered {name}")
            yield name, tensor

    WeightSender(SlowGroup()).send(SPECS, gathered(), 1, bucket_bytes=1)  # a bucket a tensor
    at = {event.removesuffix(" of 6 of version 1"): i for i, event in enumerate(events)}
    for i in range(2, 6):
        assert at[f"sending bucket {i}"] < at[f"gathered w{i}"]
        assert at[f"sent bucket {i - 1}"] < at[f"gathered w{i}"], "two buckets exist at a time"
    assert all(at[f"gathered w{i + 1}"] < at[f"sent bucket {i + 1}"] for i in range(5))


def test_a_disk_that_fails_does_not_keep_the_weights_from_the_receivers(pool, tmp_path):
    (tmp_path / "published").write_text("a file where a folder should be")
    sender, (receiver,) = meet(pool, tmp_path / "store")
    received = pool.submit(receive, receiver)
    sent = sender.send(SPECS, TENSORS, 1, 1000, keep_in=tmp_path / "published")
    assert all(torch.equal(received.result()[name], tensor) for name, tensor in TENSORS)
    assert "published" in sent.keep_error


def test_kept_weights_are_the_same_bits_and_readable_safetensors(tmp_path):
    for version in (1, 2):
        assert WeightSender(None).send(SPECS, TENSORS, version, 1000, keep_in=tmp_path).keep_error == ""
    assert sorted(folder.name for folder in tmp_path.iterdir()) == ["version_000001", "version_000002"]
    folder = version_folder(tmp_path, 2)
    received = WeightReceiver().receive(Incoming(2, SPECS, 1000, str(folder)), list)
    assert [name for name, _ in received] == [name for name, _ in TENSORS]
    assert all(torch.equal(a, b) for (_, a), (_, b) in zip(received, TENSORS, strict=True))
    found = {name: t for file in folder.glob("*.safetensors") for name, t in load_file(file).items()}
    assert all(torch.equal(found[name], tensor) for name, tensor in TENSORS)


def test_a_hundred_epochs_leave_no_socket_and_no_thread(pool, tmp_path):
    def resources() -> tuple[int, int]:
        return len(os.listdir("/proc/self/fd")), len(os.listdir("/proc/self/task"))

    for warm_up in range(4):  # the pool's own threads start, too
        meet_and_leave(pool, tmp_path / f"warm-up{warm_up}")
    before = resources()
    for epoch in range(100):
        meet_and_leave(pool, tmp_path / f"store{epoch}")
    after = resources()
    assert after[0] <= before[0] + 2
    assert after[1] <= before[1] + 2


def meet_and_leave(pool, store: Path) -> None:
    sender, receivers = meet(pool, store)
    received = [pool.submit(receive, receiver) for receiver in receivers]
    sender.send(SPECS, TENSORS, 1, bucket_bytes=1000)
    for result in received:
        result.result()
    sender.close()
    for receiver in receivers:
        receiver.leave()
