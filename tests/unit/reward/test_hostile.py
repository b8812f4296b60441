"""Hostile answers are judged or refused within the deadline; no worker leaks, memory stays flat."""

import itertools
import time

import psutil
import pytest

from a3po_megatron.config.reward import RewardPoolConfig
from a3po_megatron.reward.judge import MathSettings
from a3po_megatron.reward.pool import WorkerPool
from a3po_megatron.reward.worker import Request
from tests.unit.reward import hostile

DEADLINE_S = 60.0  # milliseconds are needed; a busy machine may give a worker no time for seconds
GIB = 1 << 30


def request(response: str) -> Request:
    return Request("math", "-31415926", response, MathSettings())


@pytest.mark.timeout(600)
def test_a_thousand_hostile_answers_are_worth_0_and_leave_nothing_behind() -> None:
    answers = list(itertools.islice(hostile.cheap(), 1000))
    with WorkerPool(RewardPoolConfig(num_workers=2, timeout_s=DEADLINE_S)) as pool:
        pool.judge_now([request("5")] * 4)
        before = max(psutil.Process(pid).memory_info().rss for pid in pool.pids())
        verdicts = pool.judge_now([request(answer) for answer in answers])
        assert len(verdicts) == 1000
        assert [(a[:80], v) for a, v in zip(answers, verdicts, strict=True) if v.reward != 0.0 or not v.reason] == []
        late = sum("not judged within" in verdict.reason for verdict in verdicts)
        assert pool.restarts <= late + 2, "a worker ended for another reason than the deadline"
        assert late <= 20, "the guards let too much through to the deadline"
        pids = pool.pids()
        assert len(pids) <= 2
        after = max(psutil.Process(pid).memory_info().rss for pid in pids)
        assert after < before + GIB // 4, f"a worker grew from {before} to {after} bytes"
    assert not any(psutil.pid_exists(pid) for pid in pids)


@pytest.mark.timeout(600)
@pytest.mark.parametrize("repeats", [1, pytest.param(5, marks=pytest.mark.full)])
def test_computations_without_end_are_killed_at_the_deadline(repeats: int) -> None:
    responses = [rf"\boxed{{{text}}}" for text in hostile.SLOW] * repeats
    with WorkerPool(RewardPoolConfig(num_workers=2, timeout_s=1.0)) as pool:
        pool.judge_now([request("5")] * 4)
        started = time.monotonic()
        verdicts = pool.judge_now([request(response) for response in responses])
        time_s = time.monotonic() - started
        pids = pool.pids()
    assert all(verdict.reward == 0.0 and verdict.reason for verdict in verdicts)
    assert any("not judged within 1 s" in verdict.reason for verdict in verdicts)
    # Each costs its deadline and a worker's start; 60 s a piece is for a machine that is busy with other things.
    assert time_s < 60 * len(responses)
    assert not any(psutil.pid_exists(pid) for pid in pids)
