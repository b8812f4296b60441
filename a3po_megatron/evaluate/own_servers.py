"""vLLM servers for one evaluation: started, watched and restarted by the supervisor that a run's nodes have, ended with it.

    supervisor --register--> fleet <--generate-- evaluation          all in this process; the servers are its children

Ctrl-C, SIGTERM, a failing server and a failing evaluation all lead to the same ending: no server is left.
"""

import asyncio
import signal
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path

from a3po_megatron.config.rollout import RolloutConfig
from a3po_megatron.rollout.fleet import Fleet
from a3po_megatron.rollout.generator import Generator
from a3po_megatron.rollout.server_args import server_device
from a3po_megatron.rollout.supervisor import Supervisor


class EvaluationStopped(Exception):
    """A signal ended the evaluation."""

    def __init__(self, number: signal.Signals) -> None:
        super().__init__(f"stopped by {number.name}; the servers have been ended")
        self.exit_code = 128 + number


@dataclass
class FleetLink:
    """The supervisor's way to a fleet in its own process."""

    fleet: Fleet
    serves: asyncio.Event = field(default_factory=asyncio.Event)  # set once a server has registered
    url: str = "this process"
    silent_for_s: float = 0.0

    async def register(self, name: str, url: str, world_size: int) -> str | None:
        """Add a server; the answer is why, if it was dropped."""
        answer = await self.fleet.register(name, url, world_size)
        self.serves.set()
        return answer["reason"] if answer["state"] == "fenced" else None

    async def deregister(self, name: str, reason: str) -> None:
        """Drop a server."""
        await self.fleet.deregister(name, reason)

    async def aclose(self) -> None:
        """Nothing is open."""


async def with_own_servers[T](
    config: RolloutConfig,
    model: Path,
    token: str,
    vocab_size: int,
    seed: int,
    log_dir: Path,
    say: Callable[[str], None],
    work: Callable[[Generator], Awaitable[T]],
) -> T:
    """Start the servers of `config`, do `work` with them as soon as one generates, end them, return what `work` returned.

    `token`: the secret of these servers. Raises EvaluationStopped after a signal, SupervisorFailed or UserError when the servers
    cannot serve, and what `work` raises.
    """
    fleet = Fleet(config, token, log_dir / "rendezvous", vocab_size=vocab_size)  # no weights are ever published
    link = FleetLink(fleet)
    supervisor = Supervisor(config, str(model), seed, token, link, log_dir, "local", server_device(config), say)

    async def work_with_servers() -> T:
        await link.serves.wait()
        return await work(fleet)

    serving, working = asyncio.create_task(supervisor.run()), asyncio.create_task(work_with_servers())
    try:
        await asyncio.wait((serving, working), return_when=asyncio.FIRST_COMPLETED)
        if working.done():
            return working.result()
        raise EvaluationStopped(serving.result())
    finally:
        working.cancel()
        serving.cancel()
        await asyncio.wait((serving, working))
        await fleet.aclose()
