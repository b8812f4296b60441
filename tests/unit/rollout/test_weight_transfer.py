"""The sender and the receiver of weights over a real gloo group, two threads in one process."""

import os
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

from a3po_megatron.rollout import buckets
from a3po_megatron.rollout.buckets import TensorSpec
from a3po_megatron.rollout.transfer_group import TransferGroup
from a3po_megatron.rollout.weight_receiver import receive_tensors
from a3po_megatron.rollout.weight_sender import WeightSender

HOST = "127.0.0.1"
SPECS = tuple(TensorSpec(f"w{i}", dtype, (50 + i, 3)) for i, dtype in enumerate(["float32", "bfloat16"] * 3))
TENSORS = [(spec.name, torch.randn(spec.shape).to(buckets.DTYPES[spec.dtype])) for spec in SPECS]


@pytest.fixture
def pool():
    with ThreadPoolExecutor(4) as executor:
        yield executor


def meet(pool, store: Path, receivers: int = 1, timeout_s: float = 10) -> tuple[WeightSender, list[TransferGroup]]:
    world = 1 + receivers
    groups = [pool.submit(TransferGroup, store, rank, world, timeout_s, HOST) for rank in range(1, world)]
    return WeightSender(store, world, timeout_s, HOST), [group.result() for group in groups]


def receive(group: TransferGroup, version: int = 1, bucket_bytes: int = 1000) -> dict[str, torch.Tensor]:
    return dict(receive_tensors(group, SPECS, version, bucket_bytes))


def test_all_receivers_get_the_tensors_bit_for_bit_version_after_version(pool, tmp_path):
    sender, groups = meet(pool, tmp_path / "store", receivers=2)
    for version in (1, 2, 3):
        received = [pool.submit(receive, group, version) for group in groups]
        assert sender.send(SPECS, TENSORS, version, bucket_bytes=1000) >= sum(spec.num_bytes for spec in SPECS)
        for result in received:
            assert all(torch.equal(result.result()[name], tensor) for name, tensor in TENSORS)


def test_the_sender_holds_one_bucket_not_the_model(pool, tmp_path):
    sender, (group,) = meet(pool, tmp_path / "store")
    result = pool.submit(receive, group)
    sender.send(SPECS, iter(TENSORS), 1, bucket_bytes=1000)
    result.result()
    assert sender._buffer.numel() <= 1000


def test_a_wrong_version_is_refused(pool, tmp_path):
    sender, (group,) = meet(pool, tmp_path / "store")
    result = pool.submit(receive, group, version=2)
    sender.send(SPECS, TENSORS, 1, bucket_bytes=1000)
    with pytest.raises(ValueError, match="expected weights of version 2"):
        result.result()


@pytest.mark.parametrize("tensors", [TENSORS[:-1], [*TENSORS, ("more", torch.zeros(1))]], ids=["too few", "too many"])
def test_a_sender_that_fails_makes_receivers_fail_at_once(pool, tmp_path, tensors):
    sender, (group,) = meet(pool, tmp_path / "store", timeout_s=60)
    result, began = pool.submit(receive, group), time.monotonic()
    with pytest.raises(ValueError, match="manifest"):
        sender.send(SPECS, tensors, 1, bucket_bytes=1000)
    with pytest.raises(RuntimeError, match=r"receiving .* of version 1"):
        result.result()
    assert time.monotonic() - began < 10


def test_a_receiver_that_leaves_makes_the_sender_fail_at_once(pool, tmp_path):
    sender, (group,) = meet(pool, tmp_path / "store", timeout_s=60)
    group.close()
    began = time.monotonic()
    with pytest.raises(RuntimeError, match=r"sending .* of version 1"):
        sender.send(SPECS, TENSORS, 1, bucket_bytes=1000)
    assert time.monotonic() - began < 10


def test_waits_for_members_end_at_the_deadline_and_say_what_for(tmp_path):
    began = time.monotonic()
    with pytest.raises(RuntimeError, match="rank 0 waited up to 1 s for the 2 other members of the weight group"):
        WeightSender(tmp_path / "store", 3, timeout_s=1, host=HOST)
    assert time.monotonic() - began < 10


def test_a_silent_sender_is_an_error_at_the_deadline(pool, tmp_path):
    _sender, (group,) = meet(pool, tmp_path / "store", timeout_s=2)
    with pytest.raises(RuntimeError, match="receiving bucket 1"):
        receive(group)


def test_groups_that_were_left_keep_no_socket_open(pool, tmp_path):
    def open_files() -> int:
        return len(os.listdir("/proc/self/fd"))

    meet_and_leave(pool, tmp_path / "warm-up")
    before = open_files()
    for epoch in range(10):
        meet_and_leave(pool, tmp_path / f"store{epoch}")
    assert open_files() <= before + 2


def meet_and_leave(pool, store: Path) -> None:
    sender, (group,) = meet(pool, store)
    sender.close()
    group.close()
