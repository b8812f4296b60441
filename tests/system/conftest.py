"""What the runs of this folder share: one warm start, which they begin from, and one run, which others are compared with."""

from pathlib import Path

import pytest

from tests.golden import model as golden_model
from tests.golden.model import write_random_model
from tests.golden.settings import overrides
from tests.system.pretraining import WARM_START_S, pretrain
from tests.system.runs import DEADLINE_S, Finished, run

# A test that is the first to want one of these waits until it is made, at most so many seconds.
MADE_WITHIN_S = {
    "trained": WARM_START_S,
    "random_model": golden_model.DEADLINE_S,
    "lockstep": DEADLINE_S,
    "free": DEADLINE_S,  # of test_run_local.py
}


def pytest_itemcollected(item: pytest.Item) -> None:
    """Add to a test's own timeout what it may have to wait for: any test may come first, alone or in a shard."""
    waits_s = sum(seconds for name, seconds in MADE_WITHIN_S.items() if name in getattr(item, "fixturenames", ()))
    if waits_s:
        mark = item.get_closest_marker("timeout")
        own_s = mark.args[0] if mark else float(item.config.getini("timeout"))
        item.add_marker(pytest.mark.timeout(own_s + waits_s), append=False)


@pytest.fixture(scope="session")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a whole warm start on one rank."""
    folder = tmp_path_factory.mktemp("trained") / "run"
    done = pretrain(f"run.dir={folder}", timeout_s=WARM_START_S)
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
