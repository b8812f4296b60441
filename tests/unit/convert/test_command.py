"""The command line: one report, one line for a mistake, and exit codes."""

import importlib
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from a3po_megatron.actor import bridge
from a3po_megatron.config.load import load_config, save_run_record
from a3po_megatron.config.schema import PretrainConfig
from a3po_megatron.convert.megatron import hf_to_megatron, layout_of
from a3po_megatron.errors import UserError
from recipes import export
from tests.unit.convert.tiny import make_folder

CHECKOUT = Path(__file__).resolve().parents[3]


def call(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "tools/convert_checkpoint.py", *map(str, arguments)]
    environment = {"PYTHONPATH": str(CHECKOUT), "OMP_NUM_THREADS": "1"}
    return subprocess.run(command, cwd=CHECKOUT, env=environment, capture_output=True, text=True, timeout=100)


def test_a_conversion_reports_what_it_wrote_and_its_peak_memory(tmp_path: Path) -> None:
    source, destination = make_folder(tmp_path / "hf"), tmp_path / "megatron"
    done = call("hf-to-megatron", source, destination, "--tensor-parallel", "2", "--pipeline-parallel", "2")
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith(f"{destination}: 47 tensors, 0.0 M parameters, float32, ")
    assert "MB above the imports, largest tensor" in done.stdout
    assert (destination / "complete.json").exists()


def test_an_export_says_in_one_line_what_it_wrote_where(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model, run = make_folder(tmp_path / "hf"), tmp_path / "run"
    save_run_record(load_config(PretrainConfig, None, [f"model.path={model}"]), run)
    checkpoint, destination = run / "checkpoints" / "step_000001", tmp_path / "exported"
    hf_to_megatron(model, checkpoint, layout_of(1, 1))
    assert export.main([str(checkpoint), str(destination)]) == 0
    assert capsys.readouterr().out == (
        f"{destination}: 47 tensors, 0.0 M parameters, float32, 0 MB, from {checkpoint}; "
        "left out: the state of the program that wrote it (1 keys)\n"
    )
    assert (destination / "model.safetensors").exists()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--tensor-parallel", "2"], "--tensor-parallel 2: megatron-bridge has its own way"),
        (["--pipeline-parallel", "2"], "--pipeline-parallel 2: megatron-bridge has its own way"),
        (["--expert-parallel", "2"], "leave --expert-parallel or --bridge out"),
        (["--dtype", "bfloat16"], "--dtype bfloat16: megatron-bridge has its own way"),
        (["--max-shard-mb", "100"], "--max-shard-mb 100: megatron-bridge has its own way"),
        ([], "there: exists already; remove it or choose another destination"),
    ],
)
def test_what_the_bridge_would_ignore_is_refused(
    options: list[str], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(CHECKOUT / "tools"))
    tool = importlib.import_module("convert_checkpoint")
    monkeypatch.setattr(bridge, "_auto_bridge", lambda: pytest.fail("the bridge was started"))
    folder = make_folder(tmp_path / "hf")
    if not options:
        (tmp_path / "there").mkdir()
    to_hf = "--max-shard-mb" in options
    command = ["megatron-to-hf" if to_hf else "hf-to-megatron", str(folder), str(tmp_path / "there"), "--bridge"]
    with pytest.raises(UserError) as caught:
        tool.run(tool.parse([*command, *options]))
    assert message in str(caught.value)


def test_a_conversion_by_the_bridge_is_reported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.syspath_prepend(str(CHECKOUT / "tools"))
    tool = importlib.import_module("convert_checkpoint")
    converted: list[tuple[str, str]] = []
    stand_in = SimpleNamespace(import_ckpt=lambda source, destination: converted.append((source, destination)))
    monkeypatch.setattr(bridge, "_auto_bridge", lambda: stand_in)
    names = str(make_folder(tmp_path / "hf")), str(tmp_path / "there")
    assert tool.run(tool.parse(["hf-to-megatron", *names, "--bridge"])) == 0
    assert converted == [names]
    assert capsys.readouterr().out.startswith(f"{names[1]}: written by megatron-bridge in ")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["hf-to-megatron", "nowhere", "there"], "error: nowhere: no such file or folder"),
        (
            ["megatron-to-hf", "docs", "there"],
            "error: docs: no config.json in it and no run around it; name the model's",
        ),
        (["hf-to-megatron", "docs", "there", "--bridge"], "error: --bridge: megatron.bridge is not installed here"),
    ],
)
def test_a_mistake_is_one_line_and_exit_code_2(arguments: list[str], message: str) -> None:
    done = call(*arguments)
    assert done.returncode == 2
    assert done.stderr.startswith(message)
    assert done.stderr.count("\n") == 1
