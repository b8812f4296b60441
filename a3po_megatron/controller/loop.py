"""problem -> samples -> rewards -> group -> buffer -> batch -> (the actor trains) -> next version -> room for problems

    prompt source --> _start_groups --> _run_group ----------> buffer ----> next_batch ---> ACTOR
                          ^           one task a group;   groups     B groups, once          |
                          |           n samples, rewards             all are there           | gradients
                          |                 ^                                                v
                      capacity              | tokens, log-probs, versions      begin_publication, weights,
                          |                 |                                       finish_publication
                          |           ROLLOUT FLEET <---------------- weights ---------------+
                          |                 |                                                |
                          |                 +--> _evaluate_due: accuracy, while all goes on   |
                          +----------------------------- version + 1 ------------------------+

`places` says which groups go into the buffer: one without signal, or one that is late, may have to make room for another
problem's. One event loop, so no locks. The coroutines named `_...` run in the background and never wait for the actor to train,
only for `admission`; the public ones are the actor's calls, one HTTP route each. All wait through `Changes`: a
condition over the fields of `Controller`, looked at again after every change, with a deadline.
"""

import asyncio
import time
from dataclasses import replace
from functools import partial
from typing import Any, Literal

from a3po_megatron.batching.buffer import GroupBuffer
from a3po_megatron.config.controller import ControllerConfig
from a3po_megatron.controller.admission import Admission
from a3po_megatron.controller.evaluation import Evaluations
from a3po_megatron.controller.groups import RunningGroup, Straggler, batch_of, generate_group
from a3po_megatron.controller.messages import PublicationSent, StepReport, WeightManifest
from a3po_megatron.controller.parts import Parts
from a3po_megatron.controller.places import Places
from a3po_megatron.controller.publishing import Publishing, Refused
from a3po_megatron.controller.rows import StepMetrics, progress_line, sampled_metrics
from a3po_megatron.controller.snapshot import Snapshot, copy_unfinished
from a3po_megatron.controller.waiting import Changes
from a3po_megatron.records import Batch, Group
from a3po_megatron.reward.base import shuffled_rewards
from a3po_megatron.rollout.client import PartialGeneration
from a3po_megatron.rollout.transfer_messages import PublicationOutcome, SendPlan

PUBLISH_AGAIN: Literal["publish again"] = "publish again"


class RunOver(Exception):
    """There will be no more batches."""


class Controller:
    """The state of one run and the loops over it."""

    def __init__(self, config: ControllerConfig, num_steps: int, seed: int, parts: Parts) -> None:
        self.config, self.num_steps, self.seed, self.parts = config, num_steps, seed, parts
        self.admission = Admission(
            config.schedule, config.max_staleness, config.prompts_per_batch, config.max_concurrent_groups, num_steps
        )
        self.places = Places(config, parts.advantage, num_steps)
        self.changes = Changes()
        self.buffer = GroupBuffer(config.prompts_per_batch, in_order=config.schedule == "lockstep")
        self.running: dict[int, RunningGroup] = {}  # by place
        self.accepted = 0  # finished groups that kept their places, ever
        self.version = 0  # of the weights that the fleet serves
        self.publishing = Publishing(config, parts)
        self.evaluations = Evaluations(config, num_steps, seed, parts)
        self.last_row: dict[str, Any] = {}
        self.replica_seen = False
        self.done_reason: str | None = None
        self._group_tasks: set[asyncio.Task[None]] = set()
        self._handed_out: tuple[int, Batch] | None = None  # (version, the batch that is trained at it)
        self._actor_calls = 0  # in progress
        self._actor_signs = 0  # of life: starts and ends of its calls
        self._step_metrics = StepMetrics(time.monotonic())

    # Background

    async def run(self) -> None:
        """Run all loops until the actor is done and the last weights are evaluated.

        An exception in any of them cancels the others and is raised here, inside an ExceptionGroup.
        """
        async with asyncio.TaskGroup() as background:
            generation = background.create_task(self._start_groups(background), name="start groups")
            background.create_task(self._evaluate_due(), name="evaluate")
            await self._actor_done()
            for task in (generation, *self._group_tasks):
                task.cancel()

    async def _start_groups(self, background: asyncio.TaskGroup) -> None:
        """Problems -> group tasks.

        Consumes draws of the prompt source. Produces one `_run_group` task a draw. Waits for the first replica, then
        for capacity. Woken by a registered replica, a finished group, a new version.
        """
        await self.changes.until(
            lambda: self.replica_seen,
            self.config.first_replica_timeout_s,
            lambda: "the first rollout replica to register; the rollout log says what it is doing",
        )
        while not self._all_accepted():
            await self.changes.until(
                lambda: self._capacity() > 0 or self._all_accepted(),
                self.config.actor_timeout_s + self.config.group_timeout_s,
                lambda: f"room for a group: {self.accepted} finished, {len(self.running)} run, version {self.version}",
            )
            for _ in range(self._capacity()):
                draw = self.parts.source.draw()
                responses = tuple(PartialGeneration() for _ in range(self.config.samples_per_prompt))
                group = RunningGroup(self.places.start(), draw, responses)
                self.running[group.place] = group
                task = background.create_task(self._run_group(group), name=f"draw {draw.index}")
                self._group_tasks.add(task)
                task.add_done_callback(self._group_tasks.discard)
            self._step_metrics.generation(time.monotonic(), running=True)

    async def _run_group(self, group: RunningGroup) -> None:
        """Samples -> rewards -> buffer, for one group.

        Consumes one draw. Produces one Group in the buffer, or a place to fill again: `places` decides. Waits for the
        fleet, at most `group_timeout_s`. Woken by its own responses.
        """
        parts = self.parts
        outcome: Group | Straggler
        try:
            outcome = await generate_group(
                group, parts.fleet, parts.sampling, self.seed, parts.reward, self.config.group_timeout_s
            )
        except Straggler as straggler:
            outcome = straggler
        del self.running[group.place]
        for place, finished in self.places.finish(group.place, outcome):
            self.accepted += 1
            self.buffer.put(place, finished)
        num_tokens = sum(len(response.token_ids) for response in group.responses)
        self._step_metrics.generation(time.monotonic(), bool(self.running), num_tokens)
        self.changes.notify()

    async def _evaluate_due(self) -> None:
        """Held-out problems -> accuracy of the live fleet.

        Consumes held-out problems. Produces a line of evals.jsonl. Waits for a version that is due. Woken by a
        registered replica, a new version, the end of the run. Training and generation go on meanwhile.
        """
        while True:
            await self.changes.until(
                lambda: self.done_reason is not None or self._evaluation_due(), None, lambda: "a version to evaluate"
            )
            if not self._evaluation_due():
                return
            await self.evaluations.evaluate(self.version)
            self.changes.notify()

    async def _actor_done(self) -> None:
        """Waits for the actor's last call. Woken by each of its calls, which starts the deadline anew."""
        while self.done_reason is None:
            signs = self._actor_signs
            await self.changes.until(
                lambda signs=signs: self._actor_signs != signs,  # type: ignore[misc]
                None if self._actor_calls else self.config.actor_timeout_s,  # a call has its own deadline
                lambda: f"the actor's next call at version {self.version}; the actor log says what it is doing",
            )

    # The actor's calls

    def actor_calls(self, change: int) -> None:
        """A call of the actor began (+1) or ended (-1)."""
        self._actor_calls += change
        self._actor_signs += 1
        self.changes.notify()

    async def next_batch(self, version: int) -> Batch | Literal["publish again"] | None:
        """Return the batch to train at `version`; None if it is not there after `poll_s`: ask again.

        PUBLISH_AGAIN when every replica was restarted and waits for the weights of `version`.
        Asking again after the batch was handed out returns the same one. Woken by a finished group. Raises RunOver
        after the last batch, Refused for another version than the fleet's.
        """
        if self.done_reason is not None or version >= self.num_steps:
            raise RunOver(f"the run is over after {self.num_steps} steps")
        if version != self.version:
            raise Refused(f"a batch for version {version}: the fleet serves version {self.version}")
        if self._handed_out is None or self._handed_out[0] != version:
            try:
                await self.changes.until(
                    lambda: self.done_reason is not None or self.buffer.ready(), self.config.poll_s, lambda: "a batch"
                )
            except TimeoutError:
                return PUBLISH_AGAIN if self.publishing.is_lost() else None
            if self.done_reason is not None:
                raise RunOver(f"the run is over: {self.done_reason}")
            if self._handed_out is None or self._handed_out[0] != version:  # else another poll was faster
                return await self._make_batch(version)
        return self._handed_out[1]

    async def _make_batch(self, version: int) -> Batch:
        groups = self.buffer.take()
        reshuffle = (
            partial(shuffled_rewards, seed=self.seed, batch_index=version) if self.parts.shuffle_rewards else None
        )
        batch = batch_of(groups, self.parts.advantage, reshuffle)
        metrics = sampled_metrics(batch, version, self.config.max_staleness, self.config.samples_per_prompt)
        now = time.monotonic()
        self._step_metrics.handed_out(now, metrics)
        self._handed_out = version, batch
        self.changes.notify()
        reasons = [reason for group in groups for reason in group.reasons]
        await asyncio.to_thread(self.parts.files.write_samples, batch, version, reasons)  # token streams go on
        return batch

    async def begin_publication(self, manifest: WeightManifest) -> SendPlan:
        """Make the fleet ready to receive the weights of the next version; return whom to send them to.

        Also those of the same version once more: when the last attempt broke off, or every replica was restarted.
        Waits for an evaluation that must have one version and, in lockstep, for every group that must come from the
        version that is replaced: `waited_s` of the answer. Woken by a finished group, an evaluation. Raises Refused for any
        other version.
        """
        if self.publishing.repeats(manifest.version, self.version):
            return await self.publishing.begin(manifest)
        began = time.monotonic()
        self._step_metrics.training_ended(began)
        await self._version_may_go()
        waited_s = time.monotonic() - began
        return replace(await self.publishing.begin(manifest), waited_s=waited_s)

    async def _version_may_go(self) -> None:
        """Wait for what must come from the live version; when no replica can get it any more, for nothing.

        The actor has trained on: it cannot publish that version again. An evaluation then goes on with the next one, and says so;
        lockstep is refused.
        """
        fleet = self.parts.fleet
        await self.changes.until(
            lambda: fleet.needs_publication or not self.evaluations.hold_publication(self.version),
            self.config.evaluation_timeout_s,
            lambda: f"the evaluation of version {self.version}",
        )
        await self.changes.until(
            lambda: fleet.needs_publication or self._groups_before(self.version + 1) == 0,
            self.config.publication_timeout_s,
            lambda: f"{self._groups_before(self.version + 1)} groups by version {self.version}",
        )
        if fleet.needs_publication and (lacking := self._groups_before(self.version + 1)):
            raise Refused(
                f"{lacking} groups must come from version {self.version} (controller.schedule=lockstep), which every replica "
                "has lost and no file holds; rollout.keep_published=true keeps it"
            )

    async def finish_publication(self, sent: PublicationSent) -> PublicationOutcome:
        """Make the version the run's once the fleet serves it.

        Waits for the replicas. Raises Refused if this publication was not begun.
        """
        outcome = await self.publishing.finish(sent, self.version)
        if not outcome.again:
            self.version = sent.version
            self.changes.notify()
        return outcome

    async def report_step(self, report: StepReport) -> None:
        """Write the step's row: the actor's metrics, the controller's, and an evaluation that ended since the last row.

        Raises Refused for any step but that of the batch that was handed out last.
        """
        if self._handed_out is None or self._handed_out[0] != report.version:
            raise Refused(f"a report of step {report.step}: the batch of version {report.version} was not the last one")
        now = time.monotonic()
        row = {"step": report.step, "version": report.version, **self._step_metrics.row(now)}
        self.last_row = {**row, **self.places.row(), **self.evaluations.new_metrics(), **report.metrics}
        self.parts.files.write_row(self.last_row)
        self.parts.say(progress_line(self.last_row, self.num_steps, self._step_metrics.elapsed_s(now)))

    def actor_is_done(self, reason: str) -> None:
        """End the run: what still runs is cancelled, the live version is evaluated."""
        self.done_reason = reason
        self._actor_signs += 1
        self.changes.notify()

    # For everybody

    def replica_registered(self, current: bool) -> None:
        """A supervisor told of a replica, for the first time or as a heartbeat; with a `current` one generation may begin."""
        self.replica_seen = self.replica_seen or current
        self.changes.notify()

    def snapshot(self) -> Snapshot:
        """Return what is needed to go on: cursor, buffer, and the tokens that unfinished responses have so far."""
        return Snapshot(
            self.version,
            self.buffer.num_taken,
            self.parts.source.state(),
            tuple(self.buffer.items()),
            copy_unfinished(self.running.values()),
            self.places.state(),
        )

    def _capacity(self) -> int:
        admitted = self.admission.capacity(self.version, self.accepted, len(self.running))
        return min(admitted, self.places.startable())

    def _all_accepted(self) -> bool:
        return self.accepted == self.num_steps * self.config.prompts_per_batch

    def _groups_before(self, next_version: int) -> int:
        return self.admission.groups_before_publication(next_version, self.accepted)

    def _evaluation_due(self) -> bool:
        ready = self.replica_seen and not self.publishing.under_way
        return ready and self.evaluations.due(self.version, is_last=self.done_reason is not None)
