"""Serve the policy on this node: `python recipes/rollout.py CONFIG.yaml --controller URL [rollout.num_servers=2 ...]`.

Starts the node's vLLM servers, keeps them alive and registers them with the controller. Ends with exit code 0 on
SIGTERM, 130 on Ctrl-C, 2 for a wrong setting, 1 when the node cannot serve; no server outlives it.
"""

import argparse
import asyncio
import signal
import socket
import sys
from collections.abc import Sequence
from pathlib import Path

from a3po_megatron.config.address import is_url
from a3po_megatron.config.load import load_config
from a3po_megatron.config.schema import TrainConfig
from a3po_megatron.errors import UserError, exit_on_user_error, say_why
from a3po_megatron.rollout.controller_link import ControllerLink
from a3po_megatron.rollout.sampling import check_rollout
from a3po_megatron.rollout.server_args import server_device
from a3po_megatron.rollout.supervisor import Supervisor
from a3po_megatron.run_token import read_run_token


def main(arguments: Sequence[str]) -> int:
    """Parse, build, run; return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("config", help="YAML file of the run")
    parser.add_argument("overrides", nargs="*", help="settings such as rollout.num_servers=2")
    parser.add_argument("--controller", required=True, metavar="URL", help="for example http://127.0.0.1:8500")
    parser.add_argument("--node", default=socket.gethostname(), help="name of this node, unique in the run")
    parser.add_argument("--log-dir", type=Path, help="where the servers write their logs (default: logs in run.dir)")
    options = parser.parse_intermixed_args(arguments)
    config = load_config(TrainConfig, options.config, options.overrides)
    check_rollout(config.rollout)
    if not is_url(options.controller):
        raise UserError(f"--controller {options.controller}: expected a URL such as http://127.0.0.1:8500")
    run_dir = Path(config.run.dir)
    token = read_run_token(run_dir)
    supervisor = Supervisor(
        config.rollout,
        model_path=config.model.path,
        seed=config.run.seed,
        token=token,
        controller=ControllerLink(options.controller, token, timeout_s=config.rollout.control_timeout_s),
        log_dir=options.log_dir or run_dir / "logs",
        node=options.node,
        device=server_device(config.rollout),
        say=lambda line: print(f"rollout: {line}", flush=True),
    )
    try:
        number = asyncio.run(supervisor.run())
    except Exception as error:
        return say_why(error)
    return 0 if number == signal.SIGTERM else 128 + number


if __name__ == "__main__":
    sys.exit(exit_on_user_error(lambda: main(sys.argv[1:])))
