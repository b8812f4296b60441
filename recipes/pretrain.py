"""Supervised warm start on the arithmetic task, through the same actor that reinforcement learning trains.

    python -m recipes.pretrain configs/demo_warmstart.yaml [run.dir=... actor.tensor_parallel=2 ...] [--print-config]

Starts its own ranks; under torchrun it is a rank. Writes below `run.dir`: metrics.jsonl, checkpoints/, and model/, a Hugging
Face folder.
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from a3po_megatron.actor.weights_folder import open_weights
from a3po_megatron.checkpoint_folder import clean_up, newest_complete
from a3po_megatron.config.check import check_pretrain
from a3po_megatron.config.load import load_config, to_yaml
from a3po_megatron.config.model_shape import ModelShape, read_model_shape
from a3po_megatron.config.schema import PretrainConfig
from a3po_megatron.errors import UserError
from a3po_megatron.launch.ranks import exit_code_of, is_rank, run_ranks, speaks_for_all


def main(arguments: Sequence[str]) -> int:
    """Check everything that can be checked without an engine, then start the ranks, or train as one."""
    parser = argparse.ArgumentParser(prog="python -m recipes.pretrain", description=__doc__.splitlines()[0])
    parser.add_argument("config", help="a YAML file, for example configs/demo_warmstart.yaml")
    parser.add_argument("overrides", nargs="*", help="settings to change, for example actor.tensor_parallel=2")
    parser.add_argument("--print-config", action="store_true", help="print the resolved settings and stop")
    options = parser.parse_intermixed_args(arguments)
    config = load_config(PretrainConfig, options.config, options.overrides)
    shape = read_model_shape(config.model.path)
    check_pretrain(config, shape)
    if config.model.init == "pretrained":
        open_weights(config.model.path, shape)
    if options.print_config:
        print(to_yaml(config), end="")
        return 0
    if speaks_for_all():
        check_run_folder(config)
    if is_rank():
        return train(config, shape)
    return run_ranks("recipes.pretrain", arguments, config.actor.world_size)


def check_run_folder(config: PretrainConfig) -> None:
    """Refuse to write over another run, and to resume where there is nothing."""
    folder = Path(config.run.dir)
    if not config.run.resume and (folder / "metrics.jsonl").exists():
        raise UserError(f"run.dir={folder} already holds a run; name another, remove it, or set run.resume=true")
    if config.run.resume:
        notes = clean_up(folder / "checkpoints")
        newest, faults = newest_complete(folder / "checkpoints")
        notes += faults
        if newest is None:
            raise UserError(
                "; ".join([f"run.resume=true: no complete checkpoint below {folder / 'checkpoints'}", *notes])
            )
        for note in notes:
            print(f"note: {note}; {newest.name} is used", file=sys.stderr)


def train(config: PretrainConfig, shape: ModelShape) -> int:
    """Train as one rank."""
    from a3po_megatron.actor import device

    device.start(config.actor)  # before the import of megatron below
    from a3po_megatron.actor.pretraining import pretrain

    pretrain(config, shape)
    device.stop()
    return 0


if __name__ == "__main__":
    sys.exit(exit_code_of(lambda: main(sys.argv[1:])))
