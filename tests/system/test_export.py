"""A run's checkpoint becomes a Hugging Face folder and is evaluated as the run itself evaluates."""

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file

from a3po_megatron.checkpoint_folder import newest_complete
from tests.system.runs import DEADLINE_S, ROOT, start

ENVIRONMENT = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}


def call(*arguments: str, deadline_s: float = DEADLINE_S) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, *arguments]
    return subprocess.run(command, cwd=ROOT, env=ENVIRONMENT, capture_output=True, text=True, timeout=deadline_s)


def checkpoint_of(model: Path) -> Path:
    newest, _ = newest_complete(model.parent / "checkpoints")
    assert newest is not None
    return newest


@pytest.mark.timeout(2 * DEADLINE_S + 60)
def test_an_exported_checkpoint_is_the_runs_model_bit_for_bit(model: Path, tmp_path: Path) -> None:
    destination = tmp_path / "exported"
    exported = call("-m", "recipes.export", str(checkpoint_of(model)), str(destination))
    assert exported.returncode == 0, exported.stdout + exported.stderr
    expected, found = (load_file(folder / "model.safetensors") for folder in (model, destination))
    assert expected.keys() == found.keys()
    for name, tensor in expected.items():
        np.testing.assert_array_equal(found[name], tensor, err_msg=name)
    assert json.loads((destination / "config.json").read_text()) == json.loads((model / "config.json").read_text())
    again = call("-m", "recipes.export", str(checkpoint_of(model)), str(destination))
    assert (again.returncode, again.stderr) == (
        2,
        f"error: {destination}: exists already; remove it or choose another destination\n",
    )


@pytest.mark.full
@pytest.mark.timeout(1200)
def test_a_checkpoint_is_evaluated_on_its_runs_own_problems(model: Path, tmp_path: Path) -> None:
    settings = [
        "rollout.max_model_len=16",
        "rollout.max_response_tokens=4",
        "rollout.kv_cache_bytes=67108864",
        "max_problems=50",
    ]
    done = call("recipes/evaluate.py", str(checkpoint_of(model)), f"dir={tmp_path / 'report'}", *settings)
    assert done.returncode == 0, done.stdout + done.stderr
    report = json.loads((tmp_path / "report" / "report.json").read_text())
    assert (report["kind"], list(report["sets"])) == ("checkpoint", ["arithmetic"])
    assert report["sets"]["arithmetic"]["num_problems"] == 50
    assert report["overall"]["pass@1"]["value"] > 0.1
    assert not list((tmp_path / "report").glob("exported-*"))


@pytest.mark.full
@pytest.mark.timeout(1200)
def test_a_run_that_goes_on_is_evaluated_and_does_not_notice(model: Path, tmp_path: Path) -> None:
    with start(tmp_path / "run", model, "run.num_steps=400") as running:
        running.wait_for_steps(2)
        settings = [f"dir={tmp_path / 'report'}", "num_samples=2", "temperature=1", "max_problems=200"]
        done = call("recipes/evaluate.py", str(tmp_path / "run"), *settings)
        assert done.returncode == 0, done.stdout + done.stderr
        steps = len((tmp_path / "run" / "metrics.jsonl").read_text().splitlines())
        running.wait_for_steps(steps + 2)
        running.interrupt()
        assert running.finish().exit_code == 130
    report = json.loads((tmp_path / "report" / "report.json").read_text())
    versions = report["responses_by_versions"]
    assert sum(entry["responses"] for entry in versions) == 400
    assert min(entry["oldest"] for entry in versions) >= 1
    assert max(entry["newest"] for entry in versions) > min(entry["oldest"] for entry in versions)
