"""Bodies of the controller's routes, as msgpack maps; one struct a route, shared by both ends."""

from typing import Literal

import msgspec


class RegisterReplica(msgspec.Struct, forbid_unknown_fields=True):
    """POST /replicas/register, by a supervisor, once the server has answered a real generation."""

    name: str
    url: str
    world_size: int  # worker ranks that receive weights


class DeregisterReplica(msgspec.Struct, forbid_unknown_fields=True):
    """POST /replicas/deregister, by a supervisor whose server died."""

    name: str
    reason: str


class BatchRequest(msgspec.Struct, forbid_unknown_fields=True):
    """POST /batch, by the actor's rank 0. Answer: 200 a Batch, 204 none yet, 205 publish this version again,
    410 the run is over."""

    version: int  # of the actor's weights, at which the batch will be trained


class WeightManifest(msgspec.Struct, forbid_unknown_fields=True):
    """POST /publish/begin: every tensor in the order in which it will be sent. Answer: the group to send to."""

    version: int  # that the weights will have
    names: list[str]
    dtypes: list[str]
    shapes: list[list[int]]
    transfer: Literal["gloo", "nccl", "file"] = "gloo"
    unique_id: str = ""  # base64 of a fresh ncclUniqueId, once the answer has asked for one


class PublicationSent(msgspec.Struct, forbid_unknown_fields=True):
    """POST /publish/finish: all is sent, or could not be; the answer comes when every replica serves `version`."""

    version: int
    error: str = ""  # why it could not be sent
    kept: bool = False  # whether it lies as files where the answer to /publish/begin said


class StepReport(msgspec.Struct, forbid_unknown_fields=True):
    """POST /step: the actor's part of a row of metrics.jsonl."""

    step: int
    version: int  # at which the batch of this step was trained
    metrics: dict[str, float | int | None]


class RunDone(msgspec.Struct, forbid_unknown_fields=True):
    """POST /done: the actor will not ask for another batch."""

    reason: str
