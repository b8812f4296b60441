"""The pool of workers: its deadline kills, nothing leaks, nothing blocks the event loop, orphans end."""

import asyncio
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from a3po_megatron.config.reward import PythonRewardConfig, RewardConfig, RewardPoolConfig
from a3po_megatron.errors import UserError
from a3po_megatron.reward.base import RewardError
from a3po_megatron.reward.build import Rewards
from a3po_megatron.reward.judge import MathSettings
from a3po_megatron.reward.pool import WorkerPool, check_golds
from a3po_megatron.reward.worker import Request

ROOT = Path(__file__).parents[3]
SETTINGS = MathSettings()
HANGS = r"\boxed{\sum_{k=1}^{10^{9}} k^{k}}"


def math(gold: str, response: str) -> Request:
    return Request("math", gold, response, SETTINGS)


def until(condition: Callable[[], bool], timeout_s: float = 60.0) -> bool:
    deadline = time.monotonic() + timeout_s
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.05)
    return condition()


@pytest.fixture
def path_of_rewards(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder that workers started from now on can import from."""
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    return tmp_path


def test_verdicts_come_in_the_order_of_the_requests(pool: WorkerPool) -> None:
    verdicts = pool.judge_now([math(str(i), rf"\boxed{{{i % 7}}}") for i in range(50)])
    assert [verdict.reward for verdict in verdicts] == [float(i == i % 7) for i in range(50)]
    assert [verdict.extracted for verdict in verdicts] == [str(i % 7) for i in range(50)]


def test_a_hanging_answer_is_worth_0_its_worker_is_killed_and_the_next_answer_is_judged() -> None:
    with WorkerPool(RewardPoolConfig(num_workers=1, timeout_s=60)) as pool:
        assert pool.judge_now([math("5", r"\boxed{5}")])[0].reward == 1.0
        (first,) = pool.pids()
        pool.config = RewardPoolConfig(num_workers=1, timeout_s=1)
        verdict = pool.judge_now([math("5", HANGS)])[0]
        assert (verdict.reward, verdict.reason) == (0.0, "not judged within 1 s (reward.pool.timeout_s)")
        assert not psutil.pid_exists(first)
        pool.config = RewardPoolConfig(num_workers=1, timeout_s=60)
        assert pool.judge_now([math("5", r"\boxed{5}")])[0].reward == 1.0
        assert pool.restarts == 1
        (second,) = pool.pids()
    assert not psutil.pid_exists(second)


def test_the_event_loop_goes_on_while_answers_are_judged(pool: WorkerPool) -> None:
    async def main() -> int:
        judged = asyncio.create_task(pool.judge([math("x^2-1", r"\boxed{(x-1)(x+1)}")] * 40))
        turns = 0
        while not judged.done():
            turns += 1
            await asyncio.sleep(0.001)
        assert all(verdict.reward == 1.0 for verdict in await judged)
        return turns

    assert asyncio.run(main()) > 5


def test_a_response_above_the_bound_is_refused_unread(pool: WorkerPool) -> None:
    verdict = pool.judge_now([math("5", "{" * 10_000_000)])[0]
    assert verdict.reason == "the response has 10000000 characters, more than 400000"


def test_a_worker_that_dies_costs_one_answer(path_of_rewards: Path) -> None:
    (path_of_rewards / "dies.py").write_text(
        "import os\ndef reward(response, answer, problem_id):\n    os._exit(7) if response == 'die' else None\n    return 0.5\n"
    )
    with WorkerPool(RewardPoolConfig(num_workers=1, timeout_s=60)) as pool:
        verdicts = pool.judge_now([Request("python", "", text, path="dies:reward") for text in ("a", "die", "b")])
    assert [verdict.reward for verdict in verdicts] == [0.5, 0.0, 0.5]
    assert verdicts[1].reason == "the worker ended over this answer: exit code 7"


def test_a_worker_that_closes_its_pipes_and_lives_on_is_not_waited_for(path_of_rewards: Path) -> None:
    (path_of_rewards / "closes.py").write_text(
        "import os, time\ndef reward(response, answer, problem_id):\n    os.closerange(0, 100)\n    time.sleep(1000)\n"
    )
    with WorkerPool(RewardPoolConfig(num_workers=1, timeout_s=60)) as pool:
        verdict = pool.judge_now([Request("python", "", "", path="closes:reward")])[0]
        assert not pool.pids()
    assert (verdict.reward, verdict.reason) == (
        0.0,
        "the worker ended over this answer: it closed its pipes and was still there after 5 s",
    )


def test_memory_beyond_the_limit_is_refused_and_the_next_answer_is_judged(path_of_rewards: Path) -> None:
    (path_of_rewards / "eats.py").write_text(
        "def reward(response, answer, problem_id):\n    return float(len(bytearray(8 << 30))) if response == 'eat' else 1.0\n"
    )
    with WorkerPool(RewardPoolConfig(num_workers=1, timeout_s=60)) as pool:
        with pytest.raises(RewardError, match="MemoryError"):
            pool.judge_now([Request("python", "", "eat", path="eats:reward")])
        assert pool.judge_now([Request("python", "", "", path="eats:reward")])[0].reward == 1.0


def test_what_a_users_function_prints_does_not_disturb_the_answers(path_of_rewards: Path) -> None:
    (path_of_rewards / "prints.py").write_text(
        "def reward(response, answer, problem_id):\n    print('x' * 1000)\n    return len(response), 'its length'\n"
    )
    with WorkerPool(RewardPoolConfig(num_workers=1, timeout_s=60)) as pool:
        verdict = pool.judge_now([Request("python", "", "four", path="prints:reward")])[0]
    assert (verdict.reward, verdict.reason) == (4.0, "its length")


@pytest.mark.full
def test_a_users_module_may_take_longer_to_import_than_an_answer_may_take(path_of_rewards: Path) -> None:
    """With a deadline of ten seconds and an import of twenty, the import cannot have been part of the answer."""
    (path_of_rewards / "slow.py").write_text(
        "import time\ntime.sleep(20)\ndef reward(response, answer, problem_id):\n    return 1.0\n"
    )
    with WorkerPool(RewardPoolConfig(num_workers=1, timeout_s=10), "slow:reward") as pool:
        verdicts = pool.judge_now([Request("python", "", "", path="slow:reward") for _ in range(2)])
    assert verdicts[-1].reward == 1.0


def test_a_users_function_that_kills_its_worker_while_it_loads_is_refused_at_the_start(path_of_rewards: Path) -> None:
    (path_of_rewards / "gone.py").write_text("import os\nos._exit(3)\n")
    config = RewardConfig(kind="none", python=PythonRewardConfig(weight=1.0, path="gone:reward"))
    with pytest.raises(
        UserError, match=r"reward\.python\.path=gone:reward: a reward worker did not start: exit code 3"
    ):
        Rewards(config, str, 10).check([])


def test_what_a_users_function_started_is_killed_with_its_worker(path_of_rewards: Path) -> None:
    (path_of_rewards / "starts.py").write_text(
        "import subprocess, pathlib\n"
        "def reward(response, answer, problem_id):\n"
        "    child = subprocess.Popen(['sleep', '1000'])\n"
        "    pathlib.Path(response).write_text(str(child.pid))\n"
        "    child.wait()\n"
    )
    pid_file = path_of_rewards / "pid"
    with WorkerPool(RewardPoolConfig(num_workers=1, timeout_s=10), "starts:reward") as pool:
        verdict = pool.judge_now([Request("python", "", str(pid_file), path="starts:reward")])[0]
        assert verdict.reason == "not judged within 10 s (reward.pool.timeout_s)"
    child = int(pid_file.read_text())
    assert until(lambda: not psutil.pid_exists(child) or psutil.Process(child).status() == psutil.STATUS_ZOMBIE)


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ("raise KeyError('no')", "KeyError: 'no'"),
        ("return 'good'", "returned 'good': expected a finite number"),
        ("return float('nan')", "returned nan: expected a finite number"),
        ("return True", "returned True: expected a finite number"),
    ],
)
def test_a_broken_user_function_is_an_error_and_not_a_reward_of_0(
    path_of_rewards: Path, body: str, message: str
) -> None:
    (path_of_rewards / "broken.py").write_text(f"def reward(response, answer, problem_id):\n    {body}\n")
    with WorkerPool(RewardPoolConfig(num_workers=1, timeout_s=60)) as pool, pytest.raises(RewardError, match=message):
        pool.judge_now([Request("python", "", "", path="broken:reward")])


def test_lone_surrogates_are_judged(pool: WorkerPool) -> None:
    assert pool.judge_now([math("5", "\ud800 \\boxed{5}")])[0].reward == 1.0


def test_a_truth_that_nothing_could_be_compared_with_is_refused(pool: WorkerPool) -> None:
    check_golds(pool, [("p1", "42"), ("p2", r"\text{Evelyn}"), ("p3", r"\frac{1}{2}"), ("p4", "x^2+1")])
    check_golds(pool, [("p5", "41 apples + 1 more.\n#### 42")])  # a solution, of which the judge reads the answer
    for truth in ("", "?", r"\frac{", "9^{9^{9^9}}"):
        with pytest.raises(UserError, match=r"data: problem p2: the answer .* cannot be judged: .*; correct or drop"):
            check_golds(pool, [("p1", "42"), ("p2", truth)])


def test_a_judge_that_meets_a_bad_truth_raises(pool: WorkerPool) -> None:
    with pytest.raises(RewardError, match="no reading"):
        pool.judge_now([math(r"\frac{", r"\boxed{5}")])


def test_workers_end_when_their_parent_is_killed_in_the_middle_of_an_answer() -> None:
    script = (
        "import time\n"
        "from a3po_megatron.config.reward import RewardPoolConfig\n"
        "from a3po_megatron.reward.judge import MathSettings\n"
        "from a3po_megatron.reward.pool import WorkerPool\n"
        "from a3po_megatron.reward.worker import Request\n"
        "pool = WorkerPool(RewardPoolConfig(num_workers=1, timeout_s=100))\n"
        "pool.judge_now([Request('math', '5', '5', MathSettings())])\n"
        f"pool.submit(Request('math', '5', r'{HANGS}', MathSettings()))\n"
        "import psutil\n"
        "worker = psutil.Process(*pool.pids())\n"
        "before = worker.cpu_times().user\n"
        "while worker.cpu_times().user < before + 0.3:\n"  # it is at work on what hangs
        "    time.sleep(0.05)\n"
        "print(worker.pid, flush=True)\n"
        "time.sleep(100)\n"
    )
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    parent = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True, env=environment)
    try:
        assert parent.stdout is not None
        worker = psutil.Process(int(parent.stdout.readline()))
        assert worker.is_running()
    finally:
        parent.kill()
        parent.wait()
    assert until(lambda: not worker.is_running() or worker.status() == psutil.STATUS_ZOMBIE)


def test_importing_the_rewards_imports_neither_sympy_nor_torch() -> None:
    code = "import sys, a3po_megatron.reward.build; print([m for m in ('sympy', 'math_verify', 'torch') if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert (done.stdout.strip(), done.stderr) == ("[]", "")
