"""Writes checkpoints, while training goes on or in its way, and deletes old ones.

    save(step)    snapshot in host memory -> a thread writes this rank's file -> (poll: has every rank's?) -> finish

`poll` is called once a step and finishes a save whose files are written; `save` and `finish` wait for the one before. A
synchronous save is the same without the steps in between. The writing thread ends with its process: a killed rank leaves no
writer behind that could touch the folder of the next run.
"""

import queue
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing.core import CheckpointingConfig, save_config
from megatron.core.dist_checkpointing.state_dict_utils import save_preprocess
from megatron.core.dist_checkpointing.strategies import filesystem_async
from megatron.core.dist_checkpointing.strategies.async_utils import AsyncRequest
from megatron.core.dist_checkpointing.strategies.filesystem_async import FileSystemWriterAsync

from a3po_megatron.actor.actor import Actor
from a3po_megatron.actor.checkpoint import (
    checkpoint_state,
    first_reason,
    one_line,
    random_file,
    root_cause,
    write_own_files,
)
from a3po_megatron.actor.checkpoint_reading import read_metadata
from a3po_megatron.checkpoint_folder import begin_folder, finish_folder, incomplete_folder, prune, step_folder
from a3po_megatron.config.schema import RunConfig
from a3po_megatron.errors import UserError

WRITE_SHARE = 0.8  # of actor.timeout_s: a rank that is still writing says so before those who wait for it give up
# of megatron: path, name in the metadata, (objects, tensors), both with the items of the plan that they are
WriteBucket = tuple[str, str, tuple[list[Any], list[tuple[Any, torch.Tensor]]]]


class CheckpointWriter:
    """The checkpoints below one folder. Every method is collective over all ranks."""

    def __init__(self, actor: Actor, root: Path, run: RunConfig | None = None) -> None:
        """`run` says whether saves go on in the background and which checkpoints are kept."""
        self.actor, self.root, self.run = actor, root, run or RunConfig()
        self.last_step: int | None = None  # of the save begun last
        self._pending: _Save | None = None

    def save(self, step: int, objective: Mapping[str, float] | None = None) -> Path:
        """Begin to write the actor's state after `step` optimizer steps, and return the folder it will have.

        `objective`: what the objective remembers from batch to batch (`BatchStep.state`). The actor must have taken a step:
        before that its optimizer has no state to save. Raises UserError, on every rank, when this or the last save failed.
        """
        assert step > 0, "a checkpoint is written after a step"
        self.finish()
        self.actor.make_parameters_fresh()
        self._pending = _begin(self.actor, self.root, step, objective or {}, self.run.checkpoint_async)
        self.last_step = step
        if not self.run.checkpoint_async:
            self.finish()
        return step_folder(self.root, step)

    def poll(self) -> None:
        """Finish the pending save if every rank has written its file. Called once a step."""
        if self._pending is None:
            return
        is_done = torch.tensor(int(not self._pending.thread.is_alive()))
        dist.all_reduce(is_done, op=dist.ReduceOp.MIN)
        if is_done:
            self.finish()

    def finish(self) -> None:
        """Wait for the pending save, if any, complete its folder, and delete checkpoints that are no longer kept."""
        if self._pending is None:
            return
        save, self._pending = self._pending, None
        save.finish(self.actor.settings.timeout_s)
        if dist.get_rank() == 0:
            try:
                prune(self.root, self.run.keep_last, self.run.keep_every)
            except OSError as error:  # a file still open on a network file system, say: tried again after the next save
                print(f"note: {self.root}: not every old checkpoint could be deleted: {one_line(error)}", flush=True)
        dist.barrier()

    @contextmanager
    def finished_before(self, *errors: type[Exception]) -> Iterator[None]:
        """Finish the pending save before one of `errors`, which every rank raises alike, leaves the block."""
        try:
            yield
        except errors:
            try:
                self.finish()
            except UserError as error:
                if dist.get_rank() == 0:
                    print(f"note: {error}", flush=True)
            raise


def save_checkpoint(actor: Actor, root: Path, step: int, objective: Mapping[str, float] | None = None) -> Path:
    """Write one checkpoint below `root` and return its folder; as `CheckpointWriter.save`. Collective."""
    return CheckpointWriter(actor, root).save(step, objective)


@dataclass
class _Save:
    """A save under way on this rank."""

    step: int
    folder: Path  # under its temporary name
    request: AsyncRequest  # of megatron: what is left to do once every rank has written
    failures: list[str]  # filled by the thread
    thread: threading.Thread

    def finish(self, timeout_s: float) -> None:
        """Wait for the thread, write megatron's metadata and ours, and rename.

        Raises UserError with the reason of the first rank that failed.
        """
        self.thread.join(WRITE_SHARE * timeout_s)
        if self.thread.is_alive():
            self.failures.append(f"not written within {WRITE_SHARE:.0%} of actor.timeout_s={timeout_s}")
        _raise_first(self.folder, self.failures)
        # The second writes metadata.json and then waits for all ranks, also where rank 0 could not write it: done here instead.
        gather_and_write_metadata, _ = self.request.finalize_fns
        failures: list[str] = []
        try:
            with _kept_errors_of_metadata(failures):
                gather_and_write_metadata()
            if dist.get_rank() == 0 and not failures:
                save_config(CheckpointingConfig("torch_dist", 1), str(self.folder))
                _check_shared(self.folder)
                finish_folder(self.folder, self.step)
        except UserError as error:
            failures.append(str(error))
        except Exception as error:
            failures.append(one_line(root_cause(error)))
        _raise_first(self.folder, failures)


def _begin(actor: Actor, root: Path, step: int, objective: Mapping[str, float], in_background: bool) -> _Save:
    """Plan the save, take the snapshot and start the thread that writes it."""
    folder, failures = incomplete_folder(root, step), []
    if dist.get_rank() == 0:
        try:
            begin_folder(root, step)
        except OSError as error:
            failures.append(one_line(error))
    _raise_first(folder, failures)
    # The thread hands its results over within this process; upstream's default queue would start a manager process for them
    # on every rank (several seconds, and left over when a rank is killed).
    results: queue.Queue[Any] = queue.Queue()
    filesystem_async._results_queue = results
    request = _plan(checkpoint_state(actor, is_loading=False, step=step), folder)
    try:
        write_own_files(folder, objective)
    except OSError as error:
        failures.append(one_line(error))
    buckets = _snapshot(request, in_background, actor.settings.distributed_optimizer)
    thread = threading.Thread(target=_write, args=(request, buckets, results, failures), name="checkpoint", daemon=True)
    thread.start()
    return _Save(step, folder, request, failures, thread)


def _plan(state: dict[str, Any], folder: Path) -> AsyncRequest:
    """Let megatron check that the ranks together hold every shard once, and plan who writes what."""
    failures = []
    try:
        save_preprocess(
            state
        )  # by itself first: only rank 0 compares, and the others would go on into the next collective
    except Exception as error:
        failures.append(one_line(error))
    _raise_first(folder, failures)
    try:
        request = dist_checkpointing.save(
            state, str(folder), validate_access_integrity=False, async_sharded_save=True, async_strategy="mcore"
        )
    except Exception as error:
        failures.append(one_line(root_cause(error)))
    _raise_first(folder, failures)
    return request


def _snapshot(request: AsyncRequest, copy: bool, is_distributed: bool) -> list[WriteBucket]:
    """Return what this rank writes, in host memory. `copy`: training may go on, so the live tensors are copied.

    The gathered state of the distributed optimizer is a copy already.
    """
    if request.async_fn is None:  # every tensor of this rank is written by another
        return []
    _, buckets, _ = request.async_fn_args

    def is_gathered(item: Any) -> bool:
        return is_distributed and "optimizer.state." in item.index.fqn

    return [
        (
            path,
            key,
            (objects, [(item, tensor.to("cpu", copy=copy and not is_gathered(item))) for item, tensor in tensors]),
        )
        for path, key, (objects, tensors) in buckets
    ]


def _write(
    request: AsyncRequest, buckets: Sequence[WriteBucket], results: "queue.Queue[Any]", failures: list[str]
) -> None:
    """Write this rank's files. In a thread of its own; what goes wrong is put into `failures`."""
    written = {}
    try:
        for index, bucket in enumerate(buckets):
            transforms = request.async_fn.args[
                0
            ]  # as megatron's own loop over buckets, which keeps the error to itself
            _, outcome = FileSystemWriterAsync.write_preloaded_data(
                transforms, index, bucket, None, None, use_fsync=True
            )
            if isinstance(outcome, Exception):
                raise outcome
            written[index] = outcome
    except Exception as error:
        failures.append(one_line(root_cause(error)))
    if buckets:
        results.put(written)


@contextmanager
def _kept_errors_of_metadata(failures: list[str]) -> Iterator[None]:
    """Let rank 0, which writes `.metadata`, note an error and stay in step with the ranks that wait for it."""
    finish = FileSystemWriterAsync.finish

    def finish_or_note(*args: Any) -> None:
        try:
            finish(*args)
        except OSError as error:
            failures.append(one_line(error))

    FileSystemWriterAsync.finish = finish_or_note
    try:
        yield
    finally:
        FileSystemWriterAsync.finish = finish


def _raise_first(folder: Path, failures: Sequence[str]) -> None:
    """Raise UserError on every rank when one has failed."""
    if reason := first_reason(failures[0] if failures else None):
        raise UserError(f"{folder}: the checkpoint could not be written: {reason}")


def _check_shared(folder: Path) -> None:
    """Raise UserError when files that other ranks have written are not in this rank's folder."""
    names = {info.relative_path for info in read_metadata(folder).storage_data.values()}
    names |= {random_file(rank) for rank in range(dist.get_world_size())}
    if absent := sorted(name for name in names if not (folder / name).exists()):
        raise UserError(f"{absent[0]} is not there; run.dir must be on a file system that all nodes share")
