"""Convert, inspect and compare checkpoints; each is a sub-command. `--help` after one lists its options.

One process and no torchrun: memory is bounded by a few times the largest tensor, but of gguf-to-hf by the model.
docs/conversion.md has examples.
"""

import argparse
import sys
import time
import warnings
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from a3po_megatron.errors import UserError, exit_on_user_error

if TYPE_CHECKING:
    from a3po_megatron.convert.weights import Summary

LAYOUT_OPTIONS = ("tensor_parallel", "pipeline_parallel", "expert_parallel")
MAX_SHARD_MB = 4096


def hf_to_megatron(arguments: argparse.Namespace) -> int:
    """Convert a Hugging Face folder to a megatron checkpoint: weights only, with config.json and tokenizer beside them."""
    if arguments.bridge:
        from a3po_megatron.actor.bridge import bridge_hf_to_megatron

        return by_bridge(arguments, lambda: bridge_hf_to_megatron(arguments.source, arguments.destination))
    from a3po_megatron.convert.megatron import hf_to_megatron, layout_of  # torch: only when it is needed

    meter = Meter()
    layout = layout_of(arguments.tensor_parallel, arguments.pipeline_parallel, arguments.expert_parallel)
    meter.report(
        arguments.destination,
        hf_to_megatron(arguments.source, arguments.destination, layout, arguments.dtype, show_progress),
    )
    return 0


def megatron_to_hf(arguments: argparse.Namespace) -> int:
    """Convert the weights of a megatron checkpoint, of a run or made here, to a Hugging Face folder."""
    config = config_of(arguments.source, arguments.config)
    if arguments.bridge:
        from a3po_megatron.actor.bridge import bridge_megatron_to_hf

        return by_bridge(arguments, lambda: bridge_megatron_to_hf(arguments.source, config, arguments.destination))
    from a3po_megatron.convert.megatron import megatron_to_hf

    meter = Meter()
    summary, ignored = megatron_to_hf(
        arguments.source, config, arguments.destination, arguments.dtype, show_progress, arguments.max_shard_mb << 20
    )
    meter.report(arguments.destination, summary, ignored)
    return 0


def by_bridge(arguments: argparse.Namespace, convert: Callable[[], None]) -> int:
    """Let megatron-bridge convert. Raises UserError for options that it does not take."""
    from a3po_megatron.convert.destination import writing

    ignored = {**dict.fromkeys(LAYOUT_OPTIONS, 1), "dtype": None, "max_shard_mb": MAX_SHARD_MB}
    for name, default in ignored.items():
        if (value := getattr(arguments, name, default)) != default:
            option = f"--{name.replace('_', '-')}"
            raise UserError(f"{option} {value}: megatron-bridge has its own way, leave {option} or --bridge out")
    start = time.monotonic()
    with writing(arguments.destination):
        convert()
    print(f"{arguments.destination}: written by megatron-bridge in {time.monotonic() - start:.1f} s")
    return 0


def nemo_to_megatron(arguments: argparse.Namespace) -> int:
    """Convert a NeMo 2 checkpoint (weights/ beside context/) to a megatron checkpoint of ours."""
    from a3po_megatron.convert.megatron import layout_of
    from a3po_megatron.convert.nemo import nemo_to_megatron

    meter = Meter()
    layout = layout_of(arguments.tensor_parallel, arguments.pipeline_parallel, arguments.expert_parallel)
    summary = nemo_to_megatron(
        arguments.source, arguments.destination, layout, arguments.vocab_size, arguments.dtype, show_progress
    )
    meter.report(arguments.destination, summary)
    return 0


def gguf_to_hf(arguments: argparse.Namespace) -> int:
    """Convert a GGUF file of the Llama type to a Hugging Face folder."""
    from a3po_megatron.convert.gguf import convert_gguf_to_hf

    meter = Meter()
    meter.report(arguments.destination, convert_gguf_to_hf(arguments.source, arguments.destination, arguments.dtype))
    return 0


def inspect(arguments: argparse.Namespace) -> int:
    """Say what a folder or file is: format, family, shape, parameters, type, step, layout."""
    from a3po_megatron.convert.inspection import inspect

    meter = Meter()
    found = inspect(arguments.path, own_config(arguments.path, arguments.config))
    print("\n".join([*found.lines(arguments.tensors), meter.line()]))
    return 0


def verify(arguments: argparse.Namespace) -> int:
    """Compare the log-probabilities of two folders on the same tokens; exit code 1 where they differ."""
    from a3po_megatron.convert import verify
    from a3po_megatron.launch.ranks import become_only_rank

    paths = arguments.a, arguments.b
    configs = config_of(arguments.a, arguments.config), config_of(arguments.b, arguments.config)
    tokens = verify.tokens_of(arguments.prompt, arguments.tokens, configs[0])
    warnings.simplefilter("ignore")  # megatron warns once a module about absent GPU packages
    become_only_rank()
    from a3po_megatron.actor import device
    from a3po_megatron.actor.scoring import SETTINGS

    meter = Meter()
    device.start(SETTINGS)
    try:
        found = verify.compare(*paths, configs, tokens)
    finally:
        device.stop()
    verdict = "the same" if found.max_difference <= arguments.tolerance else "DIFFERENT"
    print(
        f"{verdict}: over {found.num_tokens} tokens the log-probabilities differ by at most {found.max_difference:.3g} "
        f"(tolerance {arguments.tolerance:g}); their means are {found.mean_logprobs[0]:.6f} and {found.mean_logprobs[1]:.6f}"
    )
    print(meter.line())
    return int(verdict != "the same")


class Meter:
    """Measures a conversion and reports it in one line."""

    def __init__(self) -> None:
        from a3po_megatron.convert.memory import PeakMemory

        self.start = time.monotonic()
        self.memory = PeakMemory()

    def line(self) -> str:
        """Return the peak memory in words."""
        return f"peak memory {self.memory.bytes_above_start() / 1e6:.0f} MB above the imports"

    def report(self, destination: Path, summary: "Summary", ignored: dict[str, int] | None = None) -> None:
        """Print what was written, and what was left out."""
        print(
            f"{destination}: {summary} in {time.monotonic() - self.start:.1f} s; {self.line()}, "
            f"largest tensor {summary.largest_bytes / 1e6:.0f} MB"
        )
        for what, count in (ignored or {}).items():
            print(f"left out: {what} ({count} keys)")


def show_progress[Step](steps: Sequence[Step]) -> Iterable[Step]:
    """Draw a progress bar on a terminal."""
    from rich.console import Console
    from rich.progress import track

    console = Console(stderr=True)
    return track(steps, "converting", console=console, disable=not console.is_terminal)


def config_of(path: Path, given: Path | None) -> Path:
    """Return the folder with the config.json of what is at `path`. Raises UserError where nothing names one."""
    if (found := own_config(path, given)) is None:
        raise UserError(
            f"{path}: no config.json in it and no run around it; name the model's Hugging Face folder with --config"
        )
    return found


def own_config(path: Path, given: Path | None) -> Path | None:
    """Return the folder with the config.json of what is at `path`.

    A Hugging Face folder has its own; that of a checkpoint is the given one, or lies in it, or is that of its run's model.
    """
    from a3po_megatron.evaluate.target import RUN_FILE, read_run_config, run_of

    is_checkpoint, has_own = (path / ".metadata").is_file(), (path / "config.json").is_file()
    if given is not None and (is_checkpoint or not has_own):
        return given
    if has_own:
        return path
    if is_checkpoint and (run_of(path) / RUN_FILE).is_file():
        return Path(read_run_config(run_of(path)).model.path)
    return None


def parse(argv: list[str]) -> argparse.Namespace:
    """Read the command line; `run` of the result is the chosen sub-command."""
    parser = argparse.ArgumentParser(prog="convert_checkpoint.py", description=__doc__.splitlines()[0])
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    def command(name: str, run: object) -> argparse.ArgumentParser:
        added = commands.add_parser(name, help=run.__doc__, description=run.__doc__)
        added.set_defaults(run=run)
        return added

    for name, run in (("hf-to-megatron", hf_to_megatron), ("nemo-to-megatron", nemo_to_megatron)):
        to_megatron = command(name, run)
        add_folders(to_megatron)
        for what in LAYOUT_OPTIONS:
            option = f"--{what.replace('_', '-')}"
            to_megatron.add_argument(
                option, type=positive, default=1, metavar="N", help="cut as its ranks would (default: 1)"
            )
        add_dtype(to_megatron)
        if run is nemo_to_megatron:
            to_megatron.add_argument(
                "--vocab-size", type=positive, metavar="N", help="where the checkpoint does not say it"
            )
        else:
            add_bridge(to_megatron)
    to_hf = command("megatron-to-hf", megatron_to_hf)
    add_folders(to_hf)
    add_config(to_hf)
    add_dtype(to_hf)
    add_bridge(to_hf)
    to_hf.add_argument(
        "--max-shard-mb",
        type=positive,
        default=MAX_SHARD_MB,
        metavar="MB",
        help="of a safetensors file (default: %(default)s)",
    )
    gguf = command("gguf-to-hf", gguf_to_hf)
    gguf.add_argument("source", type=Path, metavar="SRC.gguf")
    gguf.add_argument("destination", type=Path, metavar="DST", help="folder to make; must not exist")
    gguf.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32", help="default: %(default)s")
    inspecting = command("inspect", inspect)
    inspecting.add_argument("path", type=Path, metavar="PATH")
    inspecting.add_argument("--tensors", action="store_true", help="list every tensor with shape and type")
    add_config(inspecting)
    verifying = command("verify", verify)
    verifying.add_argument("a", type=Path, metavar="A")
    verifying.add_argument("b", type=Path, metavar="B")
    tokens = verifying.add_mutually_exclusive_group()
    tokens.add_argument("--prompt", help="text to compare on (default: random tokens)")
    tokens.add_argument("--tokens", metavar="1,2,3", help="token ids to compare on")
    verifying.add_argument("--tolerance", type=float, default=1e-4, help="in nats, of one token (default: %(default)s)")
    add_config(verifying)
    return parser.parse_args(argv)


def add_folders(parser: argparse.ArgumentParser) -> None:
    """Add source and destination."""
    parser.add_argument("source", type=Path, metavar="SRC")
    parser.add_argument("destination", type=Path, metavar="DST", help="folder to make; must not exist")


def add_config(parser: argparse.ArgumentParser) -> None:
    """Add the folder of a model's config."""
    parser.add_argument(
        "--config",
        type=Path,
        metavar="HF_FOLDER",
        help="config.json and tokenizer of a checkpoint that has none of its own",
    )


def add_dtype(parser: argparse.ArgumentParser) -> None:
    """Add the type to convert to."""
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), help="default: as each tensor is")


def add_bridge(parser: argparse.ArgumentParser) -> None:
    """Add the other back end."""
    parser.add_argument("--bridge", action="store_true", help="let megatron-bridge do it (GPU nodes)")


def positive(text: str) -> int:
    """Return a whole number above 0."""
    number = int(text)
    if number < 1:
        raise ValueError
    return number


def main() -> int:
    """Run the chosen sub-command; the exit code is 2 for a user's mistake."""
    return exit_on_user_error(lambda: run(parse(sys.argv[1:])))


def run(arguments: argparse.Namespace) -> int:
    """Run the chosen sub-command on what is there."""
    for name in ("source", "path", "a", "b"):
        if (path := getattr(arguments, name, None)) is not None and not path.exists():
            raise UserError(f"{path}: no such file or folder")
    return int(arguments.run(arguments))


if __name__ == "__main__":
    sys.exit(main())
