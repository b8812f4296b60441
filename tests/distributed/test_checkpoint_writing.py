"""Checkpoints written while training goes on, kept, deleted, and failing."""

import resource
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist

from a3po_megatron.actor.actor import Actor
from a3po_megatron.actor.checkpoint import load_checkpoint, read_objective
from a3po_megatron.actor.checkpoint_writer import CheckpointWriter, FileSystemWriterAsync, save_checkpoint
from a3po_megatron.checkpoint_folder import newest_complete
from a3po_megatron.config.schema import RunConfig
from a3po_megatron.errors import UserError
from a3po_megatron.objective.supervised import SupervisedLoss
from tests.distributed.layouts import Layout, Model, build_actor, random_sequences, save_model

DISTRIBUTED = {"distributed_optimizer": True}
DEADLINE_S = 60.0


def trained_actor(folder: Path, layout: Layout, **options: Any) -> Actor:
    actor = build_actor(save_model(Model().build(), folder / "model"), layout.config(**options))
    actor.train_step(random_sequences(0), SupervisedLoss())
    return actor


@contextmanager
def held_writers(monkeypatch: pytest.MonkeyPatch) -> Iterator[threading.Event]:
    """Hold every write back until the event is set."""
    may_write, write = threading.Event(), FileSystemWriterAsync.write_preloaded_data

    def write_when_allowed(*args: Any, **kwargs: Any) -> Any:
        assert may_write.wait(DEADLINE_S)
        return write(*args, **kwargs)

    monkeypatch.setattr(FileSystemWriterAsync, "write_preloaded_data", staticmethod(write_when_allowed))
    try:
        yield may_write
    finally:
        may_write.set()


@pytest.mark.parametrize("options", [{}, DISTRIBUTED], ids=["plain", "distributed"])
def test_training_goes_on_while_a_checkpoint_is_written_and_what_is_written_is_the_state_before(
    options: dict[str, Any], shared_folder: Path
) -> None:
    actor = trained_actor(shared_folder, Layout(tp=2, sp=True), **options)
    root = shared_folder / "checkpoints"
    writer = CheckpointWriter(actor, root, RunConfig(checkpoint_async=True, keep_last=1))
    with pytest.MonkeyPatch.context() as monkeypatch, held_writers(monkeypatch) as may_write:
        path = writer.save(1, {"beta": 0.5})
        uninterrupted = [actor.train_step(random_sequences(step), SupervisedLoss()).loss for step in (1, 2)]
        writer.poll()
        assert newest_complete(root) == (None, [])
        dist.barrier()  # every rank has looked
        may_write.set()
        deadline = time.monotonic() + DEADLINE_S
        while newest_complete(root)[0] is None:
            dist.barrier()  # all ranks take the same way out of the loop
            assert time.monotonic() < deadline, "the save was not finished in the background"
            writer.poll()
    assert newest_complete(root) == (path, [])
    writer.save(3)
    load_checkpoint(actor, path)  # the one begun is still being written
    assert read_objective(path) == {"beta": 0.5}
    assert [actor.train_step(random_sequences(step), SupervisedLoss()).loss for step in (1, 2)] == uninterrupted
    writer.finish()
    assert [folder.name for folder in root.iterdir()] == ["step_000003"]  # keep_last
    actor.close()


def save_and_finish(writer: CheckpointWriter, step: int) -> None:
    writer.save(step)
    writer.finish()


@pytest.mark.parametrize(
    ("in_background", "limit"), [(False, 100_000), (True, 100_000), (True, 1000)], ids=["sync", "async", "small-file"]
)
def test_a_save_that_fails_on_one_rank_ends_every_rank_with_its_reason(
    in_background: bool, limit: int, shared_folder: Path
) -> None:
    """The limit is above a rank's small files and below its file of tensors, or below both. No rank is left waiting."""
    actor = trained_actor(shared_folder, Layout(tp=2, pp=2))
    root = shared_folder / "checkpoints"
    writer = CheckpointWriter(actor, root, RunConfig(checkpoint_async=in_background))
    save_and_finish(writer, 1)
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    if dist.get_rank() == 2:
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, before[1]))  # as a full disk
    try:
        with pytest.raises(UserError) as failure:
            save_and_finish(writer, 2)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert str(failure.value) == (
        f"{root}/step_000002.incomplete: the checkpoint could not be written: OSError: [Errno 27] File too large"
    )
    assert newest_complete(root)[0] == root / "step_000001"
    actor.close()


def test_all_random_states_are_restored_and_at_another_layout_those_that_ranks_share(shared_folder: Path) -> None:
    from random import random

    from megatron.core.tensor_parallel import get_cuda_rng_tracker

    def draw() -> tuple[list[float], float]:
        shared = [random(), float(np.random.rand()), float(torch.rand(()))]
        with get_cuda_rng_tracker().fork():
            return shared, float(torch.rand((), device=actor.device))

    actor = trained_actor(shared_folder, Layout(tp=2, pp=2))
    draw()
    path = save_checkpoint(actor, shared_folder / "checkpoints", 1)
    expected = draw()
    for _ in range(2):
        load_checkpoint(actor, path)
        assert draw() == expected
    actor.close()
    actor = build_actor(shared_folder / "model", Layout(pp=4).config())
    fresh = draw()
    load_checkpoint(actor, path)
    assert draw()[0] == pytest.approx(_of_rank_0(expected[0]))
    assert fresh[0] != expected[0]
    actor.close()


def _of_rank_0(values: list[float]) -> list[float]:
    shared = torch.tensor(values, dtype=torch.float64)
    dist.broadcast(shared, 0)
    return shared.tolist()
