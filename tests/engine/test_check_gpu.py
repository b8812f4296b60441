"""The GPU check at toy size on a CPU, and its reference against transformers."""

import importlib
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from a3po_megatron.errors import UserError

ROOT = Path(__file__).parents[2]
TOOL = ROOT / "tools/check_gpu.py"


@pytest.fixture
def tool(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(ROOT / "tools"))
    return importlib.import_module("check_gpu")


@pytest.mark.parametrize("name", ["dense", "biases", "experts"])
def test_the_plain_model_is_transformers(tool: Any, name: str, tmp_path: Path) -> None:
    """Float32 and a dozen tokens: rounding of the logits' sums, which are below 100."""
    fields = tool.TOY_SIZES.parity[name]
    shape, weights = tool.write_model(tmp_path, fields, "float32")
    model = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    for sequence in tool.random_sequences(shape, (12, 5)):
        tokens = torch.from_numpy(sequence.tokens)
        expected = model(tokens[None]).logits[0, :-1].log_softmax(-1).gather(-1, tokens[1:, None])[:, 0]
        found = importlib.import_module("plain_model").logprobs(shape, weights, tokens)
        torch.testing.assert_close(found, expected, atol=1e-4, rtol=0)


def test_a_check_out_of_bounds_is_not_ok(tool: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tool, "run_checks", lambda *arguments: {"parity": {"ok": False, "seconds": 0.0}})
    monkeypatch.setattr("a3po_megatron.actor.device.start", lambda actor: None)
    monkeypatch.setattr("a3po_megatron.actor.device.stop", lambda: None)
    monkeypatch.setattr(tool, "become_only_rank", lambda: None)
    assert tool.main(["--toy", "--device", "cpu"]) == 1


@pytest.mark.timeout(300)  # a process that imports torch and megatron, about a dozen seconds on a quiet core
def test_every_check_runs_at_toy_size() -> None:
    command = [sys.executable, str(TOOL), "--toy", "--device", "cpu", "--json"]
    run = subprocess.run(command, capture_output=True, text=True, timeout=280)
    assert run.returncode == 0, run.stderr
    found = json.loads(run.stdout)
    assert list(found) == [
        *(f"parity {model} {dtype}" for model in ("dense", "biases", "experts") for dtype in ("float32", "bfloat16")),
        "training",
        "proximal",
    ]
    assert all(figures["ok"] for name, figures in found.items() if name.startswith("parity"))
    assert found["training"]["tokens_per_s"] > 0
    assert found["proximal"]["ratio"] > 1
    assert found["training"]["model_flops_utilisation"] is None  # of a GPU only


@pytest.mark.skipif(torch.cuda.is_available(), reason="is about a machine without a GPU")
def test_without_a_gpu_it_says_so(tool: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tool, "become_only_rank", lambda: None)
    monkeypatch.setenv("WORLD_SIZE", "1")
    with pytest.raises(UserError, match=r"actor\.device=cuda: local rank 0 has no GPU"):
        tool.main([])
