"""Words about weights that cross process borders: controller, actor and vLLM's workers all know them. No torch."""

from dataclasses import dataclass
from pathlib import Path
from typing import Literal, TypedDict

Transfer = Literal["gloo", "nccl", "file"]

# Begins the message of a member whose group broke under it through another's fault. vLLM's routes pass an exception on as text,
# and by this text the controller tells such a member, which can be filled again, from one that must be restarted.
GROUP_BROKEN = "the weight group broke"

# Begins the message of one that cannot read a version's files, which then are of no use to others either.
FILES_UNUSABLE = "weight files cannot be used"


class Rendezvous(TypedDict):
    """Where a weight group meets; also goes to vLLM's workers, as JSON."""

    transfer: Transfer
    world_size: int  # the actor's rank 0 and all workers of the members
    store: str  # path of gloo's meeting place; others do not read it
    unique_id: str  # of nccl, base64


@dataclass(frozen=True)
class SendPlan:
    """Where and what the actor sends. Made by `publication.py`, read by `actor/publish.py`."""

    epoch: int  # the same as last time: the group of that time is used again
    rendezvous: Rendezvous
    members: list[str]  # names; none: there is nothing to send, finish
    bucket_bytes: int
    keep_in: str  # folder for the version's files, or empty
    unique_id_wanted: bool  # begin again with one (nccl)
    waited_s: float = 0.0  # that the controller held the publication back for an evaluation or older groups


@dataclass(frozen=True)
class PublicationOutcome:
    """How an attempt to publish ended. Made by `publication.py`, read by the controller and `actor/publish.py`."""

    version: int
    members: list[str]  # that serve the version now
    failed: dict[str, str]  # name -> reason, of members that were dropped
    again: bool  # not every survivor has the weights: begin the same version again


def version_folder(root: Path, version: int) -> Path:
    """Return where `version` lies below `root` once all of it is there."""
    return root / f"version_{version:06d}"
