"""`recipes/evaluate.py` as a process, with a stand-in for vLLM: its report, its exit codes, and that no server outlives it."""

import json
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from a3po_megatron.rollout.process_group import shared_memory_of

pytestmark = pytest.mark.timeout(240)
ROOT = Path(__file__).parents[3]
MODEL = ROOT / "configs" / "models" / "arithmetic_qwen3"
SUMS = ["data.task=arithmetic", "reward.kind=exact", "max_problems=10", "rollout.max_model_len=16"]
QUICK = [
    "rollout.max_response_tokens=2",
    "rollout.heartbeat_s=0.1",
    "rollout.stop_timeout_s=2",
    "rollout.max_restarts=0",
]
DEADLINE_S = 100.0  # generous: the machine may be busy


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """The arithmetic model without weights, which a stand-in does not read."""
    folder = tmp_path / "model"
    folder.mkdir()
    for file in MODEL.iterdir():
        (folder / file.name).write_bytes(file.read_bytes())
    (folder / "model.safetensors").write_bytes(b"")
    return folder


class Running:
    """The command in progress, and what it started."""

    def __init__(self, mode: str, *arguments: str, log: Path) -> None:
        self.log = log
        with log.open("wb") as output:
            command = [sys.executable, "-m", "tests.unit.evaluate.run_evaluate", mode, *arguments]
            self.process = subprocess.Popen(command, stdout=output, stderr=output, cwd=ROOT)
        self.family: set[psutil.Process] = set()
        self.shared_memory: set[Path] = set()

    def wait_for(self, text: str) -> None:
        deadline = time.monotonic() + DEADLINE_S
        while text not in self.log.read_text():
            assert time.monotonic() < deadline, self.log.read_text()
            assert self.process.poll() is None, self.log.read_text()
            self.family |= set(psutil.Process(self.process.pid).children(recursive=True))
            self.shared_memory |= shared_memory_of(process.pid for process in self.family)
            time.sleep(0.05)

    def wait(self) -> int:
        """Return the exit code; nothing that was started is left."""
        code = self.process.wait(DEADLINE_S)
        left = [p for p in self.family if p.is_running() and p.status() != psutil.STATUS_ZOMBIE]
        assert not left, left
        assert not [path for path in self.shared_memory if path.exists()]
        return code


def test_a_folder_is_evaluated_by_servers_that_end_with_it(tmp_path: Path, model: Path) -> None:
    report = tmp_path / "report"
    running = Running("good", str(model), f"dir={report}", *SUMS, *QUICK, log=tmp_path / "log")
    running.wait_for("generates at")
    assert running.wait() == 0, running.log.read_text()
    assert "│ arithmetic │ 10" in running.log.read_text()
    assert "responses: 10 by version 0" in running.log.read_text()
    figures = json.loads((report / "report.json").read_text())
    assert (figures["kind"], figures["overall"]["num_problems"], figures["overall"]["truncated"]) == ("folder", 10, 1.0)
    samples = [json.loads(line) for line in (report / "samples.jsonl").read_text().splitlines()]
    assert {(line["tokens"], line["reward"], line["finish_reason"]) for line in samples} == {(2, 0.0, "length")}
    assert (report / "config.yaml").exists()
    assert "token" not in [path.name for path in report.iterdir()]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_the_servers_too(tmp_path: Path, model: Path, number: signal.Signals) -> None:
    running = Running("hangs", str(model), f"dir={tmp_path / 'report'}", *SUMS, *QUICK, log=tmp_path / "log")
    running.wait_for("generates at")
    assert running.family
    running.process.send_signal(number)
    assert running.wait() == 128 + number
    assert running.log.read_text().splitlines()[-1] == f"error: stopped by {number.name}; the servers have been ended"


@pytest.mark.parametrize(
    ("mode", "settings", "message"),
    [
        ("dies", [], "server 0 of local failed 1 times .*no weights in this folder"),
        ("hangs", ["timeout_s=1"], r"waited 1 s \(timeout_s\) for 10 responses to 10 problems; 0 came"),
    ],
)
def test_a_failure_is_one_last_line_and_exit_code_1(
    tmp_path: Path, model: Path, mode: str, settings: list[str], message: str
) -> None:
    running = Running(mode, str(model), f"dir={tmp_path / 'report'}", *SUMS, *QUICK, *settings, log=tmp_path / "log")
    assert running.wait() == 1
    assert re.search(f"^error: .*{message}", running.log.read_text().splitlines()[-1]), running.log.read_text()
    assert not (tmp_path / "report" / "report.json").exists()


def test_a_mistake_is_named_before_anything_starts(tmp_path: Path) -> None:
    running = Running("good", str(tmp_path / "none"), "sets=[gsm8k]", log=tmp_path / "log")
    assert running.wait() == 2
    assert running.log.read_text().startswith(f"error: target={tmp_path / 'none'}: no such folder")
