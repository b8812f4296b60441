"""`recipes/evaluate.py` with a stand-in for vLLM: python -m tests.unit.evaluate.run_evaluate MODE [arguments of the recipe]."""

import sys
from pathlib import Path

from a3po_megatron.errors import exit_on_user_error
from a3po_megatron.rollout import supervisor
from recipes.evaluate import main

MODE = sys.argv.pop(1)
FAKE_SERVER = str(Path(__file__).parents[1] / "rollout" / "fake_server.py")


def fake_command(config, model_path, device, port, seed) -> list[str]:
    return [sys.executable, FAKE_SERVER, str(port), MODE]


supervisor.server_command = fake_command
sys.exit(exit_on_user_error(lambda: main(sys.argv[1:])))
