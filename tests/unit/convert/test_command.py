"""The command line: one report, one line for a mistake, and exit codes."""

import subprocess
import sys
from pathlib import Path

import pytest

from tests.unit.convert.tiny import make_folder

CHECKOUT = Path(__file__).resolve().parents[3]


def call(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "tools/convert_checkpoint.py", *map(str, arguments)]
    environment = {"PYTHONPATH": str(CHECKOUT), "OMP_NUM_THREADS": "1"}
    return subprocess.run(command, cwd=CHECKOUT, env=environment, capture_output=True, text=True, timeout=100)


def test_a_conversion_reports_what_it_wrote_and_its_peak_memory(tmp_path: Path) -> None:
    source, destination = make_folder(tmp_path / "hf"), tmp_path / "megatron"
    done = call("hf-to-megatron", source, destination, "--tensor-parallel", "2", "--pipeline-parallel", "2")
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith(f"{destination}: 47 tensors, 0.0 M parameters, float32, ")
    assert "MB above the imports, largest tensor" in done.stdout
    assert (destination / "complete.json").exists()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["hf-to-megatron", "nowhere", "there"], "error: nowhere: no such file or folder"),
        (
            ["megatron-to-hf", "docs", "there"],
            "error: docs: no config.json in it and no run around it; name the model's",
        ),
        (["hf-to-megatron", "docs", "there", "--bridge"], "error: --bridge: megatron.bridge is not installed here"),
    ],
)
def test_a_mistake_is_one_line_and_exit_code_2(arguments: list[str], message: str) -> None:
    done = call(*arguments)
    assert done.returncode == 2
    assert done.stderr.startswith(message)
    assert done.stderr.count("\n") == 1
