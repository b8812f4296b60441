"""`recipes/rollout.py` with real vLLM: killed, restarted, registered again, overloaded, and gone without a trace."""

import asyncio
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import httpx
import numpy as np
import psutil
import pytest
from transformers import Qwen3ForCausalLM

from a3po_megatron.rollout.fleet import Fleet
from a3po_megatron.rollout.sampling import SamplingSettings
from tests.engine.conftest import TOKEN, rollout_config
from tests.engine.tiny_model import make_model, reference_logprobs, save_model
from tests.fake_controller import FakeController

RECIPE = Path(__file__).parents[2] / "recipes" / "rollout.py"
NUM_SEQS = 24
CACHE_BYTES = (
    2**20
)  # 1,024 tokens of the tiny model: eight sequences that start with one block of 128 and grow into two
PRESSURE_S = 90.0  # until the limit falls; a few seconds on an idle machine
START_S = 200.0  # of one server on a busy machine; 30 s on an idle one


async def check_full_cache(url: str, model: Qwen3ForCausalLM) -> None:
    """Send more than the server's cache holds: its limit falls, every response is whole and exact."""
    fleet = Fleet(rollout_config(max_model_len=256, max_num_seqs=NUM_SEQS, heartbeat_s=0.1), TOKEN, Path("unused"))
    await fleet.register("small", url, 1)
    prompts = np.random.default_rng(0).integers(2, 96, (NUM_SEQS, 100), dtype=np.int32)
    deadline, lowest, results = time.monotonic() + PRESSURE_S, NUM_SEQS, []
    while lowest == NUM_SEQS:
        assert time.monotonic() < deadline, f"the limit is still {lowest}"
        settings = [SamplingSettings(1.0, 60, seed=seed, ignore_eos=True) for seed in range(NUM_SEQS)]
        calls = [fleet.generate(prompt, each, f"r{each.seed}") for prompt, each in zip(prompts, settings, strict=True)]
        batch = asyncio.gather(*calls)
        while not batch.done():
            lowest = min(lowest, fleet.status()["replicas"]["small"]["limit"])
            await asyncio.sleep(0.02)
        results += zip(prompts, await batch, strict=True)
    assert fleet.status()["fenced"] == {}
    await fleet.aclose()
    for prompt, result in results:
        expected = reference_logprobs(model, prompt.tolist(), result.token_ids.tolist(), 1.0)
        assert len(expected) == 60
        np.testing.assert_allclose(result.logprobs, expected, atol=1e-4, rtol=0)


@pytest.mark.timeout(480)
def test_a_killed_vllm_server_is_restarted_withstands_a_full_cache_and_leaves_nothing(tmp_path):
    model = make_model(0, tied=False)
    save_model(model, tmp_path / "model")
    settings = ["device: cpu", "max_model_len: 256", "heartbeat_s: 0.5"]
    settings += [f"kv_cache_bytes: {CACHE_BYTES}", f"max_num_seqs: {NUM_SEQS}"]
    (tmp_path / "config.yaml").write_text(
        f"run: {{dir: {tmp_path}}}\nmodel: {{path: {tmp_path}/model}}\nrollout: {{{', '.join(settings)}}}\n"
    )
    (tmp_path / "token").write_text(TOKEN + "\n")
    environment = {name: value for name, value in os.environ.items() if name != "A3PO_TOKEN"}
    environment["PYTHONPATH"] = str(RECIPE.parents[1])
    with FakeController(TOKEN) as controller, (tmp_path / "supervisor.log").open("wb") as log:
        command = [sys.executable, str(RECIPE), str(tmp_path / "config.yaml"), "--controller", controller.url]
        process = subprocess.Popen([*command, "--node", "n"], env=environment, stdout=log, stderr=log)
        family: set[psutil.Process] = set()
        try:
            controller.wait(lambda: "n-0.0" in controller.registered or process.poll() is not None, START_S)
            assert process.poll() is None, (tmp_path / "supervisor.log").read_text()
            assert controller.registered["n-0.0"]["world_size"] == 1
            family |= set(psutil.Process(process.pid).children(recursive=True))
            assert len(family) >= 3, "API server, engine and resource tracker"
            (server,) = psutil.Process(process.pid).children()
            server.kill()
            controller.wait(lambda: "n-0.0" in controller.deregistered, 20)
            assert "killed by SIGKILL" in controller.deregistered["n-0.0"]
            controller.wait(lambda: "n-0.1" in controller.registered, START_S)
            url = controller.registered["n-0.1"]["url"]
            headers = {"Authorization": f"Bearer {TOKEN}"}
            assert httpx.get(f"{url}/weight_info", headers=headers, trust_env=False).json() == {"weight_version": "0"}
            asyncio.run(check_full_cache(url, model))
            family |= set(psutil.Process(process.pid).children(recursive=True))
        finally:
            family |= set(psutil.Process(process.pid).children(recursive=True)) if process.poll() is None else set()
            process.send_signal(signal.SIGTERM)
            asked = time.monotonic()
            code = process.wait(60)
    assert code == 0
    assert time.monotonic() - asked < 30
    assert not [p for p in family if p.is_running() and p.status() != psutil.STATUS_ZOMBIE]
    with pytest.raises(httpx.ConnectError):
        httpx.get(url, trust_env=False)
