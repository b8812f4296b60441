"""Make the golden runs anew, with a real vLLM each: python -m tests.golden.record [METHOD ...]

Only after a change that is meant to change what training does; its commit says why. Refuses a run that other CPUs may not repeat.
"""

import argparse
import shutil
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from a3po_megatron import wire
from a3po_megatron.errors import exit_on_user_error
from a3po_megatron.launch import local
from a3po_megatron.launch.processes import Role, Roles
from a3po_megatron.observe.rows import read_rows
from a3po_megatron.records import Batch
from recipes import run_local
from tests.golden import edges
from tests.golden.model import write_random_model
from tests.golden.settings import CONFIG, METHODS, ROOT, overrides
from tests.golden.stored import FOLDER, write


class RecordedRoles(Roles):
    """The roles of a run whose controller keeps the batches."""

    def start(self, name: str, arguments: Sequence[str], stop_s: float) -> Role:
        module = {"recipes.controller": "tests.golden.controller"}
        return super().start(name, [module.get(argument, argument) for argument in arguments], stop_s)


def record(method: str, folder: Path, model: Path) -> None:
    """Run the system in `folder` and store what it did."""
    arguments = [str(ROOT / CONFIG), f"run.dir={folder}", f"model.path={model}", *overrides(method)]
    if (code := run_local.main(arguments)) != 0:
        raise SystemExit(code)
    batches = [wire.decode(path.read_bytes(), Batch) for path in sorted((folder / "batches").iterdir())]
    config, _ = run_local.resolve(arguments[0], arguments[1:])
    rows, group_size = read_rows(folder / "metrics.jsonl"), config.controller.samples_per_prompt
    file = write(method, rows, batches, group_size, folder / "recorded")
    edges.check(method, edges.nearest(method, file.parent))
    FOLDER.mkdir(exist_ok=True)
    shutil.copy(file, FOLDER)


def main() -> int:
    """Record the methods that are named, or all."""
    parser = argparse.ArgumentParser(prog="python -m tests.golden.record", description=__doc__.splitlines()[0])
    parser.add_argument("methods", nargs="*", metavar="METHOD", help=f"of {', '.join(METHODS)}; default: all")
    methods = parser.parse_args().methods
    if unknown := set(methods) - set(METHODS):
        parser.error(f"{', '.join(sorted(unknown))}: the methods are {', '.join(METHODS)}")
    local.Roles = RecordedRoles
    with tempfile.TemporaryDirectory(prefix="golden-") as work:
        model = write_random_model(Path(work) / "model")
        for method in methods or METHODS:
            record(method, Path(work) / method, model)
    return 0


if __name__ == "__main__":
    sys.exit(exit_on_user_error(main))
