"""The command lines: tools/judge_answers.py and tools/bench_rewards.py."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]


def run_tool(name: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, f"tools/{name}.py", *arguments]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=110, env=environment)


def write_rows(path: Path, rows: list[dict[str, object]]) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def test_every_row_gets_its_reward_and_reason_in_order(tmp_path: Path) -> None:
    rows: list[dict[str, object]] = [
        {"gold": "42", "response": "Answer: 42"},
        {"gold": "x = 3\n#### 3", "response": "\\boxed{3}"},
        {"gold": 42, "response": "Answer: 41"},
        {"gold": "42", "response": ""},
        {"gold": "5", "response": "\ud800 5"},
    ]
    done = run_tool("judge_answers", write_rows(tmp_path / "rows.jsonl", rows), "--workers", "1")
    assert (done.returncode, done.stderr) == (0, "")
    judged = [json.loads(line) for line in done.stdout.splitlines()]
    assert [row["reward"] for row in judged] == [1.0, 1.0, 0.0, 0.0, 0.0]
    assert all(row["reason"] for row in judged)
    assert judged[3]["reason"] == "the response is empty"


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ('{"gold": "1"}', "line 2: expected an object with 'gold' and 'response'; 'response' is missing"),
        ('{"gold": "1", "response": 2}', "line 2: 'response' is not text but int"),
        ("{broken", "line 2: not valid JSON"),
        ("", "line 2: not valid JSON"),
    ],
)
def test_a_broken_row_is_one_line_and_exit_code_2(tmp_path: Path, line: str, message: str) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text('{"gold": "1", "response": "1"}\n' + line + "\n" + '{"gold": "1", "response": "1"}\n')
    done = run_tool("judge_answers", str(path))
    assert done.returncode == 2
    assert done.stdout == ""
    assert done.stderr.startswith(f"error: {path}, {message}")
    assert done.stderr.count("\n") == 1


def test_a_gold_that_cannot_be_judged_is_named_after_all_rows_were_judged(tmp_path: Path) -> None:
    rows: list[dict[str, object]] = [
        {"gold": "\\frac{", "response": "Answer: 5"},
        {"gold": "5", "response": "Answer: 5"},
    ]
    done = run_tool("judge_answers", write_rows(tmp_path / "rows.jsonl", rows), "--workers", "1")
    assert done.returncode == 2
    assert [json.loads(line)["reward"] for line in done.stdout.splitlines()] == [0.0, 1.0]
    assert "rows.jsonl, line 1: the gold '\\\\frac{' cannot be judged" in done.stderr


def test_the_throughput_is_reported_for_one_and_two_workers() -> None:
    done = run_tool("bench_rewards", "--json", "--scale", "0.005")
    rows = [json.loads(line) for line in done.stdout.splitlines()]
    assert [(row["answers"], row["workers"]) for row in rows] == [
        (kind, workers) for workers in (1, 2) for kind in ("integer", "fraction", "expression")
    ]
    assert all(row["per_s"] > 0 for row in rows)
