"""What a run of CONFIG needs on a cluster: nodes, memory of a GPU by item, tokens and time of a step. Runs without a GPU.

Memory is computed by a3po_megatron/estimate/memory.py, time from the rates that are printed: estimates, see docs/parallelism.md.
Exit code 2, and one line that names the item, when the roles do not fit the nodes or a GPU.

    python tools/plan_cluster.py configs/qwen3_8b_dapo.yaml --nodes 4 --hf-config Qwen3-8B/config.json
"""

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import asdict, fields, replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))  # of this checkout, from whichever folder it is started
from a3po_megatron.config.check import check_train
from a3po_megatron.config.load import load_config
from a3po_megatron.config.model_shape import ModelShape, read_model_shape
from a3po_megatron.config.schema import TrainConfig
from a3po_megatron.errors import UserError, exit_on_user_error
from a3po_megatron.estimate import report
from a3po_megatron.estimate.plan import GB, Cluster, make_plan
from a3po_megatron.estimate.step_time import (
    ASSUMED_GENERATED_PER_TRAINED,
    ASSUMED_PROMPT_TOKENS,
    Rates,
    Workload,
    assumed_workload,
)


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    """Read the command line; `overrides` are settings such as actor.data_parallel=2."""
    parser = argparse.ArgumentParser(
        prog="plan_cluster.py", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("config", type=Path, help="YAML file of a reinforcement learning run")
    parser.add_argument("overrides", nargs="*", metavar="section.key=value")
    parser.add_argument("--nodes", type=int, required=True, help="of the whole job, those of rollout included")
    parser.add_argument("--gpus-per-node", type=int, default=8, help="default: %(default)s")
    parser.add_argument("--gpu-memory-gb", type=float, default=80.0, help="1 GB is 10^9 bytes; default: %(default)s")
    parser.add_argument("--hf-config", type=Path, help="the model's config.json; default: that in model.path")
    parser.add_argument("--mean-prompt-tokens", type=float, help=f"default: {ASSUMED_PROMPT_TOKENS:g}")
    parser.add_argument("--mean-response-tokens", type=float, help="default: a quarter of rollout.max_response_tokens")
    parser.add_argument(
        "--generated-per-trained",
        type=float,
        help=f"groups generated for one that is trained; default: {ASSUMED_GENERATED_PER_TRAINED:g} with "
        "controller.dynamic_sampling, else 1",
    )
    form = parser.add_mutually_exclusive_group()
    form.add_argument("--json", action="store_true", help="print one JSON object instead of a table")
    form.add_argument(
        "--comment", action="store_true", help="print the comment at the head of the configuration instead"
    )
    form.add_argument("--row", action="store_true", help="print the row of the table in docs/parallelism.md instead")
    for rate in fields(Rates):
        parser.add_argument(
            f"--{rate.name.replace('_', '-')}", type=float, default=rate.default, help="default: %(default)g"
        )
    return parser.parse_intermixed_args(list(arguments))


def read_workload(options: argparse.Namespace, config: TrainConfig) -> Workload:
    """Return the mean lengths that are planned with."""
    work = assumed_workload(config)
    given = {
        "prompt_tokens": options.mean_prompt_tokens,
        "response_tokens": options.mean_response_tokens,
        "generated_per_trained": options.generated_per_trained,
    }
    return replace(work, **{name: value for name, value in given.items() if value is not None})


def check_options(options: argparse.Namespace) -> None:
    """Refuse numbers that are no sizes, lengths or rates. Raises UserError."""
    for name, value in vars(options).items():
        if isinstance(value, int | float) and not isinstance(value, bool) and not value > 0:
            raise UserError(f"--{name.replace('_', '-')}={value}: a number above 0")


def read_settings(options: argparse.Namespace) -> tuple[TrainConfig, ModelShape]:
    """Return the settings, checked against the model's shape. Raises UserError."""
    config = load_config(TrainConfig, options.config, options.overrides)
    source = options.hf_config or config.model.path
    if not source:
        raise UserError(
            "model.path is empty: name the model with model.path=FOLDER, or its shape with --hf-config config.json"
        )
    shape = read_model_shape(source)
    check_train(replace(config, model=replace(config.model, path=str(source))), shape)
    return config, shape


def main(arguments: Sequence[str]) -> int:
    """Print the plan."""
    options = parse(arguments)
    check_options(options)
    config, shape = read_settings(options)
    work = read_workload(options, config)
    rates = Rates(**{rate.name: getattr(options, rate.name) for rate in fields(Rates)})
    cluster = Cluster(options.nodes, options.gpus_per_node, options.gpu_memory_gb * GB)
    plan = make_plan(config, shape, cluster, work, rates)
    if options.json:
        totals = {
            "actor_total_bytes": plan.actor.total,
            "host_total_bytes": plan.host.total,
            "kv_tokens": plan.server.kv_tokens,
            "step_s": plan.time.step_s,
        }
        print(json.dumps(asdict(plan) | totals | {"workload": asdict(work), "rates": asdict(rates)}))
    elif options.comment:
        print(report.comment(config, plan, cluster, work, rates))
    elif options.row:
        print(report.row(options.config.stem, config, plan, cluster))
    else:
        print(report.table(config, plan, cluster, work))
    return 0


if __name__ == "__main__":
    sys.exit(exit_on_user_error(lambda: main(sys.argv[1:])))
