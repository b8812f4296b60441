"""The actor of a run: Megatron-core ranks that train on batches from the controller and publish weights to the fleet.

    python -m recipes.actor CONFIG.yaml [actor.tensor_parallel=2 ...] [--print-config]
    on each of two nodes: python -m recipes.actor CONFIG.yaml --nodes 2 --node-rank I --master FIRST_NODE:PORT

Starts the ranks of its node; under torchrun it is a rank. Finds the controller at controller.host and controller.port. Writes
checkpoints/ and model/, a Hugging Face folder, below `run.dir`. Ends with exit code 0 when the run is over, 2 for a
wrong setting or file, 1 for anything else; the last line says why.
"""

import argparse
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from a3po_megatron.actor.hf_folder import HFFolder
from a3po_megatron.config.check import check_train
from a3po_megatron.config.load import load_config, to_yaml
from a3po_megatron.config.model_shape import ModelShape, read_model_shape
from a3po_megatron.config.schema import TrainConfig
from a3po_megatron.controller.build import check_controller
from a3po_megatron.errors import UserError, say_why
from a3po_megatron.launch.ranks import Nodes, exit_code_of, is_rank, run_ranks
from a3po_megatron.run_token import read_run_token


def main(arguments: Sequence[str]) -> int:
    """Check everything that can be checked without an engine, then start the ranks, or train as one."""
    parser = argparse.ArgumentParser(prog="python -m recipes.actor", description=__doc__.splitlines()[0])
    parser.add_argument("config", help="YAML file of the run")
    parser.add_argument("overrides", nargs="*", help="settings to change, for example algorithm.method=recompute")
    parser.add_argument("--print-config", action="store_true", help="print the resolved settings and stop")
    parser.add_argument("--nodes", type=int, default=1, help="nodes that share the ranks evenly (default: %(default)s)")
    parser.add_argument("--node-rank", type=int, default=0, help="which of them this is, from 0")
    parser.add_argument("--master", default="", metavar="HOST:PORT", help="where node 0 listens")
    options = parser.parse_intermixed_args(arguments)
    config = load_config(TrainConfig, options.config, options.overrides)
    shape = read_model_shape(config.model.path)
    check_controller(config)
    check_train(config, shape)
    HFFolder(config.model.path, shape)
    if options.print_config:
        print(to_yaml(config), end="")
        return 0
    token = read_run_token(Path(config.run.dir))
    if not is_rank():
        nodes = Nodes(options.nodes, options.node_rank, options.master)
        return run_ranks("recipes.actor", [options.config, *options.overrides], config.actor.world_size, nodes)
    try:
        train_as_rank(config, shape, token)
    except UserError:
        raise
    except Exception as error:
        let_others_speak(error)
        return say_why(error)
    return 0


def train_as_rank(config: TrainConfig, shape: ModelShape, token: str) -> None:
    """Train as one rank; rank 0 talks to the controller."""
    from a3po_megatron.actor import device

    device.start(config.actor)  # before the import of megatron below
    from a3po_megatron.actor.training import describe, train
    from a3po_megatron.controller.link import ActorLink

    if os.environ["RANK"] != "0":
        train(config, shape, None)
        device.stop()
        return
    print(describe(config), flush=True)
    with ActorLink(config.controller, token) as link:
        version = train(config, shape, link)
    device.stop()
    print(f"actor: finished at version {version}; model in {Path(config.run.dir) / 'model'}", flush=True)


def let_others_speak(error: Exception) -> None:
    """Wait a little where another rank went away: it says why, and torchrun ends this one before it adds its own."""
    from a3po_megatron.actor.control import RunFailed

    if (isinstance(error, RunFailed) or "onnection" in str(error)) and os.environ["RANK"] != "0":
        time.sleep(2)


if __name__ == "__main__":
    sys.exit(exit_code_of(lambda: main(sys.argv[1:])))
