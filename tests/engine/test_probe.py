"""The probe on a real vLLM server: it is the served model's, and tells garbage with good seals from a training step."""

import asyncio
import itertools
import time

import numpy as np
import pytest
import torch

from a3po_megatron.rollout.probe import probe_ids
from a3po_megatron.rollout.publication import PublicationError
from tests.engine.conftest import LiveServer, tensors_of
from tests.engine.test_publication import TOLERANCE, one_trained_step
from tests.engine.tiny_model import VOCABULARY, make_model, reference_logprobs

pytestmark = pytest.mark.timeout(300)
MAX_CHANGE = (
    0.3  # the toy is random, never as sure as a trained model: garbage moves it by 0.6 to 0.9 only, a step by 0.01
)


async def probe(live: LiveServer) -> tuple[np.ndarray, float]:
    """Return the server's answer and the seconds that it took."""
    client = live.client()
    began = time.perf_counter()
    answer = await client.probe_logprobs()
    seconds = time.perf_counter() - began
    await client.aclose()
    return np.array(answer), seconds


def test_the_probe_is_the_served_models_and_a_training_step_passes_it(live, capsys):
    async def run() -> list[tuple[np.ndarray, float]]:
        ready = await live.fleet(probe_max_change=1000.0)
        await ready.publish(make_model(live.version + 701))
        await ready.fleet.aclose()
        ready, answers = await live.fleet(probe_max_change=MAX_CHANGE), [await probe(live)]
        for _ in range(2):  # the first has no predecessor in this fleet
            await ready.publish(one_trained_step(live.model, learning_rate=1e-4))
            answers.append(await probe(live))
        await ready.fleet.aclose()
        return answers

    answers = asyncio.run(run())
    ids = probe_ids(VOCABULARY)
    for (answer, _), version in zip(answers, sorted(live.models)[-3:], strict=True):
        expected = reference_logprobs(live.models[version], ids[:1], ids[1:], 1.0)
        np.testing.assert_allclose(answer, expected, atol=TOLERANCE, rtol=0)
    moves = [np.abs(new - old).mean() for (old, _), (new, _) in itertools.pairwise(answers)]
    with capsys.disabled():
        print(f"\nprobe: {min(s for _, s in answers) * 1e3:.0f} ms; steps move it by {max(moves):.2e} nats")
    assert 0 < max(moves) < MAX_CHANGE / 10


def one_nan(name: str, tensor: torch.Tensor) -> torch.Tensor:
    changed = tensor.clone()
    if name == "model.layers.1.self_attn.v_proj.weight":
        changed[3, 5] = float("nan")
    return changed


def scaled(name: str, tensor: torch.Tensor) -> torch.Tensor:
    return tensor * 30 if "embed" in name or "norm" in name else tensor


def scrambled(name: str, tensor: torch.Tensor) -> torch.Tensor:
    return tensor.flatten().roll(tensor.numel() // 3 + 1).view(tensor.shape)


@pytest.mark.parametrize(
    ("change", "reason"),
    [(one_nan, "not finite"), (scaled, "nats from version"), (scrambled, "nats from version")],
    ids=["one NaN", "scaled", "scrambled"],
)
def test_corrupted_weights_with_good_checksums_are_caught_before_the_server_goes_on(live, change, reason):
    """The tensors change before they are sealed, as by a faulty gather: every checksum matches."""

    async def run() -> None:
        ready = await live.fleet(probe_max_change=MAX_CHANGE)
        await ready.publish(one_trained_step(live.model, learning_rate=1e-4))
        version, tensors = live.version + 1, [(name, change(name, t)) for name, t in tensors_of(live.model)]
        with pytest.raises(PublicationError, match=f"version {version}: every replica failed the probe: .*{reason}"):
            await ready.sender.publish(tensors, version)
        assert ready.fleet.version == version - 1
        assert "failed the probe" in ready.fleet.status()["fenced"]["live"]
        await ready.fleet.aclose()
        mended = await live.fleet()
        await mended.publish(live.model)
        await mended.fleet.aclose()

    asyncio.run(run())
