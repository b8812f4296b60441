"""One model for all runs of this folder: the demo's warm start, cut short."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.system.runs import DEADLINE_S, ROOT


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of a model that answers some questions right: otherwise no reward differs from another."""
    folder = tmp_path_factory.mktemp("warm_start")
    overrides = [f"run.dir={folder}", "run.num_steps=100", "eval_every=0", "task.num_heldout=50"]
    done = subprocess.run(
        [sys.executable, "-m", "recipes.pretrain", "configs/demo_warmstart.yaml", *overrides],
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return folder / "model"
