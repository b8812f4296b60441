"""Options common to all tests."""

import zlib

import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--shard", default="1/1", help="i/n: run the i-th of n slices of the tests")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    number, count = (int(part) for part in config.getoption("--shard").split("/"))
    if count > 1:
        kept = [item for item in items if zlib.crc32(item.nodeid.encode()) % count == number - 1]
        config.hook.pytest_deselected(items=[item for item in items if item not in kept])
        items[:] = kept
