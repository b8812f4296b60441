"""Convert checkpoints between formats; each conversion is a sub-command. `--help` after one lists its options."""

import argparse
import sys
import time
from pathlib import Path

from a3po_megatron.errors import exit_on_user_error


def gguf_to_hf(arguments: argparse.Namespace) -> int:
    """Convert a GGUF file of the Llama type to a Hugging Face folder."""
    from a3po_megatron.convert.gguf import convert_gguf_to_hf  # torch: only when it is needed

    start = time.monotonic()
    summary = convert_gguf_to_hf(arguments.source, arguments.destination, arguments.dtype)
    print(
        f"{arguments.destination}: {summary.num_tensors} tensors, {summary.num_parameters / 1e6:.1f} M parameters, "
        f"{arguments.dtype}, {summary.num_bytes / 1e6:.0f} MB in {time.monotonic() - start:.1f} s"
    )
    return 0


def parse(argv: list[str]) -> argparse.Namespace:
    """Read the command line; `run` of the result is the chosen conversion."""
    parser = argparse.ArgumentParser(prog="convert_checkpoint.py", description=__doc__)
    commands = parser.add_subparsers(required=True, metavar="CONVERSION")
    gguf = commands.add_parser("gguf-to-hf", help=gguf_to_hf.__doc__, description=gguf_to_hf.__doc__)
    gguf.add_argument("source", type=Path, metavar="SRC.gguf")
    gguf.add_argument("destination", type=Path, metavar="DST", help="folder to make; must not exist")
    gguf.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32", help="default: %(default)s")
    gguf.set_defaults(run=gguf_to_hf)
    return parser.parse_args(argv)


def main() -> int:
    """Run the chosen conversion; the exit code is 2 for a user's mistake."""
    arguments = parse(sys.argv[1:])
    return exit_on_user_error(lambda: arguments.run(arguments))


if __name__ == "__main__":
    sys.exit(main())
