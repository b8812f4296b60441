"""Watches one replica: is it alive, does it get on, and how many requests does it sustain.

A connection that breaks tells of a dead server. A hung one tells nothing: its process may be stopped, or its engine may be
stuck while its HTTP server answers every question. So the fleet asks each replica every `heartbeat_s` for its counters.
"""

import asyncio
import time
from collections.abc import Callable

from a3po_megatron.config.rollout import RolloutConfig
from a3po_megatron.rollout.control import ReplicaError
from a3po_megatron.rollout.messages import Load
from a3po_megatron.rollout.replicas import Replica


async def watch(replica: Replica, config: RolloutConfig, more_room: Callable[[], None]) -> str:
    """Look after `replica` until it is ill or dropped and return the reason. Calls `more_room` when it may take more requests."""
    before: Load | None = None
    looked_at, still_s = time.monotonic(), 0.0
    while not replica.failed.is_set():
        await asyncio.sleep(config.heartbeat_s)
        if replica.held:  # it generates nothing on purpose, and its calls have deadlines of their own
            before = None
            continue
        try:
            load = await replica.client.load(config.stall_timeout_s)
        except ReplicaError as error:
            return str(error)
        if replica.held:
            continue
        # Two looks far apart say that this process was stopped, perhaps with all the machine: no sign against the replica.
        since_s = min(time.monotonic() - looked_at, 2 * config.heartbeat_s)
        looked_at = time.monotonic()
        gets_on = before is None or load.tokens != before.tokens or load.running + load.waiting == 0
        still_s = 0.0 if gets_on else still_s + since_s
        if still_s > config.stall_timeout_s:
            return (
                f"replica {replica.client.name} at {replica.client.url} has read and written no token for "
                f"{still_s:.0f} s (rollout.stall_timeout_s={config.stall_timeout_s:g}), though "
                f"{load.running} requests run and {load.waiting} wait in it"
            )
        if before is not None:
            limit = adapted_limit(replica.limit, replica.running, before, load, config.max_num_seqs)
            grows, replica.limit = limit > replica.limit, limit
            if grows:
                more_room()
        before = load
    return replica.dropped_for


def adapted_limit(limit: int, given: int, before: Load, load: Load, max_num_seqs: int) -> int:
    """Return how many requests a replica may have at once: additive increase, multiplicative decrease.

    Requests that wait inside the server gain nothing and could run elsewhere; a few must wait, so that a finished
    sequence is replaced at once. So the limit falls by a fifth when more than a quarter as many wait as run and they do
    not get fewer (after an update all read their tokens again, which is no overload), or when sequences were thrown out
    of a full cache. It rises by a sixteenth of max_num_seqs when all places (`given` of `limit`) are taken and few wait.
    It stays within 1 and `highest_limit`.
    """
    many_wait = load.waiting > max(1, load.running // 4)
    if load.preemptions > before.preemptions or (many_wait and load.waiting >= before.waiting):
        return max(1, min(limit - 1, max(load.running, limit * 4 // 5)))
    if given >= limit and not many_wait:
        return min(highest_limit(max_num_seqs), limit + max(1, max_num_seqs // 16))
    return limit


def highest_limit(max_num_seqs: int) -> int:
    """Return the most requests that a replica is ever given: a quarter more than run at once."""
    return max_num_seqs + max(1, max_num_seqs // 4)
