"""`recipes/rollout.py` with a stand-in for vLLM: python run_supervisor.py MODE [arguments of the recipe].

MODE is one of `fake_server.py`, or `first_dies`: server 0 does while it starts, the others are good.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[3]))

from a3po_megatron.config.schema import RunConfig
from a3po_megatron.errors import exit_on_user_error
from a3po_megatron.rollout import supervisor
from recipes.rollout import main

MODE = sys.argv.pop(1)
FAKE_SERVER = str(Path(__file__).with_name("fake_server.py"))


def fake_command(config, model_path, device, port, seed) -> list[str]:
    mode = ("dies" if seed == RunConfig.seed else "good") if MODE == "first_dies" else MODE
    return [sys.executable, FAKE_SERVER, str(port), mode]


supervisor.server_command = fake_command
sys.exit(exit_on_user_error(lambda: main(sys.argv[1:])))
