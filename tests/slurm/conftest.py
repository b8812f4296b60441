"""One test cluster for all tests of this folder, and the model that their runs start from."""

import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.slurm.cluster import Cluster, why_not
from tests.system.conftest import model, pytest_itemcollected, trained  # noqa: F401  # fixtures and their timeouts


@pytest.fixture(scope="session")
def cluster() -> Iterator[Cluster]:
    if reason := why_not():
        pytest.skip(reason)
    root = Path(tempfile.mkdtemp(prefix="a3po-"))  # short: a socket lies in it
    try:
        running = Cluster(root)
        try:
            yield running
        finally:
            running.stop()
    finally:
        shutil.rmtree(root, ignore_errors=True)
