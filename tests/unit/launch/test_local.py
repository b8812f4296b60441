"""The launcher before and around the roles: the run's folder, its secret, and how an ending is told."""

import stat
from pathlib import Path

import pytest

from a3po_megatron.config.controller import ControllerConfig
from a3po_megatron.config.load import load_config
from a3po_megatron.config.schema import RunConfig, TrainConfig
from a3po_megatron.errors import UserError
from a3po_megatron.launch import local
from a3po_megatron.launch.ports import free_port
from recipes.run_local import resolve

ROOT = Path(__file__).parents[3]


def config_in(folder: Path, *, resume: bool = False) -> TrainConfig:
    port = free_port("controller.port", "127.0.0.1")
    return TrainConfig(run=RunConfig(dir=str(folder), resume=resume), controller=ControllerConfig(port=port))


def test_the_token_is_for_this_user_only_and_new_for_every_run(tmp_path):
    first = local.prepare(config_in(tmp_path / "a"))
    second = local.prepare(config_in(tmp_path / "b"))
    path = tmp_path / "a" / "token"
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert path.read_text().strip() == first != second
    assert len(first) == 64


def test_the_folder_of_another_run_is_refused_but_not_that_of_an_attempt_without_a_step(tmp_path):
    (tmp_path / "metrics.jsonl").touch()
    local.prepare(config_in(tmp_path))
    (tmp_path / "metrics.jsonl").write_text("{}\n")
    with pytest.raises(UserError, match="already holds a run"):
        local.prepare(config_in(tmp_path))
    local.prepare(config_in(tmp_path, resume=True))
    with pytest.raises(UserError, match="holds no run to go on with"):
        local.prepare(config_in(tmp_path / "empty", resume=True))


def test_port_0_becomes_one_port_for_every_role(tmp_path):
    file = tmp_path / "run.yaml"
    file.write_text("controller: {port: 0}\n")
    config, for_roles = resolve(str(file), ["run.num_steps=7"])
    assert config.controller.port > 0
    assert load_config(TrainConfig, for_roles[0], for_roles[1:]) == config
    config, for_roles = resolve(str(file), ["controller.port=8711"])
    assert (config.controller.port, for_roles) == (8711, [str(file), "controller.port=8711"])


@pytest.mark.parametrize(
    ("script", "exit_code", "reason", "log"),
    [
        (
            "print('.'); print('error: data.train.mine.path=x: not there'); exit(2)",
            2,
            "data.train.mine.path=x",
            [],
        ),
        ("print('why'); raise SystemExit(1)", 1, "the controller ended with exit code 1", ["why"]),
        ("import os; print('last'); os.kill(os.getpid(), 9)", 1, "the controller was killed by SIGKILL", ["last"]),
    ],
)
def test_an_ending_names_the_role_or_repeats_the_users_mistake(tmp_path, script, exit_code, reason, log):
    roles = local.Roles(tmp_path / "logs", {"PYTHONUNBUFFERED": "1"})
    role = roles.start("controller", ["-c", script], stop_s=1)
    role.process.wait(60)
    ending = local._failed(role)
    assert ending.exit_code == exit_code
    assert reason in ending.reason
    assert list(ending.log) == log
    roles.stop([])


def test_shipped_run_configs_parse_and_use_any_free_port():
    for name in ("demo.yaml", "smollm2_gsm8k_cpu.yaml"):
        assert load_config(TrainConfig, ROOT / "configs" / name).controller.port == 0
