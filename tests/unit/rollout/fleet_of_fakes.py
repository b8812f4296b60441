"""A fleet whose replicas are fakes at the HTTP level."""

from dataclasses import asdict

from a3po_megatron.config.rollout import RolloutConfig
from a3po_megatron.rollout.fleet import Fleet
from a3po_megatron.rollout.sampling import SamplingSettings
from a3po_megatron.rollout.transfer_messages import Transfer
from tests.unit.rollout.fake_replica import FakeReplica

MANIFEST = {"names": ["w"], "dtypes": ["float32"], "shapes": [[2]]}
SAMPLING = SamplingSettings(temperature=1.0, max_tokens=20)


class Setup:
    """A fleet and its fake replicas."""

    def __init__(self, tmp_path, *names: str, **config) -> None:
        self.calls: list[str] = []
        self.replicas = {name: FakeReplica(name, self.calls) for name in names}
        settings = {"startup_timeout_s": 0.3, "request_timeout_s": 5.0, "control_timeout_s": 1.0} | config
        self.fleet = Fleet(
            RolloutConfig(**settings),
            "secret",
            tmp_path / "rendezvous",
            vocab_size=512,
            make_transport=lambda url: self.replicas[url.removeprefix("http://")],
        )

    async def register(self, *names: str, world_size: int = 1) -> list[str]:
        return [(await self.fleet.register(name, f"http://{name}", world_size))["state"] for name in names]

    async def publish(self, version: int, transfer: Transfer = "gloo", kept: bool = False) -> dict:
        begun = await self.fleet.begin_publication(version, MANIFEST, transfer)
        return asdict(begun) | asdict(await self.fleet.finish_publication(version, kept=kept))
