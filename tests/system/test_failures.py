"""However a run ends: a clear last line, a non-zero exit code, no process, port or shared memory left."""

import socket
from pathlib import Path

import pytest

from tests.golden.settings import overrides
from tests.system.runs import DEADLINE_S, Finished, same_steps, start

pytestmark = pytest.mark.timeout(2 * DEADLINE_S + 60)  # a start or some steps, and the end
LONG = "run.num_steps=500"


def kill_after(steps: int, role: str, folder: Path, model: Path, *settings: str) -> Finished:
    """Kill a role of a run once it has trained these steps, and check what is said and left."""
    with start(folder, model, *settings, LONG) as running:
        running.wait_for_steps(steps)
        finished = running.kill(role)
        assert finished.exit_code == 1
        assert finished.last_line().startswith(f"error: the {role} was killed by SIGKILL; its whole log: ")
        assert running.nothing_is_left()
        return finished


# A run takes half a minute to start: each of the three that lose a role shows first how it trains.


def test_a_lockstep_run_repeats_another_with_its_seed_and_a_killed_actor_ends_it(tmp_path, random_model, lockstep):
    again = kill_after(5, "actor", tmp_path / "run", random_model, *overrides("loglinear"))
    same = same_steps(again.texts[:5], lockstep.texts[:5])  # the last two come from versions 1 and 2
    for name in ("loss", "grad_norm", "reward/mean", "staleness/mean"):
        assert again.column(name)[:same] == pytest.approx(lockstep.column(name)[:same], abs=1e-5)


def test_recompute_needs_a_forward_pass_more_a_microbatch_and_a_killed_controller_ends_it(
    tmp_path, random_model, lockstep
):
    recompute = kill_after(3, "controller", tmp_path / "run", random_model, *overrides("recompute"))
    assert recompute.column("forward_passes")[:3] == [2 * passes for passes in lockstep.column("forward_passes")[:3]]
    assert recompute.column("staleness/max")[:3] == lockstep.column("staleness/max")[:3] == [0, 1, 2]


def test_sync_needs_no_other_passes_than_loglinear_and_a_killed_rollout_ends_it(tmp_path, random_model, lockstep):
    """Its server has two workers: only then do vLLM's processes share memory, which nobody removes when they are killed."""
    settings = (*overrides("sync"), "rollout.tensor_parallel=2")
    finished = kill_after(3, "rollout", tmp_path / "run", random_model, *settings)
    assert finished.shared_memory, "vLLM's processes shared none: this test saw nothing"
    assert finished.column("forward_passes")[:3] == lockstep.column("forward_passes")[:3]
    assert max(finished.column("staleness/max")) == 0


def test_ctrl_c_ends_the_run(tmp_path, random_model):
    with start(tmp_path / "run", random_model, LONG) as running:
        running.wait_until(lambda: running.has_process("VLLM::Engine"))  # in the middle of the start
        running.interrupt()
        finished = running.finish()
        assert finished.exit_code == 130
        assert finished.last_line() == "error: stopped by SIGINT; every role has been ended"
        assert running.nothing_is_left()


def test_a_port_in_use_is_told_before_anything_starts(tmp_path, random_model):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with start(tmp_path / "run", random_model, f"controller.port={port}") as running:
            finished = running.finish()
            assert finished.exit_code == 2
            assert finished.output.startswith(f"error: controller.port={port}: cannot listen on 127.0.0.1:{port}: ")
            assert len(finished.output.splitlines()) == 1
            assert not running.folder.exists()


def test_an_unreadable_data_file_is_told_in_one_line(tmp_path, random_model):
    missing = tmp_path / "train.jsonl"
    task = ("data.task=problems", "reward.kind=numeric", "data.prompt.style=plain", f"data.train.gsm8k.path={missing}")
    with start(tmp_path / "run", random_model, *task) as running:
        finished = running.finish()
        assert finished.exit_code == 2
        assert finished.last_line() == f"error: {missing}: cannot read the file: No such file or directory"
        assert running.nothing_is_left()


def test_the_folder_of_another_run_is_left_alone(tmp_path, random_model):
    folder = tmp_path / "run"
    folder.mkdir()
    (folder / "metrics.jsonl").write_text("{}\n")
    with start(folder, random_model) as running:
        finished = running.finish()
    assert finished.exit_code == 2
    assert "already holds a run" in finished.last_line()
    assert [path.name for path in folder.iterdir()] == ["metrics.jsonl"]
