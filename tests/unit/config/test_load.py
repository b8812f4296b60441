"""Reading settings: every fault is one clear line."""

import dataclasses
from pathlib import Path

import pytest

from a3po_megatron.config.load import engine_versions, load_config, save_run_record, to_yaml
from a3po_megatron.config.schema import PretrainConfig
from a3po_megatron.errors import UserError, exit_on_user_error


@pytest.fixture
def config_file(tmp_path: Path) -> Path:
    path = tmp_path / "run.yaml"
    path.write_text("recipe: pretrain\nrun: {num_steps: 7}\nactor: {tensor_parallel: 2}\n")
    return path


def test_file_then_overrides_then_defaults(config_file: Path) -> None:
    config = load_config(PretrainConfig, config_file, ["run.num_steps=9", "optimizer.lr=1e-3", "actor.packed=false"])
    assert (config.run.num_steps, config.actor.tensor_parallel, config.optimizer.lr) == (9, 2, 1e-3)
    assert config.actor.packed is False
    assert config.actor.pipeline_parallel == 1


def test_settings_are_frozen(config_file: Path) -> None:
    config = load_config(PretrainConfig, config_file)
    with pytest.raises(dataclasses.FrozenInstanceError):
        config.run.num_steps = 3  # type: ignore[misc]


def test_resolved_settings_read_back_equal(config_file: Path, tmp_path: Path) -> None:
    config = load_config(PretrainConfig, config_file, ["optimizer.lr=0.003"])
    (tmp_path / "again.yaml").write_text(to_yaml(config))
    assert load_config(PretrainConfig, tmp_path / "again.yaml") == config


def test_run_record_holds_settings_and_engine_versions(config_file: Path, tmp_path: Path) -> None:
    config = load_config(PretrainConfig, config_file)
    save_run_record(config, tmp_path / "run")
    assert load_config(PretrainConfig, tmp_path / "run" / "config.yaml") == config
    assert "megatron-core: 0.19.2" in (tmp_path / "run" / "versions.yaml").read_text()
    assert engine_versions().keys() >= {"python", "torch", "vllm", "transformer-engine"}


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["run.num_stepz=3"], "unknown key 'run.num_stepz'; did you mean 'run.num_steps'?"),
        (["actr.tensor_parallel=2"], "unknown key 'actr'; did you mean 'actor'?"),
        (["actor.zzz=2"], "unknown key 'actor.zzz'; known here: device, dtype, tensor_parallel"),
        (["run.num_steps=many"], "run.num_steps: Value 'many' of type 'str' could not be converted to Integer"),
        (["run.num_steps=1.5"], "run.num_steps: Value '1.5' of type 'float' could not be converted to Integer"),
        (["actor.device=tpu"], "actor.device: Invalid value 'tpu', expected one of ['auto', 'cpu', 'cuda']"),
        (["recipe=train"], "recipe: Invalid value 'train'"),
        (["run.num_steps"], "override 'run.num_steps': expected key=value"),
        (["=3"], "override '=3': expected key=value"),
        (["run=3"], "run"),
        (["actor.tensor_parallel=[1"], "actor.tensor_parallel"),
    ],
)
def test_a_bad_override_is_named_in_one_line(config_file: Path, overrides: list[str], message: str) -> None:
    with pytest.raises(UserError) as caught:
        load_config(PretrainConfig, config_file, overrides)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("run: {num_stepz: 3}", "unknown key 'run.num_stepz'"),
        ("run: [1, 2", "not valid YAML"),
        ("- 1\n- 2\n", "expected settings (key: value), found a list"),
        ("run: {num_steps: x}", "run.num_steps"),
        ("run:\n  dir: ???\n", "run.dir"),
    ],
)
def test_a_bad_file_is_named_in_one_line(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "bad.yaml"
    path.write_text(text)
    with pytest.raises(UserError) as caught:
        load_config(PretrainConfig, path)
    assert message in str(caught.value)
    assert "bad.yaml" in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"none\.yaml: cannot read the configuration file: No such file"):
        load_config(PretrainConfig, tmp_path / "none.yaml")


def test_a_user_error_becomes_one_line_and_exit_code_2(capsys: pytest.CaptureFixture[str]) -> None:
    def main() -> int:
        raise UserError("actor.tensor_parallel=3: reason; fix")

    assert exit_on_user_error(main) == 2
    assert capsys.readouterr().err == "error: actor.tensor_parallel=3: reason; fix\n"
