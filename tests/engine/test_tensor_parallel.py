"""A server whose weights lie on two workers takes new ones and samples from exactly these."""

import asyncio

import numpy as np
import pytest

from a3po_megatron.rollout.client import Generation
from a3po_megatron.rollout.sampling import SamplingSettings
from tests.engine.conftest import LiveServer, rollout_config, serving
from tests.engine.tiny_model import make_model, reference_logprobs

PROMPTS = [[5, 17, 9], list(range(2, 60)), [90, 3, 3, 41, 7, 12]]
TOLERANCE = 1e-4  # two workers add halves of each sum in another order, in float32
NUM_TOKENS = 60


@pytest.mark.full
@pytest.mark.timeout(400)
@pytest.mark.parametrize("tied", [True, False])
def test_two_workers_load_their_parts_of_every_version_and_sample_exactly(tmp_path, tied):
    model, changes = make_model(0, tied=tied), {"tensor_parallel": 2}

    async def run(live: LiveServer) -> list[Generation]:
        ready, results = await live.fleet(**changes), []
        for seed in range(3):
            if seed:
                await ready.publish(make_model(seed, tied=tied))
            settings = SamplingSettings(temperature=1.0, max_tokens=NUM_TOKENS, seed=seed, ignore_eos=True)
            calls = [ready.fleet.generate(prompt, settings, f"{seed}-{i}") for i, prompt in enumerate(PROMPTS)]
            results += await asyncio.gather(*calls)
        await ready.fleet.aclose()
        return results

    with serving(tmp_path, "parallel", tmp_path / "pace", model, **changes) as server:
        live = LiveServer(server, tmp_path / "rendezvous", tmp_path / "pace", {0: model}, rollout_config(**changes))
        results = asyncio.run(run(live))
    for index, result in enumerate(results):
        version, prompt = index // len(PROMPTS), PROMPTS[index % len(PROMPTS)]
        assert set(result.versions.tolist()) == {version}
        expected = reference_logprobs(live.models[version], prompt, result.token_ids.tolist(), 1.0)
        np.testing.assert_allclose(result.logprobs, expected, atol=TOLERANCE, rtol=0)
