"""A checkpoint of a run as a Hugging Face folder: `python -m recipes.export RUN/checkpoints/step_000100 DESTINATION`.

Written at any layout, it is read in this process, one parameter at a time. Config and tokenizer are those of the model that the
run's config.yaml, two folders above the checkpoint, names; for a checkpoint elsewhere see tools/convert_checkpoint.py. Prints
one line: what was written where, and what the checkpoint holds besides.
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from a3po_megatron.checkpoint_folder import check_complete
from a3po_megatron.errors import exit_on_user_error
from a3po_megatron.evaluate.target import read_run_config, run_of


def main(arguments: Sequence[str]) -> int:
    """Check, convert, report; ends with exit code 2 for a wrong folder."""
    parser = argparse.ArgumentParser(prog="python -m recipes.export", description=__doc__.splitlines()[0])
    parser.add_argument("checkpoint", type=Path, help="RUN/checkpoints/step_N")
    parser.add_argument("destination", type=Path, help="folder to write; must not exist")
    options = parser.parse_args(arguments)
    check_complete(options.checkpoint)
    model = Path(read_run_config(run_of(options.checkpoint)).model.path)
    from a3po_megatron.convert.megatron import megatron_to_hf  # torch: after the checks

    summary, others = megatron_to_hf(options.checkpoint, model, options.destination)
    left_out = "".join(f"; left out: {what} ({count} keys)" for what, count in others.items())
    print(f"{options.destination}: {summary}, from {options.checkpoint}{left_out}")
    return 0


if __name__ == "__main__":
    sys.exit(exit_on_user_error(lambda: main(sys.argv[1:])))
