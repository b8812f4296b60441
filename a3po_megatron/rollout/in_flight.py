"""What becomes of a replica's requests when new weights come: `rollout.in_flight`.

    continue   they stop where they are and go on with the new weights; their cached keys and values are rebuilt from the
               tokens (kv_on_update=rebuild: every span is exactly its version's) or kept (keep: cheaper, and the
               log-probabilities are still those that the tokens were drawn with, but of a mixture of versions)
    abort      they end, and the fleet asks for the rest of each as a new request: as exact as rebuild
    drain      nothing new is sent and what runs may end, for at most `drain_timeout_s`; the rest is aborted as above

No policy ever reuses a prompt that older weights read: caches are emptied, or keyed by the version (`cache_salt`).
"""

import asyncio
import contextlib

from a3po_megatron.config.rollout import RolloutConfig
from a3po_megatron.rollout.replicas import Replica


async def stop_for_update(replica: Replica, config: RolloutConfig) -> None:
    """Let `replica` take no new requests and bring it to rest. Raises ReplicaError."""
    replica.held = True
    replica.times_held += 1
    if config.in_flight == "continue":
        await replica.client.pause("keep", clear_cache=config.kv_on_update == "rebuild")
        return
    if config.in_flight == "drain":
        with contextlib.suppress(TimeoutError):  # what still runs is aborted: `interrupted` in the status counts it
            async with asyncio.timeout(config.drain_timeout_s):
                await replica.idle.wait()
    await replica.client.pause("abort", clear_cache=True)


async def go_on(replica: Replica) -> None:
    """Let `replica` generate and take requests again. Raises ReplicaError."""
    await replica.client.resume()
    replica.held = False
