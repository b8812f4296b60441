"""The benchmark of the log-probabilities runs; its figures mean something at full size only."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

TOOL = Path(__file__).parents[2] / "tools/bench_logprobs.py"


@pytest.mark.full
@pytest.mark.timeout(120)  # three processes that import torch
def test_the_benchmark_prints_one_json_object() -> None:
    options = [
        "--json",
        "--device",
        "cpu",
        "--tokens",
        "64",
        "--vocabulary",
        "2000",
        "--hidden",
        "16",
        "--repeats",
        "1",
    ]
    command = [sys.executable, str(TOOL), *options, "--entropy"]
    run = subprocess.run(command, capture_output=True, text=True, check=True, timeout=110)
    result = json.loads(run.stdout)
    assert result["time_ratio"].keys() == result["memory_ratio"].keys() == {"chunked"}
    assert result["seconds"].keys() == result["extra_memory_mb"].keys() == {"plain", "chunked"}
    assert all(seconds > 0 for seconds in result["seconds"].values())
