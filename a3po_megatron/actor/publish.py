"""New weights on their way to the rollout fleet: one tensor gathered at a time, one bucket sent at a time.

    rank 0   begin_publication -> | join group | gather, pack, broadcast ... checksum | finish_publication
    others           (wait)       |            | gather ...                           |

`Actor.export_weights` gathers over tensor and pipeline ranks, so every rank walks through it; only rank 0 talks to the
controller and is in the weight group. A model with a tied head sends its embedding once; the servers tie it themselves.
"""

import time
from typing import Any, Protocol

from a3po_megatron.actor.actor import Actor
from a3po_megatron.actor.control import ControlGroup
from a3po_megatron.actor.hf_mapping import hf_shapes
from a3po_megatron.config.schema import RolloutConfig
from a3po_megatron.controller.link import ControllerError
from a3po_megatron.controller.messages import WeightManifest
from a3po_megatron.rollout.buckets import TensorSpec, manifest_of
from a3po_megatron.rollout.weight_sender import WeightSender


class PublicationError(RuntimeError):
    """The weights did not reach the fleet; one line that says where it stopped and what the controller knows."""


class PublicationLink(Protocol):
    """The part of `controller/link.py` that a publication needs."""

    def begin_publication(self, manifest: WeightManifest) -> dict[str, Any]:
        """Pause the fleet; return whom to send to."""

    def finish_publication(self, version: int, time_s: float, num_bytes: int) -> dict[str, Any]:
        """Wait until the fleet serves the version and resume it."""


class Publisher:
    """Publishes the actor's weights, over one weight group for as long as the fleet's membership stays."""

    def __init__(
        self, actor: Actor, control: ControlGroup, rollout: RolloutConfig, link: PublicationLink | None
    ) -> None:
        """`link` on rank 0, None on the others."""
        self._actor, self._control, self._rollout, self._link = actor, control, rollout, link
        dtype = actor.settings.dtype
        self._specs = tuple(TensorSpec(name, dtype, shape) for name, shape in hf_shapes(actor.shape).items())
        self._sender: WeightSender | None = None
        self._epoch: int | None = None

    def publish(self, version: int) -> float:
        """Bring the fleet to the current weights under the name `version`. Collective.

        Returns, on rank 0, the seconds that the controller waited for an evaluation or older groups first. Raises
        PublicationError or ControllerError on rank 0, which ends the other ranks too.
        """
        plan = self._begin(version) if self._link else None
        self._control.tell(b"" if self._link else None)  # the others wait here for the controller
        if plan is None:
            for _ in self._actor.export_weights():
                pass
            return 0.0
        self._send(version, plan)
        return float(plan["waited_s"])

    def close(self) -> None:
        """Leave the weight group."""
        if self._sender:
            self._sender.close()
        self._sender = self._epoch = None

    def _begin(self, version: int) -> dict[str, Any]:
        assert self._link is not None
        lists = manifest_of(self._specs)
        manifest = WeightManifest(version, lists["names"], lists["dtypes"], lists["shapes"])
        plan = self._link.begin_publication(manifest)
        if plan["epoch"] != self._epoch:
            self.close()
            rendezvous = plan["rendezvous"]
            try:
                self._sender = WeightSender(
                    rendezvous["store"],
                    rendezvous["world_size"],
                    self._rollout.transfer_timeout_s,
                    self._actor.settings.host,
                )
            except RuntimeError as error:
                raise self._failure(version, error) from error
            self._epoch = plan["epoch"]
        return plan

    def _send(self, version: int, plan: dict[str, Any]) -> None:
        assert self._link is not None
        assert self._sender is not None
        began = time.monotonic()
        try:
            num_bytes = self._sender.send(self._specs, self._actor.export_weights(), version, plan["bucket_bytes"])
        except RuntimeError as error:
            self.close()
            raise self._failure(version, error) from error
        outcome = self._link.finish_publication(version, time.monotonic() - began, num_bytes)
        for name, reason in outcome["failed"].items():
            print(f"actor: version {version} did not reach replica {name}: {reason}", flush=True)

    def _failure(self, version: int, error: RuntimeError) -> PublicationError:
        """Return `error` with what the controller, which hears from the receivers, knows about it."""
        assert self._link is not None
        try:
            self._link.finish_publication(version, 0.0, 0)
            reason = "the controller knows of no failed replica"
        except ControllerError as known:
            reason = str(known)
        text = " ".join(str(error).split())
        return PublicationError(f"publication of version {version}: {text}; {reason}")
