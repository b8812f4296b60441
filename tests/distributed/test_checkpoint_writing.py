"""Checkpoints written while training goes on, kept, deleted, and failing."""

import io
import resource
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stdout
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from megatron.core.dist_checkpointing import ShardedObject, ShardedTensor
from megatron.core.dist_checkpointing.dict_utils import nested_values

from a3po_megatron.actor import checkpoint, checkpoint_writer, random_state
from a3po_megatron.actor.actor import Actor
from a3po_megatron.actor.checkpoint import load_checkpoint, read_objective
from a3po_megatron.actor.checkpoint_writer import CheckpointWriter, FileSystemWriterAsync, save_checkpoint
from a3po_megatron.actor.nonfinite import NonFiniteError
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


def test_the_optimizers_gathered_state_is_in_the_memory_of_one_data_parallel_rank_and_not_copied_again(
    shared_folder: Path,
) -> None:
    actor = trained_actor(shared_folder, Layout(tp=2), **DISTRIBUTED)
    snapshot, moved = checkpoint_writer._snapshot, {}

    def observed(request: Any, *args: Any) -> Any:
        copied = snapshot(request, *args)
        before, after = (
            [pair for *_, (_, tensors) in buckets for pair in tensors]
            for buckets in (request.async_fn_args[1] if request.async_fn else [], copied)
        )
        for (item, tensor), (_, copy) in zip(before, after, strict=True):
            moved[item.index.fqn] = copy.data_ptr() != tensor.data_ptr()
        return copied

    state = checkpoint.checkpoint_state(actor, is_loading=False, step=1)
    gathered = [entry for entry in nested_values(state["optimizer"]) if isinstance(entry, ShardedTensor)]
    assert bool(gathered) == (actor.place.dp_rank == 0)
    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setattr(checkpoint_writer, "_snapshot", observed)
        save_and_finish(CheckpointWriter(actor, shared_folder / "checkpoints", RunConfig(checkpoint_async=True)), 1)
    assert all(is_copied != name.startswith("optimizer.state.") for name, is_copied in moved.items())
    assert bool(moved) == (actor.place.dp_rank == 0)
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


def a_shard_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only rank 0 looks for that."""
    state = checkpoint_writer.checkpoint_state
    half = ShardedObject("half", torch.zeros(2), (2,), (0,), replica_id=dist.get_rank())
    monkeypatch.setattr(checkpoint_writer, "checkpoint_state", lambda *a, **k: {**state(*a, **k), "half": half})


def a_thread_fails_outside_megatrons_own_care(monkeypatch: pytest.MonkeyPatch) -> None:
    if dist.get_rank() == 1:
        monkeypatch.setattr(FileSystemWriterAsync, "write_preloaded_data", staticmethod(fail_for_memory))


def the_metadata_cannot_be_written(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(FileSystemWriterAsync, "finish", fail_for_space)


def the_format_cannot_be_written(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checkpoint_writer, "save_config", fail_for_space)


def fail_for_memory(*args: Any, **kwargs: Any) -> None:
    raise MemoryError("no room")


def fail_for_space(*args: Any) -> None:
    raise OSError(28, "No space left on device")


REASONS = {
    a_shard_is_missing: "CheckpointingException: Invalid sharding pattern validation. Errors: ",
    a_thread_fails_outside_megatrons_own_care: "MemoryError: no room",
    the_metadata_cannot_be_written: "OSError: [Errno 28] No space left on device",
    the_format_cannot_be_written: "OSError: [Errno 28] No space left on device",
}


def test_whatever_fails_on_one_rank_in_a_save_ends_it_on_all_and_the_next_one_works(shared_folder: Path) -> None:
    actor = trained_actor(shared_folder, Layout(tp=2, pp=2))
    root = shared_folder / "checkpoints"
    writer = CheckpointWriter(actor, root)
    for fault, reason in REASONS.items():
        with pytest.MonkeyPatch.context() as monkeypatch:
            fault(monkeypatch)
            with pytest.raises(UserError) as failure:
                save_and_finish(writer, 1)
        start = f"{root}/step_000001.incomplete: the checkpoint could not be written: {reason}"
        assert str(failure.value).startswith(start), fault
        assert newest_complete(root)[0] is None
    save_and_finish(writer, 1)
    load_checkpoint(actor, root / "step_000001")
    actor.close()


def test_old_checkpoints_that_cannot_be_deleted_are_a_note_and_errors_of_all_ranks_leave_no_save_behind(
    shared_folder: Path,
) -> None:
    actor = trained_actor(shared_folder, Layout(tp=2, pp=2))
    root, said = shared_folder / "checkpoints", io.StringIO()
    writer = CheckpointWriter(actor, root, RunConfig(checkpoint_async=True, keep_last=1))

    def fail_after_a_save() -> None:
        with writer.finished_before(NonFiniteError):
            writer.save(1)
            raise NonFiniteError("as it was")

    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setattr(checkpoint_writer, "prune", fail_for_space)
        with redirect_stdout(said), pytest.raises(NonFiniteError, match="as it was"):
            fail_after_a_save()
    assert newest_complete(root) == (root / "step_000001", [])
    expected = f"note: {root}: not every old checkpoint could be deleted: OSError: [Errno 28] No space left on device\n"
    assert said.getvalue() == (expected if dist.get_rank() == 0 else "")
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


def test_random_states_of_another_kind_of_device_leave_the_tracker_as_the_seed_set_it(shared_folder: Path) -> None:
    """A GPU's states are of another size, and fail where the tracker first draws."""
    from megatron.core.tensor_parallel import get_cuda_rng_tracker

    def of_a_gpu() -> dict[str, Any]:
        return {
            **random_state.collect_random_state(),
            "tracker": {"model-parallel-rng": torch.zeros(16, dtype=torch.uint8)},
        }

    actor, state = trained_actor(shared_folder, Layout(tp=2, pp=2)), checkpoint_writer.checkpoint_state

    def elsewhere(*args: Any, **kwargs: Any) -> dict[str, Any]:
        with pytest.MonkeyPatch.context() as while_saving:
            while_saving.setattr(actor, "device", torch.device("meta"))
            return state(*args, **kwargs)

    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setattr(checkpoint, "collect_random_state", of_a_gpu)
        monkeypatch.setattr(checkpoint_writer, "checkpoint_state", elsewhere)
        path = save_checkpoint(actor, shared_folder / "checkpoints", 1)
    load_checkpoint(actor, path)
    with get_cuda_rng_tracker().fork():
        torch.rand((), device=actor.device)
    actor.close()


def _of_rank_0(values: list[float]) -> list[float]:
    shared = torch.tensor(values, dtype=torch.float64)
    dist.broadcast(shared, 0)
    return shared.tolist()
