"""The distributed tests on ranks that torchrun started, as a site runs them on its GPUs."""

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
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert run.returncode == 0, run.stdout[-3000:] + run.stderr[-3000:]
    assert run.stdout.count("5 passed") == 4, run.stdout[-3000:]
