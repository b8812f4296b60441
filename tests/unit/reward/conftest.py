"""One pool of workers for all tests of this folder: a worker's start imports sympy."""

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from a3po_megatron.config.reward import RewardPoolConfig
from a3po_megatron.data.folder import data_folder
from a3po_megatron.errors import UserError
from a3po_megatron.records import Verdict
from a3po_megatron.reward.judge import MathSettings
from a3po_megatron.reward.pool import WorkerPool
from a3po_megatron.reward.worker import Request

Judge = Callable[[list[tuple[str, str]]], list[Verdict]]


@pytest.fixture(scope="session")
def pool() -> Iterator[WorkerPool]:
    """A pool whose deadline no right answer meets, however busy the machine is."""
    with WorkerPool(RewardPoolConfig(num_workers=2, timeout_s=100)) as pool:
        yield pool


@pytest.fixture(scope="session")
def judge(pool: WorkerPool) -> Judge:
    """Judge (gold, response) pairs by the convention `auto`."""

    def judge_all(pairs: list[tuple[str, str]]) -> list[Verdict]:
        return pool.judge_now([Request("math", gold, response, MathSettings()) for gold, response in pairs])

    return judge_all


def data_file(name: str) -> Path:
    """Return a file of the data folder; skips the test where it is not there."""
    try:
        path = data_folder() / name
    except UserError as error:
        pytest.skip(str(error))
    if not path.is_file():
        pytest.skip(f"{path} is not there")
    return path


def json_rows(name: str) -> list[dict[str, Any]]:
    """Return the rows of a JSON lines file of the data folder."""
    return [json.loads(line) for line in data_file(name).read_text(encoding="utf-8").splitlines()]
