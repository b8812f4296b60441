"""The controller's side starts in a second and on machines without the engines: it imports none of them."""

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_the_controllers_side_imports_neither_torch_nor_vllm_nor_megatron() -> None:
    modules = "recipes.controller", "a3po_megatron.controller.link", "a3po_megatron.data.load", "a3po_megatron.wire"
    heavy = "torch", "vllm", "megatron", "transformers"
    script = f"import sys, {', '.join(modules)}; print([name for name in {heavy} if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert (done.stdout.strip(), done.stderr) == ("[]", "")
