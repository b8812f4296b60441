"""One real vLLM server for all tests of this folder: a start takes half a minute, a publication a tenth of a second."""

import asyncio
import contextlib
import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import psutil
import pytest

os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch
from transformers import Qwen3ForCausalLM

from a3po_megatron.config.rollout import RolloutConfig
from a3po_megatron.rollout.client import ReplicaClient
from a3po_megatron.rollout.fleet import Fleet
from a3po_megatron.rollout.server import Server, choose_port
from a3po_megatron.rollout.server_args import server_command, server_environment
from tests.engine.paced_scheduler import PACE_FILE
from tests.engine.tiny_model import MAX_LENGTH, VOCABULARY, make_model, save_model
from tests.fakes.replica_processes import Sender

TOKEN = "0123456789abcdef" * 2


def rollout_config(**changes) -> RolloutConfig:
    """Settings of the tests: small buckets, so that a fused layer's parts travel apart."""
    settings = {"device": "cpu", "max_model_len": MAX_LENGTH, "stream_interval": 4, "bucket_bytes": 20_000}
    settings["probe_max_change"] = 0.0  # most tests publish models that have nothing to do with each other
    return RolloutConfig(**(settings | {"control_timeout_s": 60.0, "transfer_timeout_s": 60.0} | changes))


@dataclass
class LiveServer:
    """The shared server and what was published to it: version -> model."""

    server: Server
    rendezvous_dir: Path
    pace_file: Path  # see paced_scheduler.py
    models: dict[int, Qwen3ForCausalLM]
    config: RolloutConfig = field(default_factory=rollout_config)

    @property
    def version(self) -> int:
        """The server's version now."""
        return max(self.models)

    @property
    def model(self) -> Qwen3ForCausalLM:
        """The server's model now."""
        return self.models[self.version]

    def client(self, token: str = TOKEN) -> ReplicaClient:
        """Return a client for the running event loop."""
        return ReplicaClient("live", self.server.url, token, self.config, VOCABULARY)

    async def fleet(self, **changes) -> "LiveFleet":
        """Return a fleet of this one server."""
        fleet = Fleet(rollout_config(**changes), TOKEN, self.rendezvous_dir, self.version, VOCABULARY)
        world_size = self.config.tensor_parallel
        assert await fleet.register("live", self.server.url, world_size) == {"state": "current", "reason": ""}
        return LiveFleet(fleet, self, Sender(fleet, timeout_s=30))


@dataclass
class LiveFleet:
    """A fleet with the actor's end of publications."""

    fleet: Fleet
    live: LiveServer
    sender: Sender

    async def publish(self, model: Qwen3ForCausalLM) -> int:
        """Publish `model` under the next version, as the actor would; return the version."""
        version = self.fleet.version + 1
        assert (await self.sender.publish(tensors_of(model), version)).failed == {}
        self.live.models[version] = model
        return version


def tensors_of(model: Qwen3ForCausalLM) -> list[tuple[str, torch.Tensor]]:
    """Return the model's Hugging Face tensors, tied ones once."""
    return [(name, parameter.detach()) for name, parameter in model.named_parameters()]


@contextmanager
def serving(folder: Path, name: str, pace_file: Path, model: Qwen3ForCausalLM, **changes) -> Iterator[Server]:
    """Start a server with `model` as version 0, end it with the block."""
    config = rollout_config(**changes)
    port = choose_port(config, 0)
    command = server_command(config, save_model(model, folder / "model"), "cpu", port, seed=0)
    command += ["--scheduler-cls", "tests.engine.paced_scheduler.PacedScheduler"]
    environment = server_environment(config, TOKEN, "cpu") | {PACE_FILE: str(pace_file)}
    server = Server(name, f"http://127.0.0.1:{port}", command, environment, folder / f"{name}.log")

    async def wait_ready() -> None:
        client = ReplicaClient(name, server.url, TOKEN, config, VOCABULARY)
        assert await server.wait_ready(client, config) == config.tensor_parallel
        await client.aclose()

    with ThreadPoolExecutor(1) as pool:
        try:
            # In a thread of its own: a test that uses an event loop may be what asks for this fixture.
            pool.submit(asyncio.run, wait_ready()).result()
            yield server
        finally:
            pool.submit(asyncio.run, server.stop(timeout_s=15)).result()


@pytest.fixture(scope="session")
def started_server(tmp_path_factory) -> Iterator[LiveServer]:
    """Start the one server, with a tied model as version 0."""
    folder = tmp_path_factory.mktemp("engine")
    model, pace_file = make_model(seed=0), folder / "pace"
    with serving(folder, "live", pace_file, model) as server:
        yield LiveServer(server, folder / "rendezvous", pace_file, {0: model})


@pytest.fixture
def live(started_server) -> LiveServer:
    """The shared server, checked to be alive."""
    assert started_server.server.exit_reason() is None, started_server.server.last_words()
    return started_server


@dataclass
class SecondServer:
    """Another server, which a test may stop or kill."""

    server: Server
    stopped: list[psutil.Process] = field(default_factory=list)

    def go_on(self) -> None:
        """Let stopped processes go on."""
        for process in self.stopped:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.resume()
        self.stopped.clear()


@pytest.fixture(scope="module")
def second(started_server, tmp_path_factory) -> Iterator[SecondServer]:
    """Start a second server, paced like the first, for the tests of one file."""
    folder = tmp_path_factory.mktemp("second")
    with serving(folder, "second", started_server.pace_file, make_model(seed=0)) as server:
        another = SecondServer(server)
        try:
            yield another
        finally:
            another.go_on()
