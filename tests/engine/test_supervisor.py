"""`recipes/rollout.py` with real vLLM: killed, restarted, registered again, and gone without a trace."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import httpx
import psutil
import pytest

from a3po_megatron.rollout.server import shared_memory_of
from tests.engine.conftest import TOKEN
from tests.engine.tiny_model import make_model, save_model
from tests.fake_controller import FakeController

RECIPE = Path(__file__).parents[2] / "recipes" / "rollout.py"
START_S = 200.0  # of one server on a busy machine; 30 s on an idle one


@pytest.mark.timeout(480)
def test_a_killed_vllm_server_is_restarted_and_registered_again_and_stopping_leaves_nothing(tmp_path):
    save_model(make_model(0, tied=False), tmp_path / "model")
    settings = ["device: cpu", "max_model_len: 256", "heartbeat_s: 0.5"]
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
        shared: set[Path] = set()
        try:
            controller.wait(lambda: "n-0.0" in controller.registered or process.poll() is not None, START_S)
            assert process.poll() is None, (tmp_path / "supervisor.log").read_text()
            assert controller.registered["n-0.0"]["world_size"] == 1
            family |= set(psutil.Process(process.pid).children(recursive=True))
            assert len(family) >= 3, "API server, engine and worker"
            shared |= shared_memory_of(process.pid for process in family)
            assert shared, "vLLM's processes share memory, else this test sees nothing"
            (server,) = psutil.Process(process.pid).children()
            server.kill()
            controller.wait(lambda: "n-0.0" in controller.deregistered, 20)
            assert "killed by SIGKILL" in controller.deregistered["n-0.0"]
            controller.wait(lambda: "n-0.1" in controller.registered, START_S)
            url = controller.registered["n-0.1"]["url"]
            headers = {"Authorization": f"Bearer {TOKEN}"}
            assert httpx.get(f"{url}/weight_info", headers=headers, trust_env=False).json() == {"weight_version": "0"}
            family |= set(psutil.Process(process.pid).children(recursive=True))
            shared |= shared_memory_of(process.pid for process in family)
        finally:
            family |= set(psutil.Process(process.pid).children(recursive=True)) if process.poll() is None else set()
            process.send_signal(signal.SIGTERM)
            asked = time.monotonic()
            code = process.wait(60)
    assert code == 0
    assert time.monotonic() - asked < 30
    assert not [p for p in family if p.is_running() and p.status() != psutil.STATUS_ZOMBIE]
    assert not [path for path in shared if path.exists()]
    with pytest.raises(httpx.ConnectError):
        httpx.get(url, trust_env=False)
