"""Write one clean file of training problems, and a report of what became of every row.

    python tools/prepare_data.py OUT.jsonl train.dapo={} train.gsm8k={} evaluation.math500={} evaluation.aime24={}
    python tools/prepare_data.py OUT.jsonl --config configs/RUN.yaml

Settings are those of a run's `data` section (a3po_megatron/config/data.py): here without `data.` in front, or with
`--config` those of a run's file. OUT.jsonl has the fields id, problem, answer, source; a run reads it with
`data.train.NAME={kind: columns, path: OUT.jsonl, problem_column: problem, answer_column: answer, id_column: id}`.
The report is printed and written to OUT.report.json.
"""

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from a3po_megatron.config.data import DataConfig
from a3po_megatron.config.load import load_config
from a3po_megatron.config.schema import TrainConfig
from a3po_megatron.data.check import check_data
from a3po_megatron.data.load import CleanData, load_clean
from a3po_megatron.errors import UserError, exit_on_user_error


def main(arguments: Sequence[str]) -> int:
    """Parse, clean, write; return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("out", type=Path, help="the file to write; must not be there yet")
    parser.add_argument("settings", nargs="*", help="such as train.dapo={} evaluation.math500={}")
    parser.add_argument("--config", help="a run's YAML file: its data section is used; settings then begin with data.")
    options = parser.parse_intermixed_args(arguments)
    if options.config is None:
        config = replace(load_config(DataConfig, None, options.settings), task="problems")
    else:
        config = load_config(TrainConfig, options.config, options.settings).data
    report_file = options.out.with_suffix(".report.json")
    for path in (options.out, report_file):
        if path.exists():
            raise UserError(f"{path} is there already; name another file or remove it")
    check_data(config)
    data = load_clean(config)
    options.out.parent.mkdir(parents=True, exist_ok=True)
    count = write_problems(data, options.out)
    data.report.save(report_file)
    print(*data.report.lines(), sep="\n")
    print(f"{options.out}: {count} problems; {report_file}: every count")
    return 0


def write_problems(data: CleanData, path: Path) -> int:
    """Write the training problems as JSON lines; return how many."""
    rows = [
        {"id": row.id, "problem": row.problem, "answer": row.answer, "source": name}
        for name, clean in data.train.items()
        for row in clean.rows
    ]
    path.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows), encoding="utf-8")
    return len(rows)


if __name__ == "__main__":
    sys.exit(exit_on_user_error(lambda: main(sys.argv[1:])))
