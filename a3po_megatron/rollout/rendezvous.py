"""From the setting to a way for the weights, and from what the controller says to a member of the group. Torch only."""

import base64
from collections.abc import Mapping
from typing import Any

from a3po_megatron.config.rollout import RolloutConfig
from a3po_megatron.rollout.nccl_group import NcclGroup
from a3po_megatron.rollout.transfer_group import GlooGroup, TransferGroup
from a3po_megatron.rollout.transfer_messages import Transfer


def choose_transfer(rollout: RolloutConfig, actor_device: str) -> Transfer:
    """Return how weights travel: what the setting says; for auto nccl where actor and rollout are on GPUs, else gloo."""
    if rollout.weight_transfer == "auto":
        return "nccl" if actor_device == "cuda" and rollout.device != "cpu" else "gloo"
    return rollout.weight_transfer


def join_group(rendezvous: Mapping[str, Any], rank: int, timeout_s: float, host: str) -> TransferGroup:
    """Join as `rank` the group of `rendezvous` (transfer, world_size, and store or unique_id) and wait for the others.

    `host`: this machine's address on the interface to use (gloo). Raises GroupBroken at the deadline.
    """
    if rendezvous["transfer"] == "nccl":
        unique_id = base64.b64decode(rendezvous["unique_id"])
        return NcclGroup(unique_id, rank, rendezvous["world_size"], timeout_s)
    return GlooGroup(rendezvous["store"], rank, rendezvous["world_size"], timeout_s, host)
