"""The controller of a run: prompts, rewards, staleness, batches and evaluation between rollout fleet and actor.

    python -m recipes.controller CONFIG.yaml [controller.port=8701 ...]

Ends with exit code 0 when the actor is done, 2 for a wrong setting, file or row, 1 for anything else; the last line
says why.
"""

import argparse
import asyncio
import sys
from collections.abc import Sequence
from pathlib import Path

from a3po_megatron.config.load import load_config
from a3po_megatron.config.schema import TrainConfig
from a3po_megatron.controller.build import build_controller, check_controller
from a3po_megatron.controller.serve import RunStopped, bind, serve
from a3po_megatron.errors import FAILURE_EXIT_CODE, exit_on_user_error, say_why
from a3po_megatron.rollout.garbage import collect_rarely
from a3po_megatron.run_token import read_run_token


def main(arguments: Sequence[str]) -> int:
    """Parse, build, run; return the exit code."""
    parser = argparse.ArgumentParser(prog="python -m recipes.controller", description=__doc__.splitlines()[0])
    parser.add_argument("config", help="YAML file of the run")
    parser.add_argument("overrides", nargs="*", help="settings such as controller.schedule=lockstep")
    options = parser.parse_intermixed_args(arguments)
    config = load_config(TrainConfig, options.config, options.overrides)
    check_controller(config)
    collect_rarely()
    try:
        asyncio.run(run(config, read_run_token(Path(config.run.dir))))
    except RunStopped as stopped:
        print(f"controller: {stopped}", file=sys.stderr, flush=True)
        return FAILURE_EXIT_CODE
    except Exception as error:
        return say_why(error)
    return 0


async def run(config: TrainConfig, token: str) -> None:
    """Build the controller and serve until the actor is done."""
    listener = bind(config.controller.host, config.controller.port)  # before the files of another run are touched
    controller = build_controller(config, token)
    try:
        await serve(controller, token, listener)
    finally:
        await controller.parts.close_rewards()
        await controller.parts.fleet.aclose()


if __name__ == "__main__":
    sys.exit(exit_on_user_error(lambda: main(sys.argv[1:])))
