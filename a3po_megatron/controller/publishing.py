"""The publications of a run: which one may begin, which goes on, which is to be repeated. `loop.py` says when."""

import asyncio
from typing import Any

from a3po_megatron.config.controller import ControllerConfig
from a3po_megatron.controller.messages import PublicationSent, WeightManifest
from a3po_megatron.controller.parts import Parts
from a3po_megatron.rollout.transfer_messages import PublicationOutcome, SendPlan


class Refused(Exception):
    """A call that does not fit the state of the run; one line that says why."""


class Publishing:
    """At most one publication at a time: of the version after the live one, or of the live one once more."""

    def __init__(self, config: ControllerConfig, parts: Parts) -> None:
        self._config, self._parts = config, parts
        self.under_way = False
        self._lost = False  # the actor was asked to publish the live version again
        self._sends_again = False  # a member died on the way; the actor begins the publication under way once more

    def is_lost(self) -> bool:
        """Whether the actor must publish the live version again. Once said it stays said until that is done."""
        self._lost = self._lost or self._parts.fleet.needs_publication
        return self._lost

    def repeats(self, version: int, live: int) -> bool:
        """Whether `version` is one to repeat, at once. Raises Refused unless it is that or the one after `live`."""
        if self._sends_again or (version == live and self.is_lost()):
            return True
        if self.under_way or version != live + 1:
            state = f"is being replaced by version {live + 1}" if self.under_way else "is live"
            raise Refused(f"publication of version {version}: version {live} {state}")
        return False

    async def begin(self, manifest: WeightManifest) -> SendPlan:
        """Make the fleet ready to receive; return whom to send to."""
        self.under_way = True
        fields: dict[str, list[Any]] = {"names": manifest.names, "dtypes": manifest.dtypes, "shapes": manifest.shapes}
        fleet = self._parts.fleet
        plan = await fleet.begin_publication(manifest.version, fields, manifest.transfer, manifest.unique_id)
        self._sends_again = plan.unique_id_wanted
        return plan

    async def finish(self, sent: PublicationSent, live: int) -> PublicationOutcome:
        """Wait until the fleet serves the version, or wants it `again`. Raises Refused if it was not begun."""
        version = sent.version
        if not self.under_way or version not in (live, live + 1):
            raise Refused(f"the end of the publication of version {version}, which was not begun")
        limit_s = self._config.publication_timeout_s
        try:
            async with asyncio.timeout(limit_s):
                outcome = await self._parts.fleet.finish_publication(version, sent.error, sent.kept)
        except TimeoutError:
            raise TimeoutError(
                f"waited {limit_s:g} s (controller.publication_timeout_s) for the replicas to finish version {version}"
            ) from None
        for name, reason in outcome.failed.items():
            self._parts.say(f"version {version} did not reach replica {name}, which was dropped: {reason}")
        self._sends_again = outcome.again
        if self._sends_again:
            reason = sent.error or "a member of the weight group failed"
            self._parts.say(f"version {version} is sent again to the replicas that lack it: {reason}")
        else:
            self.under_way = self._lost = False
        return outcome
