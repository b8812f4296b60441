"""Options common to all tests."""

import re
import zlib

import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--shard", default="1/1", help="i/n: run the i-th of n slices of the tests")


def pytest_configure(config: pytest.Config) -> None:
    match = re.fullmatch(r"(\d+)/(\d+)", config.getoption("--shard"))
    if not match or not 1 <= int(match[1]) <= int(match[2]):
        raise pytest.UsageError(
            f"--shard {config.getoption('--shard')}: expected i/n with 1 <= i <= n, for example 2/5"
        )


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    number, count = (int(part) for part in config.getoption("--shard").split("/"))
    if count > 1:
        kept = [item for item in items if zlib.crc32(item.nodeid.encode()) % count == number - 1]
        config.hook.pytest_deselected(items=[item for item in items if item not in kept])
        items[:] = kept


def pytest_sessionfinish(session: pytest.Session, exitstatus: int) -> None:
    """A slice of a small part may be empty; that is no failure."""
    if exitstatus == pytest.ExitCode.NO_TESTS_COLLECTED and session.config.getoption("--shard") != "1/1":
        session.exitstatus = pytest.ExitCode.OK
