"""What a cluster job checks before any GPU time is spent. The scripts in slurm/ call it; each subcommand says one thing.

    python -m recipes.job plan CONFIG [OVERRIDES] --actor-nodes n1,n2 --rollout-nodes n3,n4 ...   is the split right? a table
    python -m recipes.job node CONFIG [OVERRIDES] ... --facts DIR --job-id J --canary TEXT        on each node: what is here?
    python -m recipes.job open CONFIG [OVERRIDES] ... --facts DIR                                 do the nodes fit? run folder

`open` prints the address of the first actor node and the first of the job's ports. Whatever does not fit is one line, exit code 2.
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.table import Table

from a3po_megatron.config.load import load_config
from a3po_megatron.config.model_shape import read_model_shape
from a3po_megatron.config.schema import TrainConfig
from a3po_megatron.errors import exit_on_user_error
from a3po_megatron.estimate.plan import GB
from a3po_megatron.launch import node_facts
from a3po_megatron.launch.cluster import JobNodes, check_cluster, describe, memory_of, num_ports
from a3po_megatron.launch.run_folder import check_before_start, open_run_folder

TABLE_WIDTH = 100  # where no terminal tells


def main(arguments: Sequence[str]) -> int:
    """Parse, check, answer."""
    options = parse(arguments)
    # The job chooses the controller's port itself, once it has seen which are free.
    config = load_config(TrainConfig, options.config, [*options.overrides, f"controller.port={node_facts.LOWEST_PORT}"])
    cluster = JobNodes(
        _names(options.actor_nodes), _names(options.rollout_nodes), options.actor_ranks_per_node, options.gpus_per_node
    )
    if options.command == "node":
        node_facts.wait_for_canary(options.facts, options.canary)
        facts = node_facts.look_around(config.model.path, Path(config.run.dir), options.job_id, num_ports(config))
        node_facts.write_facts(options.facts, facts)
        return 0
    check_cluster(cluster, config)
    if options.command == "plan":
        check_before_start(config)
        rows = describe(cluster, config)
        if cluster.gpus_per_node:
            rows += memory_of(config, read_model_shape(config.model.path), options.gpu_memory_gb * GB)
        show(rows)
        return 0
    all_facts = node_facts.read_facts(options.facts, cluster.nodes)
    min_free_bytes = int(options.min_free_gb * 1e9)
    port = node_facts.check_facts(all_facts, cluster.gpus_per_node, config.model.path, min_free_bytes)
    open_run_folder(config)
    print(all_facts[0].address, port)
    return 0


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    """Return the options of any of the subcommands."""
    parser = argparse.ArgumentParser(prog="python -m recipes.job", description=__doc__.splitlines()[0])
    parser.add_argument("command", choices=("plan", "node", "open"))
    parser.add_argument("config", help="YAML file of the run")
    parser.add_argument("overrides", nargs="*", help="settings to change")
    parser.add_argument("--actor-nodes", required=True, help="names, with commas")
    parser.add_argument("--rollout-nodes", required=True, help="names, with commas")
    parser.add_argument("--actor-ranks-per-node", type=int, required=True)
    parser.add_argument("--gpus-per-node", type=int, required=True, help="0: a cluster without GPUs")
    parser.add_argument("--gpu-memory-gb", type=float, default=80.0, help="of each GPU (default: %(default)s)")
    parser.add_argument("--facts", type=Path, help="folder on the shared file system in which the nodes write")
    parser.add_argument("--canary", help="what the canary file in that folder says")
    parser.add_argument("--job-id", type=int, help="the job's ports follow from it")
    parser.add_argument("--min-free-gb", type=float, default=0.0, help="free space that the run's folder must have")
    return parser.parse_intermixed_args(arguments)


def show(rows: Sequence[tuple[str, str]]) -> None:
    """Print the plan."""
    table = Table(show_header=False, title="plan of the job")
    for what, figure in rows:
        table.add_row(what, figure)
    console = Console()
    (console if console.is_terminal else Console(width=TABLE_WIDTH)).print(table)


def _names(text: str) -> tuple[str, ...]:
    return tuple(name for name in text.split(",") if name)


if __name__ == "__main__":
    sys.exit(exit_on_user_error(lambda: main(sys.argv[1:])))
