"""Runs each test body on several actor ranks.

A test here is a plain function that every rank executes. Its arguments are parameters, and `shared_folder`, one folder for
all ranks. Two ways to start it:

- `torchrun --nproc-per-node 4 -m pytest tests/distributed`: each rank is a pytest of its own and runs the tests in order. A rank
  stops at its first failure, so that torchrun ends the others instead of leaving them in a collective.
- plain `pytest tests/distributed`: this process imports the engines once and forks the ranks, which serve one test after
  another; after a failure they are replaced.
"""

import os
from pathlib import Path

import pytest

from tests.distributed.ranks import RankPool, collect, import_engines, join

UNDER_TORCHRUN = "TORCHELASTIC_RUN_ID" in os.environ
DEFAULT_RANKS = 4
HERE = Path(__file__).parent
_collected: list[pytest.Item] = []
_pool: list[RankPool] = []  # the one in use, if any


def pytest_configure(config: pytest.Config) -> None:
    if UNDER_TORCHRUN:
        config.option.maxfail = 1
        import_engines()
        join("env://", int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]))


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Keep tests of one number of ranks together: another number starts other ranks."""
    here = [item for item in items if item.path.is_relative_to(HERE)]
    here.sort(key=_wanted_ranks)
    _collected.extend(here)
    for item in here:
        if not item.get_closest_marker("timeout"):
            item.add_marker(pytest.mark.timeout(200))
    others = [item for item in items if not item.path.is_relative_to(HERE)]
    items[:] = here + others  # forked ranks come first: no other test has started threads yet
    if UNDER_TORCHRUN:
        started = int(os.environ["WORLD_SIZE"])
        for item in here:
            if (wanted := _wanted_ranks(item)) != started:
                item.add_marker(pytest.mark.skip(reason=f"is made for {wanted} ranks, torchrun started {started}"))


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    if UNDER_TORCHRUN or not pyfuncitem.path.is_relative_to(HERE):
        return None  # pytest calls the function in this process
    wanted = _wanted_ranks(pyfuncitem)
    if _pool and _pool[0].size != wanted:
        _pool.pop().close()
    if not _pool:
        _pool.append(RankPool(wanted, _collected))
    failure = _pool[0].run(_collected.index(pyfuncitem), pyfuncitem.funcargs.get("shared_folder"))
    if failure:
        _pool.clear()
        pytest.fail(failure, pytrace=False)
    return True


def pytest_runtest_teardown(item: pytest.Item) -> None:
    if UNDER_TORCHRUN and item.path.is_relative_to(HERE):
        collect()


def pytest_sessionfinish() -> None:
    while _pool:
        _pool.pop().close()


@pytest.fixture
def shared_folder(tmp_path: Path) -> Path:
    """One empty folder for all ranks; under torchrun, where each rank makes its own, that of rank 0."""
    if not UNDER_TORCHRUN:
        return tmp_path
    import torch
    import torch.distributed as dist

    name = torch.zeros(4096, dtype=torch.uint8)
    encoded = torch.tensor(list(str(tmp_path).encode()), dtype=torch.uint8)
    name[: len(encoded)] = encoded
    dist.broadcast(name, 0)  # in host memory, so through gloo
    return Path(bytes(name.tolist()).rstrip(b"\0").decode())


def _wanted_ranks(item: pytest.Item) -> int:
    marker = item.get_closest_marker("ranks")
    return marker.args[0] if marker else DEFAULT_RANKS
