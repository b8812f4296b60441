"""The controller's side of the rollout room stays light: neither torch nor vllm is imported there."""

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]


@pytest.mark.parametrize(
    ("module", "absent"),
    [
        ("a3po_megatron.rollout.fleet", ("torch", "vllm")),
        ("a3po_megatron.rollout.supervisor", ("torch", "vllm")),
        ("a3po_megatron.rollout.middleware", ("torch", "vllm", "numpy")),
        ("a3po_megatron.rollout.weight_sender", ("vllm",)),
        ("a3po_megatron.rollout.weight_receiver", ("vllm",)),
    ],
)
def test_importing_a_module_leaves_out_the_heavy_ones(module, absent):
    program = f"import sys, {module}; print([name for name in {absent!r} if name in sys.modules])"
    result = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert result.returncode == 0, result.stderr
    assert result.stdout.strip() == "[]"
