"""The distributed tests on ranks that torchrun started, as a site runs them on its GPUs."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
CHOSEN = "test_weights and llama-tied or test_random_state_is_restored"


@pytest.mark.timeout(260)
def test_torchrun_runs_the_distributed_tests_as_they_are() -> None:
    pytest_command = ["-m", "pytest", "tests/distributed", "-q", "-W", "ignore", "-p", "no:cacheprovider", "-k", CHOSEN]
    run = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "4", *pytest_command],
        cwd=ROOT,
        env=os.environ | {"PYTEST_ADDOPTS": ""},  # whatever this pytest was told
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert run.returncode == 0, run.stdout[-3000:] + run.stderr[-3000:]
    passed = [int(count) for count in re.findall(r"^(\d+) passed, ", run.stdout, re.MULTILINE)]
    assert len(passed) == 4, run.stdout[-3000:]  # each rank is a pytest of its own
    assert min(passed) == max(passed) >= 5, run.stdout[-3000:]
