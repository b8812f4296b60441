"""A whole run on this machine: controller, vLLM and actor, started, watched and ended together.

    python recipes/run_local.py configs/demo.yaml [run.num_steps=20 actor.pipeline_parallel=2 ...] [--print-config]

Ends with exit code 0 when the run is done, 2 for a wrong setting, file or row, 130 after Ctrl-C, 1 when a role failed.
It leaves the run's folder and nothing else: no process, no port, no shared memory.
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.table import Table

from a3po_megatron.config.load import load_config, to_yaml
from a3po_megatron.config.schema import TrainConfig
from a3po_megatron.errors import exit_on_user_error
from a3po_megatron.launch import local
from a3po_megatron.launch.ports import free_port
from a3po_megatron.launch.run_folder import check_before_start
from a3po_megatron.observe.progress import Progress
from a3po_megatron.observe.report import Report


def main(arguments: Sequence[str]) -> int:
    """Parse and check, run the roles, report."""
    parser = argparse.ArgumentParser(prog="run_local.py", description=__doc__.splitlines()[0])
    parser.add_argument("config", help="a YAML file, for example configs/demo.yaml")
    parser.add_argument("overrides", nargs="*", help="settings to change, for example run.num_steps=20")
    parser.add_argument("--print-config", action="store_true", help="print the resolved settings and stop")
    options = parser.parse_intermixed_args(arguments)
    config, for_roles = resolve(options.config, options.overrides)
    check_before_start(config)
    if options.print_config:
        print(to_yaml(config), end="")
        return 0
    token = local.prepare(config)
    run_dir = Path(config.run.dir)
    with Progress(run_dir, config.run.num_steps) as progress:
        ending = local.run(config, for_roles, token, progress)
    if ending.exit_code == 0:
        show_report(run_dir)
    for line in ending.log:
        print(f"    {line}", file=sys.stderr)
    if ending.reason:
        print(f"error: {ending.reason}", file=sys.stderr, flush=True)
    return ending.exit_code


def resolve(config_file: str, overrides: Sequence[str]) -> tuple[TrainConfig, list[str]]:
    """Return the settings and the arguments that give every role the same ones: a free port is chosen here."""
    config = load_config(TrainConfig, config_file, overrides)
    if config.controller.port == 0:
        overrides = [*overrides, f"controller.port={free_port('controller.port', config.controller.host)}"]
        config = load_config(TrainConfig, config_file, overrides)
    return config, [config_file, *overrides]


def show_report(run_dir: Path) -> None:
    """Print the run's table; it and the picture go into the run's folder."""
    report = Report.read(run_dir)
    table = Table(show_header=False, title=str(run_dir))
    for what, figure in report.lines():
        table.add_row(what, figure)
    Console().print(table)
    print("  ".join(str(path) for path in report.write(run_dir)))


if __name__ == "__main__":
    sys.exit(exit_on_user_error(lambda: main(sys.argv[1:])))
