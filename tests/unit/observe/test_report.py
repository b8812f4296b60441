"""Progress and report are made from the files of a run alone."""

import io
import json
from pathlib import Path

import pytest
from rich.console import Console

from a3po_megatron.errors import UserError
from a3po_megatron.observe.progress import Progress
from a3po_megatron.observe.report import Report
from a3po_megatron.observe.rows import RowTail


def step(index: int, **changes) -> dict:
    row = {"step": index, "version": index, "reward/mean": 0.1 * index, "staleness/mean": 1.5, "staleness/max": 3}
    row |= {"rollout/tokens_per_s": 1200.0, "time/row_s": 2.0, "time/step_s": 1.0, "time/prox_s": 0.25}
    row |= {"rollout/generating_while_training": 0.5, "rollout/samples_of_several_versions": 2}
    return row | {"parity/logprob_max_abs": 1e-6 if index == 0 else None} | changes


def evaluation(version: int, accuracy: float) -> dict:
    line = {"version": version, "newest_version": version, "num_problems": 100, "accuracy": accuracy}
    return line | {"standard_error": 0.05, "time_s": 1.0}


def write(path: Path, rows: list[dict]) -> None:
    path.write_text("".join(f"{json.dumps(row)}\n" for row in rows))


def test_a_line_that_is_being_written_waits_for_its_end(tmp_path):
    path = tmp_path / "rows.jsonl"
    tail = RowTail(path)
    assert tail.new_rows() == []
    path.write_text('{"a": 1}\n{"a": ')
    assert tail.new_rows() == [{"a": 1}]
    with path.open("a") as file:
        file.write("2}\n")
    assert tail.new_rows() == [{"a": 2}]
    assert tail.new_rows() == []


@pytest.mark.parametrize("line", ['{"step": 0}{"step": 1', "[1]", "7", "null"])
def test_a_line_that_is_no_row_is_named_with_its_file(tmp_path, line):
    (tmp_path / "rows.jsonl").write_text(f'{{"step": 0}}\n{line}\n')
    with pytest.raises(UserError, match=r"rows\.jsonl: damaged: b'.+' is no JSON object; remove that line"):
        RowTail(tmp_path / "rows.jsonl").new_rows()


def test_progress_away_from_a_terminal_is_a_line_a_step_with_the_time_left(tmp_path):
    screen = io.StringIO()
    with Progress(tmp_path, num_steps=3, console=Console(file=screen, width=200)) as progress:
        progress.phase("vLLM starts")
        write(tmp_path / "evals.jsonl", [evaluation(0, 0.25)])
        write(tmp_path / "metrics.jsonl", [step(0), step(1)])
        progress.update()
    lines = screen.getvalue().splitlines()
    assert lines[0] == "... vLLM starts"
    assert lines[1] == "held-out accuracy 0.250 +- 0.050 at version 0 (100 problems, 1.0 s)"
    assert lines[2] == "step 1/3  reward 0.000  staleness 1.50 (max 3)  1200 tokens/s"
    assert lines[3].endswith("1200 tokens/s  0 min 00 s left")


def test_the_report_holds_the_figures_of_the_run(tmp_path):
    write(tmp_path / "evals.jsonl", [evaluation(0, 0.25), evaluation(2, 0.5)])
    write(tmp_path / "metrics.jsonl", [step(0), step(1, **{"staleness/max": 4})])
    report = Report.read(tmp_path)
    figures = dict(report.lines())
    assert figures["held-out accuracy before"] == "0.250 +- 0.050"
    assert figures["held-out accuracy after"] == "0.500 +- 0.050"
    assert figures["staleness, max"] == "4 versions"
    assert figures["proximal step, share of training time"] == "25.00%"
    assert figures["generation running while the actor trains"] == "50% of the time"
    table, picture = report.write(tmp_path)
    assert "| held-out accuracy after | 0.500 +- 0.050 |" in table.read_text()
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_a_run_without_a_step_has_a_report_too(tmp_path):
    assert dict(Report.read(tmp_path).lines())["steps"] == "0"
