"""A checkpoint of a run as a Hugging Face folder: `python -m recipes.export RUN/checkpoints/step_000100 DESTINATION`.

Reads the run's config.yaml, two folders above the checkpoint. Starts its own ranks, in the layout of the run or another:
`actor.tensor_parallel=2 actor.data_parallel=1 ...`. Ends with exit code 2 for a wrong setting or folder.
"""

import argparse
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from a3po_megatron.checkpoint_folder import check_complete
from a3po_megatron.config.check import check_actor
from a3po_megatron.config.load import load_config
from a3po_megatron.config.model_shape import ModelShape, read_model_shape
from a3po_megatron.config.schema import Config
from a3po_megatron.errors import UserError
from a3po_megatron.evaluate.target import RUN_FILE, read_run_config
from a3po_megatron.launch.ranks import exit_code_of, is_rank, run_ranks, speaks_for_all


def main(arguments: Sequence[str]) -> int:
    """Check everything that can be checked without an engine, then start the ranks, or export as one."""
    parser = argparse.ArgumentParser(prog="python -m recipes.export", description=__doc__.splitlines()[0])
    parser.add_argument("checkpoint", help="RUN/checkpoints/step_N")
    parser.add_argument("destination", help="folder to write; must not exist")
    parser.add_argument(
        "overrides", nargs="*", help="settings of the run to change, for example actor.tensor_parallel=2"
    )
    options = parser.parse_intermixed_args(arguments)
    checkpoint, destination = Path(options.checkpoint), Path(options.destination)
    check_complete(checkpoint)
    run = checkpoint.resolve().parent.parent
    config = load_config(type(read_run_config(run)), run / RUN_FILE, options.overrides)
    shape = read_model_shape(config.model.path)
    check_actor(config.actor, shape)
    if speaks_for_all() and destination.exists():
        raise UserError(f"{destination}: is there already; name a folder that is not")
    if not is_rank():
        return run_ranks("recipes.export", arguments, config.actor.world_size)
    export_as_rank(config, shape, checkpoint, destination)
    return 0


def export_as_rank(config: Config, shape: ModelShape, checkpoint: Path, destination: Path) -> None:
    """Load and write as one rank."""
    from a3po_megatron.actor import device

    device.start(config.actor)  # before the import of megatron below
    from a3po_megatron.actor.actor import Actor
    from a3po_megatron.actor.checkpoint import load_checkpoint
    from a3po_megatron.actor.export import export_hf_folder

    # Random weights are made, and replaced, without reading a file.
    actor = Actor(shape, replace(config.model, init="random"), config.actor, config.optimizer, config.run.seed)
    load_checkpoint(actor, checkpoint)
    export_hf_folder(actor, Path(config.model.path), destination)
    actor.close()
    device.stop()


if __name__ == "__main__":
    sys.exit(exit_code_of(lambda: main(sys.argv[1:])))
