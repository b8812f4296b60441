"""pass@1, avg@n and pass@k of a model, on GSM8K, MATH500, AIME or any other problems.

    python recipes/evaluate.py MODEL_FOLDER sets=[gsm8k,math500]
    python recipes/evaluate.py RUN/checkpoints/step_000100 sets=[aime24] num_samples=16 temperature=0.6 pass_k=[1,8,16]
    python recipes/evaluate.py RUN                              the live fleet of a run that goes on, which it does not stop
    python recipes/evaluate.py CONFIG.yaml [target=... num_samples=4 ...] [--print-config]

A folder or checkpoint gets vLLM servers of its own, which end with it. Leaves report.json, report.md and samples.jsonl.
Ends with exit code 0, 2 for a wrong setting, file or row, 130 after Ctrl-C, 1 for anything else.
"""

import argparse
import asyncio
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from rich.console import Console
from rich.table import Table

from a3po_megatron.config.load import to_yaml
from a3po_megatron.errors import exit_on_user_error, say_why
from a3po_megatron.evaluate import build
from a3po_megatron.evaluate.own_servers import EvaluationStopped
from a3po_megatron.evaluate.progress import ResponseProgress
from a3po_megatron.evaluate.report import table_of, versions_line, write_files
from a3po_megatron.evaluate.result import Result


def main(arguments: Sequence[str]) -> int:
    """Parse and check, evaluate, report."""
    parser = argparse.ArgumentParser(
        prog="evaluate.py", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("what", help="a YAML file of settings, or what to evaluate: a folder or a URL")
    parser.add_argument("overrides", nargs="*", help="settings to change, for example num_samples=4")
    parser.add_argument("--print-config", action="store_true", help="print the resolved settings and stop")
    options = parser.parse_intermixed_args(arguments)
    is_file = options.what.endswith((".yaml", ".yml"))
    overrides = options.overrides if is_file else [f"target={options.what}", *options.overrides]
    config, target = build.resolve(options.what if is_file else None, overrides)
    build.check(config, target)
    if options.print_config:
        print(to_yaml(config), end="")
        return 0
    job = build.prepare(config, target)
    try:
        result, time_s = evaluate(job)
    except EvaluationStopped as ending:
        print(f"error: {ending}", file=sys.stderr, flush=True)
        return ending.exit_code
    except Exception as error:
        return say_why(error)
    about = {**job.about(), "responses_s": round(time_s, 1)}
    write_files(job.folder, result, about, job.data.decode)
    show(result, job.folder)
    return 0


def evaluate(job: build.Job) -> tuple[Result, float]:
    """Evaluate; return the result and the seconds that the answers took."""
    console = Console(highlight=False)
    console.print(f"{job.config.target}: {len(job.problems)} problems x {job.config.num_samples}", soft_wrap=True)
    with model_folder(job) as model, ResponseProgress(console) as progress:
        return asyncio.run(build.run(job, model, progress.say, progress.update))


@contextmanager
def model_folder(job: build.Job) -> Iterator[Path]:
    """Yield the Hugging Face folder of the target: its own, or one made from a checkpoint, which is gone afterwards."""
    if job.target.kind != "checkpoint":
        yield job.target.model
        return
    with tempfile.TemporaryDirectory(prefix="exported-", dir=job.folder) as folder:
        model = Path(folder) / "model"
        from a3po_megatron.convert.megatron import megatron_to_hf  # torch: only when it is needed

        megatron_to_hf(Path(job.config.target), job.target.model, model)
        yield model


def show(result: Result, folder: Path) -> None:
    """Print the table and where the files are."""
    head, *rows = table_of(result)
    table = Table()
    for name in head:
        table.add_column(name, no_wrap=True)
    for row in rows:
        table.add_row(*row)
    Console(width=max(Console().width, 20 * len(head))).print(table)  # figures are not to be cut
    print(versions_line(result))
    print(f"{folder}/report.json  {folder}/report.md  {folder}/samples.jsonl")


if __name__ == "__main__":
    sys.exit(exit_on_user_error(lambda: main(sys.argv[1:])))
