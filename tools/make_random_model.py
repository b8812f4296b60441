"""Make a Hugging Face folder with random weights from a config.json and the tokenizer files of another folder.

For runs that show a path and teach nothing: a tiny model with a real vocabulary costs seconds where the real one costs hours.
"""

import argparse
import shutil
import sys
from pathlib import Path

from a3po_megatron.errors import UserError, exit_on_user_error

TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "generation_config.json")


def make(config: Path, tokenizer: Path, destination: Path, seed: int) -> int:
    """Write the folder; one that is there already is left alone."""
    if (destination / "config.json").is_file():
        print(f"{destination}: there already")
        return 0
    for folder, name in ((config, "config.json"), (tokenizer, "tokenizer.json")):
        if not (folder / name).is_file():
            raise UserError(f"{folder}: no {name} there; name a folder that has one")
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(config)).float()
    temporary = destination.with_name(destination.name + ".incomplete")
    shutil.rmtree(temporary, ignore_errors=True)
    model.save_pretrained(temporary)
    for name in TOKENIZER_FILES:
        if (tokenizer / name).is_file():
            shutil.copyfile(tokenizer / name, temporary / name)
    temporary.rename(destination)
    print(f"{destination}: {sum(p.numel() for p in model.parameters()) / 1e6:.1f} M random parameters, seed {seed}")
    return 0


def main() -> int:
    """Parse and make; the exit code is 2 for a user's mistake."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("config", type=Path, help="folder with config.json")
    parser.add_argument("tokenizer", type=Path, help="folder with tokenizer.json")
    parser.add_argument("destination", type=Path)
    parser.add_argument("--seed", type=int, default=0, help="default: %(default)s")
    arguments = parser.parse_args()
    return exit_on_user_error(
        lambda: make(arguments.config, arguments.tokenizer, arguments.destination, arguments.seed)
    )


if __name__ == "__main__":
    sys.exit(main())
