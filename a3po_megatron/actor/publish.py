"""New weights on their way to the rollout fleet: one tensor gathered at a time, one bucket sent at a time.

    rank 0   begin_publication -> join group | gather, pack, broadcast ... | finish_publication -> again, or done
    others           (wait)                  | gather ...                  |       (wait)

`Actor.export_weights` gathers over tensor, expert and pipeline ranks, so every rank walks through it; only rank 0 talks to the
controller and is in the weight group. A model with a tied head sends its embedding once; the servers tie it themselves.
"""

import base64
from dataclasses import replace
from pathlib import Path
from typing import Protocol

from a3po_megatron.actor.actor import Actor
from a3po_megatron.actor.control import ControlGroup
from a3po_megatron.actor.hf_mapping import hf_shapes
from a3po_megatron.config.rollout import RolloutConfig
from a3po_megatron.controller.link import ControllerError
from a3po_megatron.controller.messages import PublicationSent, WeightManifest
from a3po_megatron.rollout.buckets import TensorSpec, manifest_of
from a3po_megatron.rollout.nccl_group import new_unique_id
from a3po_megatron.rollout.rendezvous import choose_transfer, join_group
from a3po_megatron.rollout.transfer_group import SENDER_RANK, GroupBroken
from a3po_megatron.rollout.transfer_messages import PublicationOutcome, SendPlan
from a3po_megatron.rollout.weight_sender import Sent, WeightSender

SEND = b"send"  # rank 0's word to the others: walk through the export


class NotPublishable(RuntimeError):
    """The weights could not be sent and sending again is of no use; one line that says why."""


class PublicationLink(Protocol):
    """The part of `controller/link.py` that a publication needs."""

    def begin_publication(self, manifest: WeightManifest) -> SendPlan:
        """Pause the fleet; return whom to send to."""

    def finish_publication(self, message: PublicationSent) -> PublicationOutcome:
        """Wait until the fleet serves the version and resume it, or answer `again`."""


class Publisher:
    """Publishes the actor's weights, over one weight group for as long as the fleet's membership stays."""

    def __init__(
        self, actor: Actor, control: ControlGroup, rollout: RolloutConfig, link: PublicationLink | None
    ) -> None:
        """`link` on rank 0, None on the others."""
        self._actor, self._control, self._rollout, self._link = actor, control, rollout, link
        dtype = actor.settings.dtype
        self._specs = tuple(TensorSpec(name, dtype, shape) for name, shape in hf_shapes(actor.shape).items())
        self._transfer = choose_transfer(rollout, actor.device.type)
        self._sender: WeightSender | None = None
        self._epoch: int | None = None

    def publish(self, version: int) -> float:
        """Bring the fleet to the current weights under the name `version`. Collective.

        Sends again as long as the controller asks for it. Returns, on rank 0, the seconds that the controller waited for an
        evaluation or older groups first. Raises NotPublishable or ControllerError on rank 0; the others wait for
        a word.
        """
        if self._link is None:
            while self._control.tell(None) == SEND:  # the others wait here for the controller
                for _ in self._actor.export_weights(to_first_rank=True):
                    pass
            return 0.0
        waited_s, again = 0.0, True
        while again:
            plan = self._begin(version)
            waited_s += plan.waited_s
            sent = self._attempt(version, plan)
            if sent.keep_error:
                self._say_not_kept(version, sent.keep_error)
            message = PublicationSent(version, sent.error, sent.kept)
            outcome = self._finish(message)
            for name, reason in outcome.failed.items():
                print(f"actor: version {version} did not reach replica {name}: {reason}", flush=True)
            again = outcome.again
        self._control.tell(b"")
        return waited_s

    def close(self) -> None:
        """Leave the weight group."""
        if self._sender:
            self._sender.close()
        self._sender = self._epoch = None

    def _begin(self, version: int) -> SendPlan:
        assert self._link is not None
        lists = manifest_of(self._specs)
        manifest = WeightManifest(version, lists["names"], lists["dtypes"], lists["shapes"], transfer=self._transfer)
        plan = self._link.begin_publication(manifest)
        if plan.unique_id_wanted:
            manifest.unique_id = base64.b64encode(new_unique_id()).decode()
            plan = replace(self._link.begin_publication(manifest), waited_s=plan.waited_s)
        return plan

    def _finish(self, message: PublicationSent) -> PublicationOutcome:
        assert self._link is not None
        try:
            return self._link.finish_publication(message)
        except ControllerError as known:  # it hears from the receivers
            if not message.error:
                raise
            raise NotPublishable(f"publication of version {message.version}: {message.error}; {known}") from known

    def _attempt(self, version: int, plan: SendPlan) -> Sent:
        """Join the group if it is new, and send."""
        if not plan.members:
            return Sent()  # whoever lacked the weights has died meanwhile
        try:
            self._join(plan)
        except GroupBroken as error:
            return Sent(error=str(error))
        self._control.tell(SEND)
        assert self._sender is not None
        keep_in = Path(plan.keep_in) if plan.keep_in else None
        stream = self._actor.export_weights(to_first_rank=True, room=self._sender.room)
        sent = self._sender.send(self._specs, stream, version, plan.bucket_bytes, keep_in)
        if sent.error:
            self.close()
        return sent

    def _join(self, plan: SendPlan) -> None:
        """Be in the group of the plan's epoch; one sender without a group serves for files."""
        if self._transfer == "file":
            self._sender = self._sender or WeightSender(None)
        elif self._sender is None or plan.epoch != self._epoch:
            self.close()
            group = join_group(
                plan.rendezvous, SENDER_RANK, self._rollout.transfer_timeout_s, self._actor.settings.host
            )
            self._sender, self._epoch = WeightSender(group), plan.epoch

    def _say_not_kept(self, version: int, reason: str) -> None:
        if self._transfer == "file":
            raise NotPublishable(f"version {version} could not be written (rollout.weight_transfer=file): {reason}")
        print(
            f"actor: version {version} is not kept as files ({reason}): a replica that restarts waits for the next one",
            flush=True,
        )
