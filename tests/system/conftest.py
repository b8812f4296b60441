"""What the runs of this folder share: one warm start, which they begin from, and one run, which others are compared with."""

from pathlib import Path

import pytest

from tests.golden.model import write_random_model
from tests.golden.settings import overrides
from tests.system.pretraining import pretrain
from tests.system.runs import Finished, run


@pytest.fixture(scope="session")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a whole warm start on one rank."""
    folder = tmp_path_factory.mktemp("trained") / "run"
    done = pretrain(f"run.dir={folder}", timeout_s=400)
    assert done.returncode == 0, done.stdout + done.stderr
    return folder


@pytest.fixture(scope="session")
def model(trained: Path) -> Path:
    """Return the folder of a model that answers some questions right: otherwise no reward differs from another."""
    return trained / "model"


@pytest.fixture(scope="session")
def random_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of the model that the golden runs start from."""
    return write_random_model(tmp_path_factory.mktemp("golden") / "model")


@pytest.fixture(scope="session")
def lockstep(random_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Finished:
    """The golden run of loglinear, on this machine."""
    return run(tmp_path_factory.mktemp("runs") / "lockstep", random_model, *overrides("loglinear"))
