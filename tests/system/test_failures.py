"""However a run ends: a clear last line, a non-zero exit code, no process, port or shared memory left."""

import socket

import pytest

from tests.system.runs import start

pytestmark = pytest.mark.timeout(1000)
LONG = "run.num_steps=500"


@pytest.mark.parametrize("name", ["actor", "rollout", "controller"])
def test_a_killed_role_ends_the_run(tmp_path, model, name):
    with start(tmp_path / "run", model, LONG) as running:
        running.wait_for_steps(1)
        assert running.shared_memory, "vLLM's processes share some, else this test sees nothing"
        running.role(name).kill()
        finished = running.finish()
        assert finished.exit_code == 1
        assert finished.last_line().startswith(f"error: the {name} was killed by SIGKILL; its whole log: ")
        assert running.nothing_is_left()


def test_ctrl_c_ends_the_run(tmp_path, model):
    with start(tmp_path / "run", model, LONG) as running:
        running.wait_until(lambda: running.has_process("VLLM::Engine"))  # in the middle of the start
        running.interrupt()
        finished = running.finish()
        assert finished.exit_code == 130
        assert finished.last_line() == "error: stopped by SIGINT; every role has been ended"
        assert running.nothing_is_left()


def test_a_port_in_use_is_told_before_anything_starts(tmp_path, model):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with start(tmp_path / "run", model, f"controller.port={port}") as running:
            finished = running.finish()
            assert finished.exit_code == 2
            assert finished.output.startswith(f"error: controller.port={port}: cannot listen on 127.0.0.1:{port}: ")
            assert len(finished.output.splitlines()) == 1
            assert not running.folder.exists()


def test_an_unreadable_data_file_is_told_in_one_line(tmp_path, model):
    missing = tmp_path / "train.jsonl"
    task = ("data.task=problems", "reward.kind=numeric", "data.prompt.style=plain", f"data.train.gsm8k.path={missing}")
    with start(tmp_path / "run", model, *task) as running:
        finished = running.finish()
        assert finished.exit_code == 2
        assert finished.last_line() == f"error: {missing}: cannot read the file: No such file or directory"
        assert running.nothing_is_left()


def test_the_folder_of_another_run_is_left_alone(tmp_path, model):
    folder = tmp_path / "run"
    folder.mkdir()
    (folder / "metrics.jsonl").write_text("{}\n")
    with start(folder, model) as running:
        finished = running.finish()
    assert finished.exit_code == 2
    assert "already holds a run" in finished.last_line()
    assert [path.name for path in folder.iterdir()] == ["metrics.jsonl"]
