"""The actor's end: plain blocking calls to the controller, made by rank 0 only. No torch.

while (batch := link.next_batch(version)) is not None:
    ... train ...
    plan = link.begin_publication(manifest)     # replicas pause
    ... send the weights to plan.members ...
    outcome = link.finish_publication(messages.PublicationSent(version + 1))   # outcome.again: repeat
    link.report_step(step, version, metrics)
    version += 1
link.done("finished")
"""

import time
from types import TracebackType
from typing import Self

import httpx
import msgspec

from a3po_megatron import wire
from a3po_megatron.config.address import url_of
from a3po_megatron.config.controller import ControllerConfig
from a3po_megatron.controller import messages
from a3po_megatron.records import Batch
from a3po_megatron.rollout.transfer_messages import PublicationOutcome, SendPlan

SLACK_S = 30.0  # what an answer may take beyond the wait that the controller itself ends
RETRY_S = 0.2


class ControllerError(RuntimeError):
    """The controller refused, failed or is gone; one line that says which call and why."""


class PublishAgain(Exception):
    """No replica has the current weights; the run can go on once they are published again."""


class ActorLink:
    """One connection, kept open. Every call has a deadline and raises ControllerError when it passes."""

    def __init__(
        self,
        config: ControllerConfig,
        token: str,
        *,
        connect_timeout_s: float = 120.0,
        client: httpx.Client | None = None,
    ) -> None:
        """`connect_timeout_s`: how long the first call waits for a controller that is still starting."""
        self._config = config
        self._where = url_of(config.host, config.port)
        self._client = client or httpx.Client(base_url=self._where, trust_env=False)
        self._client.headers["Authorization"] = f"Bearer {token}"
        self._may_connect_until: float | None = time.monotonic() + connect_timeout_s

    def next_batch(self, version: int) -> Batch | None:
        """Return the batch to train at `version`, or None when the run is over. Waits up to `batch_timeout_s`.

        Raises PublishAgain when the fleet needs the weights of `version` first.
        """
        deadline = time.monotonic() + self._config.batch_timeout_s
        while time.monotonic() < deadline:
            answer = self._post(
                "/batch", messages.BatchRequest(version), self._config.poll_s, accept=(200, 204, 205, 410)
            )
            if answer.status_code == 410:
                return None
            if answer.status_code == 205:
                raise PublishAgain
            if answer.status_code == 200:
                return wire.decode(answer.content, Batch)
        raise ControllerError(
            f"waited {self._config.batch_timeout_s:g} s (controller.batch_timeout_s) for the batch of version "
            f"{version}; the controller log says what it waits for"
        )

    def begin_publication(self, manifest: messages.WeightManifest) -> SendPlan:
        """Return whom to send `manifest`'s tensors to: see `rollout/publication.py`."""
        waits_s = self._config.evaluation_timeout_s + 2 * self._config.publication_timeout_s
        answer = self._post("/publish/begin", manifest, waits_s)
        return wire.decode(answer.content, SendPlan)

    def finish_publication(self, message: messages.PublicationSent) -> PublicationOutcome:
        """Return when the fleet serves the version, or wants it `again`."""
        answer = self._post("/publish/finish", message, self._config.publication_timeout_s)
        return wire.decode(answer.content, PublicationOutcome)

    def report_step(self, step: int, version: int, metrics: dict[str, float | int | None]) -> None:
        """Hand over the actor's part of a row; `version` is the one at which the step's batch was trained."""
        self._post("/step", messages.StepReport(step, version, metrics), self._config.evaluation_timeout_s)

    def done(self, reason: str) -> None:
        """Tell that no more batches will be asked for; the controller evaluates the last weights and ends."""
        self._post("/done", messages.RunDone(reason), SLACK_S)

    def close(self) -> None:
        """Close the connection."""
        self._client.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _post(
        self, path: str, message: msgspec.Struct, server_wait_s: float, accept: tuple[int, ...] = (200,)
    ) -> httpx.Response:
        timeout = httpx.Timeout(server_wait_s + SLACK_S, connect=SLACK_S)
        body, headers = wire.encode(message), {"Content-Type": "application/msgpack"}
        while True:
            try:
                answer = self._client.post(path, content=body, headers=headers, timeout=timeout)
                break
            except httpx.ConnectError as error:
                if self._may_connect_until is None or time.monotonic() > self._may_connect_until:
                    raise ControllerError(f"{path}: no controller answers at {self._where}: {error}") from None
                time.sleep(RETRY_S)
            except httpx.TimeoutException:
                raise ControllerError(f"{path}: no answer within {timeout.read:g} s from {self._where}") from None
            except httpx.TransportError as error:
                reason = f"{type(error).__name__} {error}".strip()
                raise ControllerError(f"{path}: the controller at {self._where} went away: {reason}") from None
        self._may_connect_until = None
        if answer.status_code not in accept:
            raise ControllerError(f"{path}: {answer.status_code}: {_reason(answer)}")
        return answer


def _reason(answer: httpx.Response) -> str:
    try:
        return msgspec.json.decode(answer.content, type=dict[str, str])["error"]
    except (msgspec.DecodeError, KeyError):
        return answer.text[:300]
