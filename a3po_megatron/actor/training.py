"""The actor's loop, on every rank: batch -> optimizer steps -> publication of the next version -> report.

    rank 0    controller --batch--> tell all ranks --> N minibatches --> gather, send weights --> report --> controller
    others                  (wait) --------------> --> N minibatches --> gather             --> (wait)

Waits for the controller, at most `controller.batch_timeout_s` for a batch; woken by rank 0. A batch trained at version
k starts from weights k, and weights k + 1 are published after its last minibatch.
"""

import time
from pathlib import Path
from typing import Protocol

import torch.distributed as dist

from a3po_megatron import wire
from a3po_megatron.actor.actor import Actor
from a3po_megatron.actor.batch_step import BatchStep, Row
from a3po_megatron.actor.checkpoint_writer import CheckpointWriter
from a3po_megatron.actor.control import ControlGroup, RunFailed, longest_wait_s
from a3po_megatron.actor.export import export_hf_folder
from a3po_megatron.actor.nonfinite import NonFiniteError
from a3po_megatron.actor.publish import NotPublishable, PublicationLink, Publisher
from a3po_megatron.config.model_shape import ModelShape
from a3po_megatron.config.schema import TrainConfig
from a3po_megatron.controller.link import ControllerError, PublishAgain
from a3po_megatron.records import Batch

PUBLISH_AGAIN = b"publish again"  # rank 0's word in place of a batch


class Link(PublicationLink, Protocol):
    """What the loop asks of the controller; `controller/link.py` has it."""

    def next_batch(self, version: int) -> Batch | None:
        """Return the batch to train at `version`; None when the run is over. Raises PublishAgain."""

    def report_step(self, step: int, version: int, metrics: Row) -> None:
        """Hand over the actor's part of a row."""

    def done(self, reason: str) -> None:
        """End the run."""


def train(config: TrainConfig, shape: ModelShape, link: Link | None) -> int:
    """Train until the controller says that the run is over; write checkpoint and model; return the last version.

    Collective. `link` on rank 0, None on the others. Raises NonFiniteError without advancing the version, and where the
    controller fails ControllerError or NotPublishable on rank 0, RunFailed on the others; a save under way is finished first.
    """
    actor = Actor(shape, config.model, config.actor, config.optimizer, config.run.seed, config.rollout.temperature)
    if link:
        print(f"actor: {actor.kernels.describe()}", flush=True)
    control = ControlGroup(longest_wait_s(config.controller))
    publisher = Publisher(actor, control, config.rollout, link)
    batch_step = BatchStep(actor, config.algorithm, config.controller.max_staleness, config.run.seed)
    writer = CheckpointWriter(actor, Path(config.run.dir) / "checkpoints", config.run)
    # Rank 0 alone hears of the controller's failure, while the others wait for its next word.
    of_rank_0 = (ControllerError, NotPublishable)
    with writer.finished_before(NonFiniteError, RunFailed, *of_rank_0), control.told_of(*of_rank_0):
        version = _train_batches(config, control, link, publisher, batch_step, writer)
    if has_stepped(actor) and writer.last_step != version:
        writer.save(version, batch_step.state())
    writer.finish()
    export_hf_folder(actor, Path(config.model.path), Path(config.run.dir) / "model")
    if link:
        link.done(f"finished at version {version}")
    publisher.close()
    control.close()
    actor.close()
    return version


def _train_batches(
    config: TrainConfig,
    control: ControlGroup,
    link: Link | None,
    publisher: Publisher,
    batch_step: BatchStep,
    writer: CheckpointWriter,
) -> int:
    """Train and publish until there is no more batch; return the last version."""
    clock, version = Stopwatch(), 0
    while (batch := _next_batch(control, link, publisher, version)) is not None:
        wait_s = clock.lap_s()
        metrics = batch_step.train(batch, version)
        writer.poll()
        is_due = config.run.checkpoint_every and (version + 1) % config.run.checkpoint_every == 0
        if is_due and has_stepped(writer.actor):
            writer.save(version + 1, batch_step.state())
        clock.lap_s()
        waited_s = publisher.publish(version + 1)
        if link:
            times: Row = {"time/wait_s": wait_s + waited_s, "time/publish_s": clock.lap_s() - waited_s}
            link.report_step(version, version, {**metrics, **times})
        version += 1
        clock.lap_s()
    return version


def has_stepped(actor: Actor) -> bool:
    """Whether there is something to save: without a step the optimizer has no state, and the weights are model.path's."""
    return actor.scheduler.num_steps > 0


def _next_batch(control: ControlGroup, link: Link | None, publisher: Publisher, version: int) -> Batch | None:
    """Return the batch on every rank; None at the end of the run. Publishes the current weights again when asked to."""
    while True:
        batch, body = None, None
        if link is not None:
            try:
                batch = link.next_batch(version)
                body = wire.encode(batch) if batch else b""
            except PublishAgain:
                body = PUBLISH_AGAIN
        body = control.tell(body)
        if body != PUBLISH_AGAIN:
            return batch or (wire.decode(body, Batch) if body else None)
        publisher.publish(version)


class Stopwatch:
    """Seconds between two looks at it."""

    def __init__(self) -> None:
        self._since = time.monotonic()

    def lap_s(self) -> float:
        """Return the seconds since the last lap and begin the next."""
        before, self._since = self._since, time.monotonic()
        return self._since - before


def describe(config: TrainConfig) -> str:
    """Return one line for the log: ranks and layout."""
    actor = config.actor
    return (
        f"actor: {dist.get_world_size()} ranks (tensor {actor.tensor_parallel} x pipeline {actor.pipeline_parallel} x "
        f"data {actor.data_parallel}), {actor.dtype}, method {config.algorithm.method}, model {config.model.path}"
    )
