"""DAPO's problems with the real tokenizer and a tiny random model: data, prompts, judge, dynamic sampling, one run."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from a3po_megatron.data.folder import data_folder
from a3po_megatron.errors import UserError

ROOT = Path(__file__).resolve().parents[2]

pytestmark = [pytest.mark.full, pytest.mark.timeout(900)]


def test_a_run_on_dapo_judges_replaces_and_evaluates(tmp_path: Path) -> None:
    try:
        tokenizer = data_folder() / "qwen3_tokenizer"
    except UserError as error:
        pytest.skip(str(error))
    model, run = tmp_path / "model", tmp_path / "run"
    make = [sys.executable, "tools/make_random_model.py", "configs/models/tiny_qwen3", str(tokenizer), str(model)]
    subprocess.run(make, cwd=ROOT, check=True, timeout=200, capture_output=True)
    command = [sys.executable, "recipes/run_local.py", "configs/tiny_qwen3_dapo_cpu.yaml", f"run.dir={run}"]
    command += [f"model.path={model}", "run.num_steps=2"]
    done = subprocess.run(command, cwd=ROOT, timeout=600, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows] == [0, 1]
    # A random model answers nothing: every group is replaced as often as may be, then kept without a signal.
    assert sum(row["sampling/kept_without_signal"] for row in rows) == 2 * 4
    assert all(row["optimizer_steps"] == 2 for row in rows)
    samples = [json.loads(line) for line in (run / "samples/step_000000.jsonl").read_text().splitlines()]
    assert all("Answer: $Answer" in json.dumps(sample) for sample in samples)
    evaluations = [json.loads(line) for line in (run / "evals.jsonl").read_text().splitlines()]
    assert set(evaluations[0]["sets"]) == {"aime24", "math500"}
    assert json.loads((run / "data_report.json").read_text())
